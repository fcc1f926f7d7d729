"""`plan --for DEVICE`: which file would run on another device, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
import training
from models import write_model
from one_command import answered, called
from skill_train.commands._for_device import DeviceOptions, device_question
from skill_train.core.errors import UsageError
from skill_train.model.folder import read_model

ROW = {"messages": [{"role": "user", "content": "What is late?"}, {"role": "assistant", "content": "The ticket."}]}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with 40 rows."""
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 40)
    return tmp_path


PLAN = ("plan", "--model", "model", "--data", "rows.jsonl")


def test_a_phone(here: Path) -> None:
    """1.5B on 6 GiB, of which 45 % are sure: 2.9 GB hold q8_0 (1.65 GB), the cache and the logits."""
    write_model(here / "model", "qwen2.5-1.5b")
    on = answered(*PLAN, "--for", "iPhone 15", "--context", "4096")[1]["data"][
        "for"
    ]  # it may be too large to train here
    assert (on["device"], on["context"], on["recommended"]) == ("iPhone 15", 4096, "q8_0")
    assert on["usable_bytes"] == pytest.approx([0.45 * 6 * 2**30, 0.75 * 6 * 2**30], abs=1)
    assert [file["quant"] for file in on["files"]] == ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"]
    best = on["files"][0]
    assert best["problems"] == [] and best["kl"] is None
    assert 1.5e9 < best["bytes"][0] < best["bytes"][1] < 1.9e9
    assert 5 < best["tokens_per_second"][0] < best["tokens_per_second"][1] < 40
    assert "most bits a weight" in on["because"]


def test_the_types_that_are_named(here: Path) -> None:
    write_model(here / "model", "qwen2.5-1.5b")
    on = answered(*PLAN, "--for", "iPhone 15", "--quant", "IQ4-XS, iq2_m,iq4_xs")[1]["data"]["for"]
    assert [file["quant"] for file in on["files"]] == ["iq4_xs", "iq2_m"] and on["recommended"] == "iq4_xs"
    # huggingface.co/bartowski/Qwen2.5-1.5B-Instruct-GGUF: a file of 895 MB.
    assert on["files"][0]["bytes"][0] <= 895e6 <= on["files"][0]["bytes"][1]
    assert on["files"][1]["bytes"][1] < on["files"][0]["bytes"][0]
    code, answer = answered(*PLAN, "--for", "iPhone 15", "--quant", "q4_km")
    assert (code, answer["error"]["code"]) == (2, "bad_usage") and "did you mean 'q4_k_m'" in answer["error"]["message"]
    on = answered(*PLAN, "--for", "iPhone 15", "--quant", "Q4_K,q4-k-m")[1]["data"]["for"]
    assert [file["quant"] for file in on["files"]] == ["q4_k_m"]  # as llama-quantize spells it
    code, answer = answered(*PLAN, "--quant", "iq4_xs")
    assert (code, answer["error"]["message"]) == (2, "--quant needs a device")


def test_a_stated_device_with_a_speed(here: Path) -> None:
    """68 GB/s read q8_0 of 1.5B too slowly for 20 tokens a second, and q4_k_m fast enough."""
    write_model(here / "model", "qwen2.5-1.5b")
    on = answered(*PLAN, "--memory", "8GB", "--bandwidth", "68GB/s", "--min-speed", "20")[1]["data"]["for"]
    assert (on["device"], on["gigabytes_per_second"]) == ("a device of 8 GB and 68 GB/s", 68)
    best = next(file for file in on["files"] if file["quant"] == on["recommended"])
    assert best["tokens_per_second"][0] >= 20 and best["problems"] == []
    assert any("--min-speed is 20" in problem for problem in on["files"][0]["problems"])


def test_nothing_fits(here: Path) -> None:
    write_model(here / "model", "qwen2.5-32b")
    code, answer = answered(*PLAN, "--for", "iPhone 15", "--where", "local")
    assert code == 3 and answer["ok"] is False
    on = answer["data"]["for"]
    assert on["recommended"] is None and all(file["problems"] for file in on["files"])
    assert "nothing fits iPhone 15; the nearest is q2_k: it needs up to" in on["because"]


def test_the_miss_is_the_error_of_a_plan_that_runs(here: Path) -> None:
    write_model(here / "model", "smollm2-135m")
    code, answer = answered(*PLAN, "--memory", "200MB")
    assert (code, answer["error"]["code"]) == (3, "no_memory")
    assert "the nearest is q2_k" in answer["error"]["message"] and answer["next"] == []


