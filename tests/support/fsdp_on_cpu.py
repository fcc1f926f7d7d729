"""The training program, sharded by FSDP 2 over processes without a GPU: `python fsdp_on_cpu.py RUN/plan.json`.

accelerate 1.15 takes FSDP for granted on accelerators only, though torch can shard over gloo. Where it has decided for
plain CPU processes, this says FSDP; all else is the program and the libraries as they are.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import accelerate.state
from accelerate.utils import DistributedType

_plain = accelerate.state.AcceleratorState.__init__


def _sharded(self: Any, *args: Any, **kwargs: Any) -> None:
    _plain(self, *args, **kwargs)
    if kwargs.get("fsdp_plugin") is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, kwargs["fsdp_plugin"]
        accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    accelerate.state.AcceleratorState.__init__ = _sharded
    path = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program  # its data classes look for their module
    spec.loader.exec_module(program)
    sys.exit(program.main(sys.argv[1:]))
