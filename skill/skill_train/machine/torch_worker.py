"""Child process: checks whether the installed torch can use the device of this machine.

A torch that cannot be loaded, or crashes, ends this process only.
"""

from typing import TypedDict

from skill_train.core.worker import worker_main
from skill_train.program.events import first_line


class TorchAnswer(TypedDict):
    """torch's answer. `cuda` is the CUDA version that torch was built for. `trouble` is torch's reason why the device
    is not usable, or empty."""

    version: str
    cuda: str | None
    usable: bool
    trouble: str


def run(device: str) -> TorchAnswer:
    import torch

    trouble = ""
    usable = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}[device]()
    if usable:
        try:
            ones = torch.ones(8, 8, device=device)
            usable = float((ones @ ones).sum()) == 512.0
        except RuntimeError as problem:  # for example, this build has no kernels for the GPU
            usable, trouble = False, first_line(problem)
    return {"version": str(torch.__version__), "cuda": torch.version.cuda, "usable": usable, "trouble": trouble}


if __name__ == "__main__":
    worker_main(run, str)
