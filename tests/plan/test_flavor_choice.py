"""Which machine of the cloud a plan takes, checked by hand against the prices and sizes of the shipped table
(huggingface.co/docs/hub/jobs-pricing, 2026-08-22).

Speed for money by hand, from rates that are published (trl 1.16, `_PEAK_FLOPS_BY_DEVICE`; AWS for A10G) times the
share that devices.py gives each, a dollar: H200 989 x 0.75 / 5.00 = 148, A100 312 / 2.50 = 125, L40S 362 x 0.6 / 1.80 =
121, T4 65 x 0.7 / 0.40 = 114, RTX PRO 6000 500 x 0.6 / 2.75 = 109, L4 121 x 0.5 / 0.80 = 76, A10G 70 x 0.7 / 1.50 = 33.
A long run goes by that; a short one is start and download, and goes by the price of an hour.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from machines import recorded_machine
from models import recorded_model
from planning import decided, says, shipped_flavor
from skill_train.core.errors import UsageError
from skill_train.estimate.step import Range
from skill_train.facts import ModelFacts
from skill_train.hub import flavors
from skill_train.plan.places import timeout_seconds

# Llama 3.1 405B, config.json of meta-llama/Llama-3.1-405B: 126 layers of 16384, 128 heads, 8 for keys and values.
_405B = 405_853_388_800


def _large(parameters: int = _405B) -> ModelFacts:
    return msgspec.structs.replace(
        recorded_model("llama-3.1-70b"),
        parameters=parameters,
        active_parameters=parameters,
        embedding_parameters=2 * 128_256 * 16_384,
        layers=126,
        hidden_size=16_384,
        intermediate_size=53_248,
        heads=128,
        kv_heads=8,
        weight_bytes=2 * parameters,
    )


@pytest.mark.parametrize(
    ("model", "said", "flavor", "by_hand"),
    [
        ("qwen2.5-0.5b", {}, "t4-small", "$0.40 an hour is the least; 4 GB of 16"),
        ("smollm2-1.7b", {}, "t4-small", "$0.40; 3.4 GB of weights in 16, and 3.4 + 3 in 15 of the host"),
        ("qwen3-4b", {}, "t4-small", "8.0 GB of weights in 16; 8.0 + 3 = 11.0 of 13.5 in the host; $0.40"),
        ("mistral-7b-v0.3", {"max_steps": 1}, "l4x1", "14.5 GB: too much of a T4; 17.5 of 27 in the host; $0.80"),
        ("qwen2.5-7b", {"max_steps": 1}, "l4x1", "15.2 GB: too much of a T4, 24 on the GPU; 18.2 of 27 in the host"),
        ("qwen2.5-7b", {}, "l4x1", "50 x 16 x 380 tokens x 6 x 7.6e9 = 1.4e16: 230 s, 64 on an L40S, and the start"),
        ("qwen2.5-7b", {"max_steps": 500}, "l40sx1", "1.4e17: 2300 s x $0.80 = 1840, 640 x 1.80 = 1150, and the start"),
        ("qwen2.5-7b", {"load_in_4bit": True, "max_steps": 1}, "t4-small", "5.5 GB of 16; read one by one; $0.40"),
        ("phi-4", {"load_in_4bit": True, "max_steps": 1, "max_length": 256}, "t4-small", "a job downloads 29 of 50 GB"),
        ("qwen2.5-14b", {}, "l40sx1", "29.5 GB of 48, 32.5 of 55.8 in the host; $1.80, next with one such GPU $2.50"),
        ("qwen2.5-32b", {}, "a100-large", "65.5 GB of 80, 68.5 of 127.8 in the host; $2.50, next $2.75"),
        ("qwen3-30b-a3b", {}, "a100-large", "61 GB of weights of 80, 64 of 127.8 in the host"),
        ("llama-3.1-70b", {"max_steps": 1}, "h200x2", "141 GB on 2 x 96, and 4 layers of 1.7, x 1.3: 101; on 2 x 141"),
        ("llama-3.1-70b", {"load_in_4bit": True, "max_steps": 1}, "a100-large", "39 GB and what a step needs; $2.50"),
        ("llama-3.1-8b", {"rows": 100_000, "epochs": 3.0, "max_hours": 100}, "h200", "148 TFLOPS a dollar, A100 125"),
        ("qwen2.5-1.5b", {"rows": 10_000, "epochs": 1.0}, "t4-small", "114 TFLOPS a dollar, and a start for a sixth"),
        ("qwen2.5-1.5b", {"rows": 10_000, "epochs": 1.0, "max_hours": 0.5}, "l40sx1", "T4: too slow for half an hour"),
    ],
)  # fmt: skip
def test_the_cheapest_that_fits_in_time(model: str, said: dict[str, Any], flavor: str, by_hand: str) -> None:
    plan = _cloud(model, **said)
    assert (plan["flavor"], plan["blockers"]) == (flavor, []), (by_hand, plan["estimates"]["flavors"])
    assert plan["placement"]["backend"] == "hf_jobs"
    offers = {offer["flavor"]: offer for offer in plan["estimates"]["flavors"]}
    assert plan["estimates"]["seconds"]["high"] <= said.get("max_hours", 8) * 3600
    in_time = [name for name, offer in offers.items() if offer["seconds"][1] <= said.get("max_hours", 8) * 3600]
    if "load_in_4bit" not in said:  # where the GPUs have less room than the weights, and a third more where these are
        # divided, they would wait in host memory
        weights = 2 * (recorded_model(model).parameters or 0)
        in_time = [name for name in in_time if _room(name) > weights * (1 if shipped_flavor(name).gpus == 1 else 1.4)]
    assert min(in_time, key=lambda name: sum(offers[name]["cost_usd"])) == flavor


def _room(name: str) -> int:
    return (shipped_flavor(name).gpu_memory_bytes or 0) * shipped_flavor(name).gpus


def test_a_price_is_the_begun_minutes_times_the_price_of_a_minute() -> None:
    plan = _cloud("qwen2.5-0.5b")
    seconds, cost = plan["estimates"]["seconds"], plan["estimates"]["cost_usd"]
    minutes = [seconds[end] // 60 + (seconds[end] % 60 > 0) for end in ("low", "high")]
    assert [cost["low"], cost["high"]] == [round(count * 0.40 / 60, 3) for count in minutes]
    assert seconds["low"] % 60 > 6  # by the second it would cost less
    assert "$0.40 an hour" in cost["basis"] and "2026-08-22" in cost["basis"]
    assert "jobs-pricing" in next(r["source"] for r in plan["reasons"] if r["rule"] == "flavor")


def test_when_none_ends_in_time_the_fastest_is_taken_and_said() -> None:
    """8 H200 have the most arithmetic of the table: 8 x 989 TFLOPS."""
    plan = _cloud("llama-3.1-8b", rows=100_000, epochs=3.0, max_hours=0.1)
    assert plan["flavor"] == "h200x8"
    because = next(reason["because"] for reason in plan["reasons"] if reason["rule"] == "flavor")
    assert "none is sure to end within 0.1 h" in because and "cheapest" not in because
    assert [blocker["code"] for blocker in plan["blockers"]] == ["too_slow"]
    assert "within 6 min (--max-hours)" in plan["blockers"][0]["message"]


def test_a_flavor_that_is_named_is_taken() -> None:
    plan = _cloud("qwen2.5-0.5b", flavor="a100x4")
    assert (plan["flavor"], plan["blockers"]) == ("a100x4", [])
    assert plan["placement"]["num_processes"] == 4
    because = next(reason["because"] for reason in plan["reasons"] if reason["rule"] == "flavor")
    assert because.startswith("asked for")


@pytest.mark.parametrize(("flavor", "ring"), [("a100x4", None), ("h200x2", None), ("l40sx4", "Ring"), ("l4x4", "Ring")])
def test_flavors_without_nvlink_get_the_settings_of_pcie(flavor: str, ring: str | None) -> None:
    """The seed's hardware guide: A100 and H100 SXM have NVLink, L40S has not."""
    environment = _cloud("qwen2.5-1.5b", flavor=flavor)["launch"]["environment"]
    assert environment.get("NCCL_ALGO") == ring