def test_a_longer_context_needs_more(here: Path) -> None:
    write_model(here / "model", "qwen2.5-1.5b")
    short, long = (
        answered(*PLAN, "--for", "M1", "--context", str(tokens))[1]["data"]["for"]["files"][0]
        for tokens in (512, 32768)
    )
    # 28 layers, 2 heads of 128: 28,672 bytes a token
    assert long["memory_bytes"][0] - short["memory_bytes"][0] == (32768 - 512) * 28_672
    assert long["tokens_per_second"][0] < short["tokens_per_second"][0]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--for", "iPhone 99"), "bad_usage", "no device 'iPhone 99' is in the table"),
        (("--for", ""), "bad_usage", "no device '' is in the table"),
        (("--for", "", "--min-speed", "20"), "bad_usage", "no device '' is in the table"),
        (("--for", "here", "--bandwidth", ""), "bad_usage", "--for here knows its memory and bandwidth"),
        (("--min-speed", "20"), "bad_usage", "--min-speed needs a device"),
        (("--max-size", "1GB"), "bad_usage", "--max-size needs a device"),
        (("--context", "512"), "bad_usage", "--context needs a device"),
        (("--bandwidth", "68GB/s"), "bad_usage", "--bandwidth alone"),
        (("--for", "M1", "--max-size", "small"), "bad_usage", "--max-size is not a size"),
    ],
)
def test_refused(here: Path, options: tuple[str, ...], code: str, says: str) -> None:
    write_model(here / "model", "smollm2-135m")
    exit_code, answer = answered(*PLAN, *options)
    assert (exit_code, answer["error"]["code"]) == (2, code) and says in answer["error"]["message"]


HUGE = "9" * 200
HOSTILE = [
    *(("--for", name) for name in ("   ", "📱", "\u202eiPhone 15", "\0", "x" * 5000, "M2 0GB", "M2 16GB 8GB")),
    *(("--memory", size) for size in ("", "0", "-1GB", "nan", "1e400GB", "1e9", "0.0000001B", f"{HUGE}GB", "9" * 400)),
    *(("--memory", "8GB", "--bandwidth", rate) for rate in ("", "0", "-1", "nan", HUGE, f"0.{'0' * 300}1")),
    *(("--for", "M2", "--max-size", size) for size in ("", "0", "-1GB", "nan", f"{HUGE}GB")),
    *(("--for", "M2", "--min-speed", speed) for speed in ("", "0", "-1", "nan", "inf", "1e400")),
    *(("--for", "M2", "--context", tokens) for tokens in ("", "0", "-1", "1000000000000", "10**12", "1e3", "nan")),
    *(("--for", "M2", "--quant", types) for types in ("", ",,", "\0", "q4_k_m" * 500)),
    ("--for", "here", "--memory", "8GB"),
]  # fmt: skip


@pytest.mark.parametrize(
    "options", HOSTILE, ids=lambda options: " ".join(options)[:40].encode("unicode_escape").decode()
)
def test_what_is_no_device_and_no_limit_is_refused_in_one_sentence(here: Path, options: tuple[str, ...]) -> None:
    write_model(here / "model", "smollm2-135m")
    before = sorted(path.name for path in here.rglob("*"))
    exit_code, answer = answered(*PLAN, *options)
    assert (exit_code, answer["error"]["code"]) == (2, "bad_usage")
    assert len(answer["error"]["message"]) < 200 and sorted(path.name for path in here.rglob("*")) == before


def test_a_limit_of_zero_is_a_limit() -> None:
    """The option refuses 0; whoever calls the function with it is not told that it holds."""
    model = read_model(tiny.cached("gemma"))
    with pytest.raises(UsageError, match="--max-kl needs a device"):
        device_question(DeviceOptions(), model, training.MACHINE, max_kl=0.0)


def test_a_person_sees_the_file_to_ship(here: Path) -> None:
    write_model(here / "model", "smollm2-135m")
    done = called(*PLAN, "--for", "Raspberry Pi 5", "--format", "human")
    assert done.code == 0 and all(words in done.stdout for words in ("ship q8_0: ", "Raspberry Pi 5", "bandwidth: "))


def test_without_a_device_nothing_is_said(here: Path) -> None:
    write_model(here / "model", "smollm2-135m")
    assert "for" not in answered(*PLAN)[1]["data"]


def test_a_context_is_at_most_the_models(here: Path) -> None:
    """SmolLM2 135M was made for 8192 tokens."""
    write_model(here / "model", "smollm2-135m")
    on = answered(*PLAN, "--for", "M1", "--context", "999999")[1]["data"]["for"]
    assert on["context"] == 8192
    assert on["reasons"][-2] == "context: 8192 tokens, all that the model was made for; 999999 were asked for"


def test_i_quants_fill_the_gap_below_q4_k_m(here: Path) -> None:
    """Of 1.5B q4_k_m has up to 1.08 GB, iq4_xs 0.995 and q3_k_m 0.92. With --quant nothing is added."""
    write_model(here / "model", "qwen2.5-1.5b")
    words = ("--memory", "8GB", "--bandwidth", "68GB/s", "--max-size", "1GB")
    on = answered(*PLAN, *words)[1]["data"]["for"]
    assert [file["quant"] for file in on["files"][6:]] == ["iq4_xs", "iq3_m"] and on["recommended"] == "iq4_xs"
    assert on["reasons"][-1].startswith("i-quants: iq4_xs and iq3_m too, because q4_k_m does not fit")
    on = answered(*PLAN, *words, "--quant", "q4_k_m,q3_k_m")[1]["data"]["for"]
    assert len(on["files"]) == 2 and not any("i-quants" in reason for reason in on["reasons"])
