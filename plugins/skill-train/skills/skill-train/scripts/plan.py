# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["skill-train==0.1.0"]
# ///
"""Decide whether to train here or in the cloud: `uv run scripts/plan.py --model MODEL --data DATA.jsonl`.

`skill-train plan` without an installation: the same options (`--help`), the same JSON, the same exit codes. It spends
nothing and needs no GPU.
"""

import sys

from skill_train.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
