# Everything sets itself up in .venv: `make demo` and `make test` need only Python 3.11 to 3.13 and a C++ compiler.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CORES  := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# The first interpreter that answers and is of a supported version; PYTHON=… chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo $$p; break; }; done)

.PHONY: help demo check test torture walks live lint fix docs evals audit versions bench lock clean

help:
	@echo "make demo   train, merge, export and verify a small model, offline, and print the table"
	@echo "make check  before each commit: lint, types, the fast tests, one chain of a tiny model; 1 to 2 minutes"
	@echo "make test   all tests that need no network"
	@echo "make torture  kills, faults and hostile input: seeded, bounded, with their counts; SKILL_TRAIN_SEED=n for others"
	@echo "make walks  every family, kill point and setting, where \`make test\` has a few of a kind"
	@echo "make lint   formatting, rules, types, generated files"
	@echo "make fix    what lint can repair itself    make docs   write the generated documentation and scripts/train.py"
	@echo "make evals  prepare the sandboxes of evals/ and grade what agents left in them"
	@echo "make audit  known vulnerabilities of the locked versions    make versions   tests on the lowest allowed versions"
	@echo "make bench  measure against the peers (under 30 minutes without a GPU), each target met or not"
	@echo "make live   tests against the Hub; needs HF_TOKEN    make lock   write requirements.lock"

demo: $(STAMP)
	$(BIN)/skill-train demo --format human

check: lint
	$(BIN)/python -m pytest -m "not slow and not live and not torture" -n $(CORES) --dist loadfile --no-loadscope-reorder

# Each file goes whole to one process, the slow ones first, and each process keeps to one core (tests/conftest.py). Two
# processes a core: a quarter of the time is spent waiting, for signals and for servers. Each takes up to 2 GB.
test: $(STAMP)
	$(BIN)/python -m pytest -n $$((2 * $(CORES))) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Kills and the answers of a hostile Hub are one group each and take longest, so they come first; the targets of hostile
# input go to whoever is free.
LONGEST := tests/torture/test_kills.py tests/torture/test_hub_routes.py
torture: $(STAMP)
	$(BIN)/python -m pytest -m torture $(LONGEST) \
	$(filter-out $(LONGEST),$(wildcard tests/torture/test_*.py)) -n $(CORES) --dist loadgroup --no-loadscope-reorder

walks: $(STAMP)
	$(BIN)/python -m pytest -m torture --ignore tests/torture tests -n $(CORES) --dist loadfile --no-loadscope-reorder

live: $(STAMP)
	$(BIN)/python -m pytest -m live

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/build_train.py --check
	$(BIN)/python scripts/make_docs.py --check
	$(BIN)/python scripts/build_plugin.py --check

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python scripts/build_train.py
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/build_plugin.py

evals: $(STAMP)
	$(BIN)/python evals/run.py prepare
	$(BIN)/python evals/run.py grade

audit: $(STAMP)
	$(BIN)/python scripts/audit.py

versions: $(STAMP)
	$(BIN)/python scripts/versions.py

bench: $(STAMP)
	$(BIN)/python bench/run.py

lock: $(STAMP)
	$(BIN)/python scripts/make_lock.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache

# bitsandbytes, for the tests of QLoRA, lies apart: PEFT imports it wherever it finds it, which takes a second.
# The stamp is written last, so a broken installation is made again. pip would compile the bytecode on one core. Without
# it, each start in a container that sets PYTHONDONTWRITEBYTECODE compiles torch and transformers: 15 s of a core. What
# does not compile is for another Python, and nothing imports it.
$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 with venv found; install one (on Debian and Ubuntu also python3-venv), or say PYTHON=/path/to/python" >&2; exit 7; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip  # one made by uv has no pip
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)' \
	|| echo "installing; this includes compiling llama-cpp-python from source: about 3 minutes on 2 cores (this machine: $(CORES))"
	CMAKE_ARGS="'-DCMAKE_PROJECT_INCLUDE=$(CURDIR)/scripts/llama_cpp.cmake' $$CMAKE_ARGS" \
	CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-$(CORES)} \
	$(BIN)/python -m pip install --no-compile -c requirements.lock -e '.[train,gguf,serve,vision,report,dev]'
	$(BIN)/python -m pip install --no-compile --no-deps --upgrade --target $(VENV)/four-bit \
	"$$($(BIN)/python -c 'from skill_train.run.job_spec import FOUR_BIT; print(FOUR_BIT)')" \
	|| echo "bitsandbytes could not be installed, so the tests of QLoRA are skipped" >&2
	cd "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	"$(CURDIR)/$(BIN)/python" -m compileall -qq -j $(CORES) -x '/tests?/|/testing/' . "$(CURDIR)/skill" || true
	@touch $(STAMP)
