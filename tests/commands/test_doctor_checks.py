"""`doctor`: each check seen to say no, in real processes, folders and against a real server."""

from __future__ import annotations

import http.server
import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from light import BASE, SOURCE, installation, run
from machines import recorded_machine
from skill_train.cli import main
from skill_train.commands import _doctor_checks as checks
from skill_train.commands._doctor_packages import Package, Torchvision, packages, torchvision, within
from skill_train.core.errors import NativeCrash, NotInstalled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
TOKEN = "hf_thisIsNoRealToken0123456789"


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installation(tmp_path_factory.mktemp("light"))


# --- An installation with the light base alone ---


def test_the_light_base_plans_and_cannot_train(light: Path) -> None:
    done = run(light, "doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["able"]["plan"] is True
    assert {data["able"][name] for name in ("local", "merge", "export-gguf", "verify", "submit")} == {False}
    assert data["not_able"]["local"] == 'pip install "skill-train[train]"'
    assert data["not_able"]["submit"] == "no token: hf auth login"
    following = json.loads(done.stdout)["next"]  # what mends a check otherwise is its `fix`
    assert following and all(command.startswith("skill-train ") for command in following)
    found = {check["name"]: check for check in data["checks"]}
    assert "torch" not in found and "compiler" in found
    assert (found["packages"]["verdict"], found["packages [train]"]["verdict"]) == ("ok", "warn")
    assert found["packages [train]"]["fix"] == 'pip install "skill-train[train]"'
    assert "torch missing" in found["packages [train]"]["found"]
    assert found["converter"]["fix"].endswith("skill-train export-gguf --fetch")
    assert len(done.stdout.encode()) <= 8192


def test_verify_says_at_once_that_llama_cpp_is_missing(light: Path, tmp_path: Path) -> None:
    """Not after the reference was at work, and whatever the files are."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    asked = ("--reference", str(tmp_path / "model"), "--gguf", str(tmp_path / "m.gguf"), "--format", "json")
    done = run(light, "verify", *asked)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (7, "missing_package"), done.stderr
    assert error["message"].startswith("llama-cpp-python") and error["hint"] == 'pip install "skill-train[gguf]"'


def test_the_answer_for_a_person(light: Path) -> None:
    done = run(light, "doctor", "--format", "human")
    assert done.returncode == 0, done.stderr
    assert "│ packages [train] │" in done.stdout and "local: no" in done.stdout
    assert 'fix it with: pip install "skill-train[train]"' in done.stdout


def test_the_light_base_answers_in_less_than_a_second(light: Path) -> None:
    """Processor time of the best of three, so that a busy machine does not fail it. Measured on 2 cores: 0.5 s."""
    assert min(_cpu_seconds(light) for _ in range(3)) < 1.0


def test_the_self_test_needs_all_packages(light: Path) -> None:
    done = run(light, "doctor", "--self-test", "--format", "json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (7, "missing_package")
    assert error["hint"] == 'pip install "skill-train[train,gguf]"'
    assert "torch" in error["message"] and "llama-cpp-python" in error["message"]


def test_a_broken_base_is_exit_code_7(tmp_path: Path) -> None:
    site = installation(tmp_path / "site", tuple(name for name in BASE if name != "safetensors"))
    done = run(site, "doctor", "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"], document["data"]["able"]["plan"]) == (7, False, False)
    assert document["error"]["hint"].startswith('pip install "safetensors>=')


def test_without_huggingface_hub_the_token_is_not_checked(tmp_path: Path) -> None:
    site = installation(tmp_path / "site", tuple(name for name in BASE if name != "huggingface_hub"))
    done = run(site, "doctor", "--format", "json")
    assert done.returncode == 7 and "Traceback" not in done.stderr
    assert "huggingface_hub is not installed" in _found(done, "token")["found"]


def test_of_a_source_tree_that_is_not_installed_nothing_is_called_well(tmp_path: Path) -> None:
    """Its ranges stand in the metadata of an installation."""
    site = installation(tmp_path / "site")
    next(site.glob("skill_train-*.dist-info")).unlink()
    done = run(site, "doctor", "--format", "json")
    data = json.loads(done.stdout)["data"]
    found = _found(done, "versions")
    assert (found["verdict"], found["found"], found["fix"]) == ("warn", "not known", "pip install -e .")
    named = ("plan", "local", "merge", "verify")  # the others lack a converter and a token
    assert [data["able"][name] for name in named] == [None] * 4
    assert all("pip install -e ." in data["not_able"][name] for name in ("plan", "local", "verify"))
    assert _found(done, "token")["found"] == "no token"  # huggingface_hub is there
    assert "plan: not known (" in run(site, "doctor", "--format", "human").stdout


def test_a_cache_that_cannot_be_written(light: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    done = run(light, "doctor", "--format", "json", SKILL_TRAIN_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "system_error"
    assert _found(done, "cache")["fix"].startswith("export SKILL_TRAIN_CACHE=")


# --- The token, against a server on this machine ---


@pytest.fixture
def hub() -> Iterator[Callable[..., str]]:
    servers: list[http.server.HTTPServer] = []

    def start(status: int, answer: dict[str, Any], seconds: float = 0) -> str:
        servers.append(http.server.HTTPServer(("127.0.0.1", 0), _handler(status, answer, seconds)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _handler(status: int, answer: dict[str, Any], seconds: float) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            right = self.path == "/api/whoami-v2" and self.headers["authorization"] == f"Bearer {TOKEN}"
            body = json.dumps(answer).encode()
            self.send_response(status if right else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def _fine(*permissions: str) -> dict[str, Any]:
    """As the Hub answers for a fine-grained token; the shape is the one that trufflehog's analyzer reads."""
    scoped = [{"entity": {"type": "user", "name": "ada"}, "permissions": list(permissions)}]
    return {"role": "fineGrained", "fineGrained": {"global": ["discussion.write"], "scoped": scoped}}


@pytest.mark.parametrize(
    ("access", "verdict", "submit", "word"),
    [
        ({"role": "write"}, "ok", True, "ada, role write"),
        ({"role": "read"}, "warn", False, "cannot write or run jobs"),
        (_fine("repo.content.read", "repo.write", "job.write"), "ok", True, "fineGrained"),
        (_fine("repo.content.read", "repo.write"), "warn", False, "cannot run jobs"),
        (_fine("job.write"), "warn", False, "cannot write"),
        (None, "ok", None, "sign-in by browser"),
    ],
)
def test_what_a_token_may_do(
    light: Path,
    hub: Callable[..., str],
    access: dict[str, Any] | None,
    verdict: str,
    submit: bool | None,
    word: str,
) -> None:
    url = hub(200, {"name": "ada", "type": "user", "auth": {"type": "access_token", "accessToken": access}})
    done = _signed_in(light, url)
    check = _found(done, "token")
    assert check["verdict"] == verdict and word in check["found"] + check.get("because", "")
    assert json.loads(done.stdout)["data"]["able"]["submit"] is submit
    assert verdict == "ok" or check["fix"].startswith("unset HF_TOKEN && hf auth login")  # the variable counts more


def test_a_token_that_the_hub_does_not_know(light: Path, hub: Callable[..., str]) -> None:
    done = _signed_in(light, hub(401, {"error": "Invalid user token."}))
    check = _found(done, "token")
    assert (done.returncode, check["verdict"]) == (0, "warn")
    assert check["fix"] == "unset HF_TOKEN && hf auth login"
    assert json.loads(done.stdout)["data"]["able"]["submit"] is False


def test_a_hub_that_cannot_be_reached_is_not_an_error(light: Path) -> None:
    done = _signed_in(light, "http://127.0.0.1:9")
    assert (done.returncode, _found(done, "token")["verdict"]) == (0, "warn")
    assert "the Hub cannot be reached" in _found(done, "token")["found"]
    assert json.loads(done.stdout)["data"]["able"]["submit"] is None


def test_a_hub_that_has_an_outage_is_not_an_error(light: Path, hub: Callable[..., str]) -> None:
    assert "the Hub answered 503" in _found(_signed_in(light, hub(503, {})), "token")["found"]


def test_offline_mode_asks_nobody(light: Path, hub: Callable[..., str]) -> None:
    done = _signed_in(light, hub(200, {"name": "ada"}), HF_HUB_OFFLINE="1")
    assert _found(done, "token")["fix"] == "unset HF_HUB_OFFLINE"


def test_a_slow_hub_is_given_up(hub: Callable[..., str]) -> None:
    program = "from skill_train.hub.account import account; print(account(0.3))"
    environment = os.environ | {"HF_ENDPOINT": hub(200, {}, 3), "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "state='unchecked'" in done.stdout and time.monotonic() - started < 2.9


def _signed_in(site: Path, url: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Nothing of the token may come out, whatever the Hub says."""
    environment = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"} | more
    done = run(site, "doctor", "--format", "json", **environment)
    assert TOKEN[3:] not in done.stdout + done.stderr and "Traceback" not in done.stderr
    return done


# --- One check at a time ---


def test_python_outside_the_range() -> None:
    assert checks.python("3.12.3").verdict == "ok"
    assert checks.python("3.10.14").verdict == checks.python("3.14.0").verdict == "fail"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.13.0+cpu", "<2.14,>=2.8"),
        ("2.14.0", "<2.14,>=2.8"),
        ("2.7.1", "<2.14,>=2.8"),
        ("2.8", ">=2.8.0"),
        ("5.20.0", "<6,>=5.20"),
        ("5.9.0", "<6,>=5.20"),
        ("6.0", "<6,>=5.20"),
        ("0.3.36", "<0.4,>=0.3.36"),
        ("1.16.0", "!=1.16.0"),
        ("3.12", ""),
    ],
)
def test_ranges_are_read_as_packaging_reads_them(version: str, wanted: str) -> None:
    assert within(version, wanted) == SpecifierSet(wanted).contains(version, prereleases=True)


def test_the_tested_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {(package.group, package.name.replace("-", "_")) for package in packages()}
    stated = {"base": project["dependencies"]} | project["optional-dependencies"]
    for group in ("base", "train", "gguf"):
        names = {line.split(">")[0].replace("-", "_") for line in stated[group]}
        assert {name for where, name in known if where == group} == names


def test_another_version_is_named_with_its_range() -> None:
    check = checks.packages("train", [Package("torch", "<2.14,>=2.8", "train", "2.5.1")])
    assert (check.verdict, check.fix) == ("warn", 'pip install "torch<2.14,>=2.8"')


@pytest.mark.parametrize(
    ("machine", "verdict", "word", "fix"),
    [
        ("rtx_4090", "ok", "25.8 GB", ""),
        ("8x_l40s", "ok", "8 × NVIDIA L40S", ""),
        ("m2_pro_32gb", "ok", "mps: Apple M2 Pro", ""),
        ("bare_cpu", "ok", "cpu: AMD EPYC", ""),
        ("rosetta_m2", "warn", "Rosetta", "uv venv --python cpython-3.12-macos-aarch64-none"),
        ("intel_mac", "warn", "Intel", ""),
        ("broken_nvidia_smi", "warn", "mismatch", "sudo reboot"),
    ],
)
def test_accelerators(machine: str, verdict: str, word: str, fix: str) -> None:
    check = checks.accelerator(recorded_machine(machine))
    assert (check.verdict, check.fix) == (verdict, fix) and word in check.found + check.because


def test_little_memory_and_little_disk() -> None:
    facts = recorded_machine("m1_8gb")
    assert (checks.memory(facts).verdict, checks.disk(facts).verdict) == ("ok", "ok")
    full = replace(facts, ram_available_bytes=1_900_000_000, disk_free_bytes=9_900_000_000)
    assert (checks.memory(full).verdict, checks.disk(full).verdict) == ("warn", "warn")
    assert "9.9 GB free" in checks.disk(full).found
    unknown = replace(facts, ram_available_bytes=None, disk_free_bytes=None, unknown={"disk_free_bytes": "x"})
    assert (checks.memory(unknown).verdict, checks.disk(unknown).verdict) == ("warn", "warn")


@pytest.mark.parametrize(
    ("answer", "verdict", "word"),
    [
        ({"version": "2.13.0", "cuda": "13.0", "usable": True, "trouble": ""}, "ok", "CUDA 13.0"),
        ({"version": "2.13.0+cpu", "cuda": None, "usable": False, "trouble": ""}, "warn", "cannot use cuda"),
        (
            {"version": "2.13.0", "cuda": "13.0", "usable": False, "trouble": "no kernel image"},
            "warn",
            "no kernel image",
        ),
    ],
)
def test_what_torch_says(answer: dict[str, Any], verdict: str, word: str) -> None:
    check = checks.torch(recorded_machine("rtx_4090"), lambda: answer)
    assert check.verdict == verdict and word in check.found + check.because


def test_torch_that_crashes() -> None:
    def asked() -> dict[str, Any]:
        raise NativeCrash("crashed with SIGSEGV", code="native_crash", got="one\nthe last words")

    check = checks.torch(recorded_machine("rtx_4090"), asked)
    assert (check.verdict, check.because) == ("fail", "the last words")


def test_the_converter_is_missing() -> None:
    def missing() -> None:
        raise NotInstalled("not here", code="no_converter", hint="x")

    assert checks.converter(missing, gguf_ready=True).fix == "skill-train export-gguf --fetch"


def test_the_compiler() -> None:
    assert checks.compiler(lambda name: name == "g++", "Linux").verdict == "ok"
    assert checks.compiler(lambda name: False, "Linux").fix == "sudo apt-get install g++"
    assert checks.compiler(lambda name: False, "Darwin").fix == "xcode-select --install"


@pytest.mark.parametrize("known", ["project", "home"])
def test_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    home, here = tmp_path / "home", tmp_path / "project"
    monkeypatch.setenv("HOME", str(home))
    here.mkdir()
    monkeypatch.chdir(here)
    assert checks.agents(home, here).found == "none"
    other = tmp_path / known / ".agents" / "skills" / "another"
    other.mkdir(parents=True)
    (other / "SKILL.md").touch()
    absent = checks.agents(home, here)
    assert absent.verdict == "warn" and "1 skills" in absent.found
    with pytest.raises(SystemExit, match="0"):
        main([*shlex.split(absent.fix)[1:], "--format", "quiet"])  # the remedy mends it
    assert checks.agents(home, here).verdict == "ok"
    assert (other.parent / "skill-train" / "SKILL.md").is_file()


def _found(done: subprocess.CompletedProcess[str], name: str) -> dict[str, str]:
    found: list[dict[str, str]] = json.loads(done.stdout)["data"]["checks"]
    return next(check for check in found if check["name"] == name)


def _cpu_seconds(site: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(site, "doctor", "--format", "json").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("wanted", "torch", "verdict"),
    [
        ("==2.13.0", "2.13.0", "ok"),
        ("==2.13.0", "2.13.0+cpu", "ok"),
        ("==2.13.0", "2.14.0", "warn"),
        (">=2.14.0", "2.13.0", "warn"),
        (None, "2.13.0", "ok"),  # it says nothing
        ("==2.13.0", None, "ok"),  # the check of packages says that torch is missing
    ],
)
def test_a_torchvision_of_another_torch(wanted: str | None, torch: str | None, verdict: str) -> None:
    check = checks.torchvision(Torchvision("0.28.0", wanted, torch))
    assert check.verdict == verdict and (check.fix == "pip uninstall torchvision") == (verdict == "warn")


@pytest.mark.parametrize("line", ["torch (==2.13.0)", "torch==2.13.0", "torch (>=2.14.0)"])  # 0.28.0 and 0.29.1
def test_torchvision_is_read_from_its_metadata(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\nRequires-Dist: numpy\nRequires-Dist: {line}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = torchvision()
    assert found is not None and found.version == "0.28.0" and found.specifier == line.strip("torch ()")
