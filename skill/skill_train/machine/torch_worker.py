"""Child process: checks whether the installed torch can use the device of this machine.

Job: {"device"}. A torch that cannot be loaded, or crashes, ends this process only.
"""

from __future__ import annotations

from typing import Any

from skill_train.core.worker import worker_main


def run(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    device, trouble = job["device"], ""
    usable = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available, "cpu": lambda: True}[device]()
    if usable:
        try:
            ones = torch.ones(8, 8, device=device)
            usable = float((ones @ ones).sum()) == 512.0
        except RuntimeError as problem:  # such as a GPU that this build has no kernels for
            usable, trouble = False, str(problem).splitlines()[0]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "usable": usable, "trouble": trouble}


if __name__ == "__main__":
    worker_main(run)