def test_a_flavor_that_is_named_and_too_small_is_blocked() -> None:
    """15.2 GB of weights in 16 GB, and 15.2 + 3 in 13.5 of the host's 15."""
    plan = _cloud("qwen2.5-7b", flavor="t4-small")
    assert plan["flavor"] == "t4-small"
    assert [blocker["code"] for blocker in plan["blockers"]] == ["no_memory", "no_host_ram"]


def test_every_weight_is_read_into_host_memory() -> None:
    """7,615,616,512 x 4 bytes = 30.5 GB, and 3 of the process; t4-small has 15 GB."""
    plan = _cloud("qwen2.5-7b", flavor="t4-small", finetuning_type="full")
    blockers = {blocker["code"]: blocker["message"] for blocker in plan["blockers"]}
    assert blockers["no_host_ram"].startswith("reading the weights needs 33.5 GB")


def test_each_process_of_ddp_reads_the_weights_and_the_first_of_fsdp_alone() -> None:
    """By hand, 14,770,033,664 x 2 bytes = 29.5 GB: four readers on 4 x L40S take 4 x (29.5 + 3) = 130 GB. 70B, 141.1 GB
    divided over eight: 141.1 + 8 x 3 = 165 GB."""
    ddp, fsdp = _on_less_host("qwen2.5-14b", "l40sx4", 120), _on_less_host("llama-3.1-70b", "l40sx8", 120)
    assert (ddp["placement"]["strategy"], fsdp["placement"]["strategy"]) == ("ddp", "fsdp")
    assert "needs 130.2 GB of host memory, 108.0 of 120 GB" in ddp["blockers"][0]["message"]
    assert "needs 165.1 GB of host memory, 108.0 of 120 GB" in fsdp["blockers"][0]["message"]
    assert _on_less_host("qwen2.5-14b", "l40sx4", 145)["blockers"] == []


