# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["skill-train"]
#
# [tool.uv.sources]
# skill-train = { path = ".." }
# ///
"""Say what a dataset is and whether training can use it: `uv run scripts/inspect_dataset.py DATA.jsonl`.

`skill-train data` without an installation: the same options (`--help`), the same JSON, the same exit codes.
With `--model` it counts tokens, and that needs transformers: install skill-train with its extra `train` for it.
"""

import sys

from skill_train.cli import main

if __name__ == "__main__":
    main(["data", *sys.argv[1:]])
