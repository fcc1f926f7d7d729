"""The training program with a 4-bit base, on a processor: `python four_bit_on_cpu.py RUN/plan.json`.

bitsandbytes (0.50) packs 4-bit weights anew on a processor with AVX512-BF16 as soon as a model does not train, and then
computes in bfloat16, without a gradient. This switches that off. What is left is what it does on a GPU: the weights are
unpacked to the type of the computation, and multiplied.
"""

import runpy
import sys
from pathlib import Path

import bitsandbytes.nn.modules

bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
sys.argv[0] = str(Path(__file__).resolve().parents[2] / "scripts" / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