def test_weights_that_wait_in_host_memory_lie_there_twice_at_first() -> None:
    """70B on 4 x L4, 96 GB: 2 x 141.1 + 4 x 3 = 294 GB of host memory, of which an l4x4 has 186."""
    plan = _cloud("llama-3.1-70b", flavor="l4x4", max_steps=1)
    assert plan["placement"]["offload"] is True
    blockers = {blocker["code"]: blocker["message"] for blocker in plan["blockers"]}
    assert blockers["no_host_ram"].startswith("reading the weights needs 294.2 GB")


def _on_less_host(model: str, name: str, gigabytes: int) -> dict[str, Any]:
    less = msgspec.structs.replace(shipped_flavor(name), ram_bytes=gigabytes * 10**9)
    return _cloud(model, offered=[less], flavor=name, max_steps=1)


def test_pure_bf16_needs_a_gpu_that_has_it() -> None:
    """A T4 (compute capability 7.5) has no bf16, and is the cheapest for the same run otherwise."""
    recipe = {"finetuning_type": "full", "max_length": 256}
    assert _cloud("smollm2-135m", **recipe)["flavor"].startswith("t4")
    pure = _cloud("smollm2-135m", **recipe, pure_bf16=True)
    assert not pure["flavor"].startswith("t4") and pure["placement"]["dtype"] == "bfloat16"
    here = decided("smollm2-135m", "m2_pro_16gb", where="local", pure_bf16=True, **recipe)
    assert [blocker["code"] for blocker in here["blockers"]] == ["unsafe_precision"]


@pytest.mark.parametrize("name", ["a100", "h100x8", "cpu"])
def test_a_flavor_that_is_not_there(name: str) -> None:
    """A processor flavor is none to train on: nothing tells how fast it is."""
    with pytest.raises(UsageError) as caught:
        _cloud("qwen2.5-0.5b", flavor=name)
    assert (caught.value.code, caught.value.exit_code, caught.value.got) == ("unknown_flavor", 2, name)
    assert {"a100-large", "cpu-upgrade"} <= set(caught.value.expected.split(", "))  # cpu-upgrade can be named, too


def test_a_misspelt_flavor_and_one_that_cannot_do_it() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'cpu-upgrade'\?"):
        _cloud("qwen2.5-0.5b", flavor="cpu-upgrad")
    with pytest.raises(UsageError) as caught:  # a T4 has no bf16 (compute capability 7.5)
        _cloud("qwen2.5-0.5b", flavor="t4-small", pure_bf16=True, finetuning_type="full", max_length=256)
    assert "cannot train in the requested precision" in caught.value.message and "t4-small" not in caught.value.expected


def test_nothing_fits() -> None:
    """405B in 4 bit is 209 GB, more than any GPU here; 1e12 parameters are 2 TB in bf16, more than 90 %
    of the largest host."""
    for model, recipe in ((_large(), {"load_in_4bit": True}), (_large(10**12), {})):
        plan = _cloud(model, **recipe)
        assert (plan["flavor"], plan["timeout_seconds"]) == (None, None)
        assert [blocker["code"] for blocker in plan["blockers"]] == ["no_flavor"]


def test_nothing_is_offered() -> None:
    plan = _cloud("qwen2.5-0.5b", offered=())
    assert [blocker["code"] for blocker in plan["blockers"]] == ["no_flavor"]


def test_host_memory_takes_weights_only_when_nothing_else_fits() -> None:
    """300B in bf16 is 600 GB: 75 GB on each of 8 H200 (141 GB, $40), but not on 8 RTX PRO 6000 (96 GB, $22) with the
    layers in work on top and 30 % of doubt. 405B is 101 GB a GPU, which with them is more than an H200 is sure to hold.
    """
    plan = _cloud(_large(300 * 10**9))
    assert (plan["flavor"], plan["placement"]["offload"]) == ("h200x8", False)
    assert _cloud(_large(), max_hours=100)["placement"]["offload"] is True


