"""The training program in parts. `scripts/build_train.py` joins them into `scripts/train.py`, which runs alone."""
