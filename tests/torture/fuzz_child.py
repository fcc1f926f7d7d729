"""One target of the hostile input, in a process of its own, with a bound on its memory.

    python fuzz_child.py MODULE TARGET HYPOTHESIS COVERAGE SEED

First hypothesis makes HYPOTHESIS inputs, and shrinks one that fails; then atheris (libFuzzer, guided by the coverage of
our own modules) makes COVERAGE more. Where atheris has no build, hypothesis makes them all, and says so.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

ADDRESSES = 12 << 30  # pyarrow alone reserves 4 GB of them
RESIDENT_MB = 2000


def main(module: str, name: str, by_hypothesis: int, by_coverage: int, seed: int) -> None:
    try:
        import atheris
    except ImportError:
        atheris, by_hypothesis, by_coverage = None, by_hypothesis + by_coverage, 0
    if atheris is None:
        targets = importlib.import_module(module)
    else:
        with atheris.instrument_imports(include=["skill_train"]):
            targets = importlib.import_module(module)
    _bound_memory()
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="skill-train-fuzz-") as sandbox:

        def one(data: bytes) -> None:
            ended[str(targets.in_folder(targets.TARGETS[name], data, Path(sandbox)))] += 1

        one(b"")  # what is imported or made once is not the first input's
        _by_hypothesis(one, by_hypothesis, seed)
        print(f"hypothesis {sum(ended.values())} {dict(ended.most_common(6))}", flush=True)
        if atheris is not None and by_coverage:
            corpus = Path(sandbox) / "corpus"
            corpus.mkdir()
            dice = random.Random(seed)
            for number in range(40):
                (corpus / str(number)).write_bytes(dice.randbytes(dice.choice((1, 2, 5, 9, 13, 21))))
            flags = [f"-runs={by_coverage}", f"-seed={seed}", "-max_len=48", "-len_control=0", "-reload=0"]
            flags += [f"-rss_limit_mb={RESIDENT_MB}", f"-artifact_prefix={sandbox}/", "-print_final_stats=1"]
            atheris.Setup([sys.argv[0], *flags, str(corpus)], one)
            atheris.Fuzz()  # ends the process


def _by_hypothesis(one: object, count: int, seed: int) -> None:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    change = st.tuples(st.integers(0, 65_535), st.integers(0, 255), st.integers(0, 255))
    changes = st.lists(change, max_size=9).map(
        lambda made: b"".join(where.to_bytes(2) + bytes((what, value)) for where, what, value in made)
    )
    inputs = st.tuples(st.integers(0, 255), changes).map(lambda pair: bytes((pair[0],)) + pair[1])
    quiet = settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    quiet(seeded(seed)(given(inputs)(one)))()  # type: ignore[operator, arg-type]


def _bound_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
