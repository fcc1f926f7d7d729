"""At least 20,000 hostile inputs: none ends in anything but an answer or a SkillTrainError.

Each target of `hostile_files`, `hostile_records` and `hostile_hub` runs in a child process: inputs by hypothesis, which
shrinks what fails, and by atheris, which follows the coverage of our own modules. `hostile.command` and
`hostile.judged` say what an input may not do: a traceback, more than ten seconds, a file outside of the sandbox, a
control character for the terminal. The child itself may take 2 GB.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torture, pytest.mark.skipif(sys.platform == "win32", reason="needs signals and limits")]

SEED = int(os.environ.get("SKILL_TRAIN_SEED", "20261121"))
NATIVE = 12  # each is a process that loads a model
CHILD = Path(__file__).with_name("fuzz_child.py")
# Inputs by hypothesis and by coverage. Cheap targets get more: milliseconds for a header, a second for a page.
COUNTS = {
    ("hostile_files", "recipe"): (250, 1000),
    ("hostile_files", "plan_command"): (100, 500),
    ("hostile_files", "plan"): (150, 800),
    ("hostile_files", "rows"): (150, 1000),
    ("hostile_files", "start_of_rows"): (500, 2800),
    ("hostile_files", "adapter"): (500, 2800),
    ("hostile_files", "model"): (150, 900),
    ("hostile_files", "gguf"): (500, 3200),
    ("hostile_files", "archive"): (100, 700),
    ("hostile_records", "diff"): (100, 500),
    ("hostile_records", "push"): (100, 600),
    ("hostile_records", "status"): (100, 400),
    ("hostile_records", "steps"): (50, 200),
    ("hostile_records", "report"): (30, 30),
    ("hostile_hub", "answer"): (250, 1600),
    ("hostile_hub", "markers"): (500, 2600),
}


def test_there_are_enough_of_them() -> None:
    assert sum(map(sum, COUNTS.values())) >= 20_000


@pytest.mark.parametrize(("module", "name"), COUNTS)
def test_hostile_input(module: str, name: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    by_hypothesis, by_coverage = COUNTS[module, name]
    paths = [str(CHILD.parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    own |= {"HF_HOME": str(tmp_path / "hf"), "SKILL_TRAIN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    words = [sys.executable, str(CHILD), module, name, str(by_hypothesis), str(by_coverage), str(SEED)]
    started = time.monotonic()
    done = subprocess.run(words, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[max(said.find("Uncaught Python"), 0) :][:4000] + said[-3000:]
    first = int(re.findall(r"^hypothesis (\d+)", done.stdout, re.MULTILINE)[0])
    guided = re.findall(r"stat::number_of_executed_units:\s+(\d+)", said)
    seen = re.findall(r"DONE\s+cov: (\d+)", said)
    assert first + sum(map(int, guided)) >= by_hypothesis + by_coverage
    by = f"{guided[0]} by coverage ({seen[-1]} edges)" if guided and seen else "none by coverage: atheris is not here"
    seconds = time.monotonic() - started
    record_property("counts", f"hostile input, {name}: {first} by hypothesis, {by}; none failed; {seconds:.0f} s")


def test_gguf_files_that_llama_cpp_loads(tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """Bytes of a whole model changed, after its header or in it: what our reader lets through is loaded in a child. One
    that crashes there is an error that says so."""
    from skill_train.core.resources import demo
    from skill_train.llama import get_converter

    pytest.importorskip("llama_cpp")
    if get_converter._cached() is None:
        pytest.skip("the converter is not here; `skill-train export-gguf --fetch` brings it")
    main = [sys.executable, "-c", "from skill_train.cli import main; main()", "export-gguf", str(demo() / "model")]
    done = subprocess.run([*main, "--quant", "f16", "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = next((tmp_path / "out").glob("*.gguf")).read_bytes()
    dice, ended = random.Random(SEED), Counter[str]()
    for number in range(NATIVE):
        content, file = bytearray(whole), tmp_path / "x.gguf"
        for _ in range(dice.choice((1, 1, 2, 4))):
            at = dice.randrange(24, len(content) if number % 2 else 60_000)
            content[at : at + 1] = dice.randbytes(1)
        file.write_bytes(content)
        ended[_loaded(file)] += 1
    assert ended["loaded"] > 0, ended
    record_property("counts", f"hostile input, native load: {NATIVE} files, {dict(ended.most_common())}")


def _loaded(file: Path) -> str:
    from skill_train.core.errors import SkillTrainError
    from skill_train.core.worker import run_worker
    from skill_train.llama.gguf_header import read_gguf

    job = {
        "gguf": str(file),
        "context_tokens": 64,
        "threads": 1,
        "vocabulary": None,
        "plain": ["a b"],
        "special": ["a"],
    }
    job |= {"tuned": None, "base": None, "base_rows": 0}
    job |= {"sequences": [], "prompts": [{"ids": [1, 2], "most": 2}], "scored": []}
    try:
        read_gguf(file)
        run_worker("skill_train.llama.inference_worker", job, object, most_seconds=60)
    except SkillTrainError as error:
        assert error.message
        return error.code
    return "loaded"
