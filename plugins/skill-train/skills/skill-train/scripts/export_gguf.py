# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["skill-train[gguf,train]==0.1.0"]
# ///
"""Make GGUF files of a run or a model folder: `uv run scripts/export_gguf.py FOLDER --quant q8_0,q4_k_m`.

`skill-train export-gguf` without an installation: the same options (`--help`), the same JSON, the same exit codes. The
first call compiles llama-cpp-python: about 4 minutes on 2 cores, silent while it does.
"""

import sys

from skill_train.cli import main

if __name__ == "__main__":
    main(["export-gguf", *sys.argv[1:]])