def test_host_memory_that_is_too_small_takes_no_weights() -> None:
    """405B in bf16 is 812 GB."""
    machine = recorded_machine("8x_l40s")
    roomy = decided(_large(), machine, where="local", max_hours=100)
    assert (roomy["placement"]["strategy"], roomy["placement"]["offload"]) == ("fsdp", True)
    small = msgspec.structs.replace(machine, ram_bytes=512 * 10**9, ram_available_bytes=500 * 10**9)
    tight = decided(_large(), small, where="local", max_hours=100)
    assert [blocker["code"] for blocker in tight["blockers"]] == ["no_memory"]
    assert says(decided(_large(), small, max_hours=100))["memory"] == "cloud"


def test_the_device_of_this_machine_is_not_that_of_a_flavor() -> None:
    plan = _cloud("qwen2.5-0.5b", device="cpu")
    reason = next(reason for reason in plan["reasons"] if reason["rule"] == "device")
    assert (plan["placement"]["device"], reason["value"]) == ("cuda", "cuda")
    assert reason["because"] == "the best of NVIDIA T4; --device cpu is of this machine"


def test_a_disk_that_is_too_small() -> None:
    """A run of 7B leaves 15 GB merged, 15 GB in f16, 8 GB in q8_0 and 5 GB in q4_k_m here. A job downloads 15 GB, and
    merges nothing."""
    machine = msgspec.structs.replace(recorded_machine("a100_80gb"), disk_free_bytes=40 * 10**9)
    here = decided("qwen2.5-7b", machine, where="local")
    assert [blocker["code"] for blocker in here["blockers"]] == ["no_disk"]
    for gigabytes, codes in ((40, []), (16, []), (15, ["no_disk"])):
        small = [msgspec.structs.replace(flavor, disk_bytes=gigabytes * 10**9) for flavor in flavors.shipped()]
        plan = _cloud("qwen2.5-7b", offered=small, flavor="a100-large")
        assert [blocker["code"] for blocker in plan["blockers"]] == codes, gigabytes


def test_equal_prices_go_by_name() -> None:
    t4 = shipped_flavor("t4-small")
    offered = [msgspec.structs.replace(t4, name=name) for name in ("b", "c", "a")]
    assert _cloud("qwen2.5-0.5b", offered=offered)["flavor"] == "a"
    assert _cloud("qwen2.5-0.5b", offered=offered[::-1])["flavor"] == "a"


@pytest.mark.parametrize(
    ("upper", "seconds"),
    [
        (0, 600),
        (48, 660),  # 60 + 600
        (1197, 2100),  # 1496.25 + 600 = 2096.25
        (3600, 5100),  # 4500 + 600
        (3601, 5160),  # 4501.25 + 600
    ],
)
def test_the_timeout_by_hand(upper: float, seconds: int) -> None:
    assert timeout_seconds(Range(0, upper, ""), 8.0) == seconds


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3.1-70b"])
def test_the_timeout_of_a_plan(model: str) -> None:
    plan = _cloud(model)
    upper = plan["estimates"]["seconds"]["high"]
    assert plan["timeout_seconds"] % 60 == 0
    assert 0 <= plan["timeout_seconds"] - (upper * 1.25 + 600) < 61


def _cloud(model: str | ModelFacts, **said: Any) -> dict[str, Any]:
    plan = decided(model, "m2_pro_16gb", where="cloud", **said)
    assert plan["where"] == "cloud"
    return plan


def test_a_flavor_without_a_gpu_is_taken_when_it_is_named_and_never_chosen() -> None:
    """Its processors are unknown: no time, no cost, and the longest accepted run as the timeout."""
    made = decided("smollm2-135m", "bare_cpu", where="cloud", flavor="cpu-upgrade", max_hours=1.5)
    assert (made["flavor"], made["blockers"], made["timeout_seconds"]) == ("cpu-upgrade", [], 5400)
    placed = made["placement"]
    assert (placed["backend"], placed["device"], placed["dtype"], placed["threads"]) == ("hf_jobs", "cpu", "float32", 8)
    assert made["estimates"]["seconds"]["low"] is None
    assert "nothing tells how fast" in made["estimates"]["seconds"]["basis"]
    assert decided("smollm2-135m", "bare_cpu", where="cloud")["flavor"] == "t4-small"


def test_a_flavor_without_a_gpu_must_hold_the_model() -> None:
    made = decided("qwen2.5-7b", "bare_cpu", where="cloud", flavor="cpu-basic")
    assert "no_memory" in {blocker["code"] for blocker in made["blockers"]}
