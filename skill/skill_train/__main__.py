"""`python -m skill_train` is `skill-train`."""

from skill_train.cli import main

if __name__ == "__main__":
    main()
