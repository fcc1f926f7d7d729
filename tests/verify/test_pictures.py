"""Pairs of GGUF files of the vision families: right ones pass with the figures that were measured, and each fault is
named by the check whose matter it is."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gguf_edit
import gguf_maker
import picture_pairs
import tiny_vision
from gguf_faults import planted, times
from skill_train.llama.gguf_header import read_gguf
from skill_train.llama.pictures.compare import Pair, Picture, PicturePrompt, ask_pictures
from skill_train.model.convertible.from_config import unread_epsilon
from skill_train.program.pictures.decode import in_rgb
from skill_train.program.pictures.tokens import ImageModel
from skill_train.reference.pictures import PictureQuestion
from skill_train.run.verify_record import Check, NotChecked
from skill_train.verify.pictures.check import check_pairs, check_picture_tokens
from skill_train.verify.pictures.measured import measure
from skill_train.verify.pictures.projector import check_projector, check_projector_weights
from skill_train.verify.pictures.same_pixels import check_same_pixels

pytestmark = pytest.mark.slow

Found = list[Check | NotChecked]


def judged(pair: Pair, kind: str, *pictures: Any, reference: Path | None = None, base: Path | None = None) -> Found:
    shown = pictures or (picture_pairs.picture(140, 84),)
    image: ImageModel = {"model": str(reference or tiny_vision.cached(kind)), "revision": None}
    return check_pairs([pair], image, [picture_pairs.question(one) for one in shown], base)


def named(found: Found, name: str) -> Check:
    return next(one for one in found if one.name == name and isinstance(one, Check))


def failed(found: Found) -> dict[str, str]:
    return {one.name: one.detail for one in found if isinstance(one, Check) and one.verdict == "fail"}


@cache
def upright() -> list[Any]:
    """The pictures that must raise no alarm."""
    from PIL import ImageOps

    sizes = [picture_pairs.picture(*size, seed=size[0]) for size in ((40, 30), (300, 200), (2000, 1500))]
    kinds = [picture_pairs.stored(kind) for kind in ("L", "RGBA", "CMYK", "rotated", "webp")]
    return [*sizes, *(in_rgb(ImageOps.exif_transpose(one)) for one in kinds)]


@pytest.mark.parametrize("kind", tiny_vision.one_of_each())
def test_a_right_pair_passes_on_pictures_of_every_kind(kind: str) -> None:
    found = judged(picture_pairs.pair(kind), kind, *upright())
    assert failed(found) == {}
    assert [one for one in found if isinstance(one, NotChecked)] == []
    same = named(found, "pictures")
    assert same.verdict == "pass", same.detail
    assert same.figures["differing_pixels"] == 0
    assert same.figures["pixels_unread"] is None
    assert 0 < float(str(same.figures["mean_kl"])) < 1e-5
    assert float(str(same.figures["mean_kl_blank"])) > 0.05


@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(k, marks=pytest.mark.torture) for k in ("qwen3-vl", "smolvlm"))]
)
def test_several_pictures_in_several_turns(kind: str) -> None:
    """Their positions follow each other; the last text is longer than what llama.cpp is given at once."""
    shown = [picture_pairs.picture(*size, seed=size[0]) for size in ((200, 300), (140, 84), (90, 90))]
    asked = picture_pairs.question(*shown[:2]).messages + picture_pairs.question(shown[2]).messages
    asked[2]["content"].append({"type": "text", "text": " and" * 200})
    image: ImageModel = {"model": str(tiny_vision.cached(kind)), "revision": None}
    found = check_pairs([picture_pairs.pair(kind)], image, [PictureQuestion(asked, shown)])
    assert failed(found) == {}
    assert named(found, "pictures").verdict == "pass"


def test_a_quantized_language_model_is_held_to_its_own_type() -> None:
    found = judged(picture_pairs.pair("gemma3", projector="f16", text="q8_0"), "gemma3")
    same = named(found, "pictures")
    assert same.verdict == "pass", same.detail
    assert float(str(same.figures["embedding_error"])) < 0.001, "the projector is not quantized"
    assert 1e-5 < float(str(same.figures["mean_kl_given_embeddings"])) < 0.01


@pytest.mark.torture
def test_llama_cpp_leaves_the_epsilon_of_qwen2_vl_out(tmp_path: Path) -> None:
    """Of a file that states 1e-3 it computes what transformers computes with hardly any. Where this fails, a later
    llama.cpp reads it: take the family out of EPSILON_LEFT_OUT."""
    kl = {}
    for epsilon in (1e-3, 1e-12):
        folder = tmp_path / f"{epsilon}"
        shutil.copytree(tiny_vision.cached("qwen2-vl"), folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["rms_norm_eps"] = epsilon
        (folder / "config.json").write_text(json.dumps(config))
    text = gguf_maker.export(tmp_path / "0.001", tmp_path / "made", outtype="f16")
    pair = replace(picture_pairs.pair("qwen2-vl"), text=text)
    for name in ("0.001", "1e-12"):
        found = judged(pair, "qwen2-vl", reference=tmp_path / name)
        kl[name] = float(str(named(found, "pictures").figures["mean_kl"]))
    assert kl["1e-12"] < 1e-5 < 1e-4 < kl["0.001"]
    assert unread_epsilon(json.loads((tmp_path / "0.001" / "config.json").read_text())) == 1e-3


# Of each kind the activation of its tower, as published configs state it, and the epsilon of its norms, which is fixed
# in the code of transformers 5.23 for Qwen and Pixtral.
COMPUTED = {
    "qwen2-vl": ("quick_gelu", "1e-06"), "qwen2.5-vl": ("silu", "1e-06"), "qwen3-vl": ("gelu_pytorch_tanh", "1e-06"),
    "gemma3": ("gelu_pytorch_tanh", "1e-06"), "smolvlm": ("gelu_pytorch_tanh", "1e-06"),
    "idefics3": ("gelu_pytorch_tanh", "1e-06"), "mistral3": ("silu", "1e-05"), "pixtral": ("silu", "1e-05"),
}  # fmt: skip


@pytest.mark.parametrize("kind", tiny_vision.one_of_each("qwen2.5-vl"))
def test_what_the_tower_computes_with_is_the_models(kind: str) -> None:
    """Each by its own: little of it shows in the embeddings of one picture."""
    pair, (activation, its_epsilon) = picture_pairs.pair(kind), COMPUTED[kind]
    text, good = read_gguf(pair.text), read_gguf(pair.projector)
    epsilon, gelu, silu = "clip.vision.attention.layer_norm_epsilon", "clip.use_gelu", "clip.use_silu"
    changes: dict[str, dict[str, Any]] = {"right": {}, "epsilon": {epsilon: 1e-4}, "both": {gelu: True, silu: True}}
    for switch in (gelu, silu):
        changes[switch] = {gelu: False, silu: False} | {switch: not good.metadata.get(switch, False)}
    said = {}
    for name, changed in changes.items():
        check = check_projector(replace(good, metadata=good.metadata | changed), text, tiny_vision.cached(kind))
        said[name] = check.verdict, check.detail
    assert said["right"][0] == "pass", said["right"]
    assert said["epsilon"] == ("fail", f"{epsilon} is 0.0001, and the model has {its_epsilon}")
    assert said["both"][0] == said[gelu][0] == said[silu][0] == "fail", said
    assert f"and the model has {activation}" in said[gelu][1]


@pytest.mark.parametrize("kind", tiny_vision.one_of_each("qwen2.5-vl"))
def test_a_number_that_no_file_of_the_model_states_is_told(kind: str) -> None:
    """llama.cpp makes large pictures smaller by the first one, and the pictures that are compared are small."""
    pair = picture_pairs.pair(kind)
    text, good = read_gguf(pair.text), read_gguf(pair.projector)
    assert check_projector(good, text, tiny_vision.cached(kind)).verdict == "pass"
    for key, value in {"image_max_pixels": 200_704, "window_size": 16}.items():
        metadata = good.metadata | {f"clip.vision.{key}": value}
        check = check_projector(replace(good, metadata=metadata), text, tiny_vision.cached(kind))
        assert check.verdict == "warn" and f"not compared: clip.vision.{key}" in check.detail


def test_what_a_config_leaves_out_is_what_its_class_has(tmp_path: Path) -> None:
    """Published configs of Gemma 3 name neither the activation nor the epsilon of the tower."""
    pair, folder = picture_pairs.pair("gemma3"), Path(shutil.copytree(tiny_vision.cached("gemma3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_act", "layer_norm_eps"):
        del config["vision_config"][name]
    (folder / "config.json").write_text(json.dumps(config))
    text, good = read_gguf(pair.text), read_gguf(pair.projector)
    assert check_projector(good, text, folder).verdict == "pass"
    for wrong in ({"clip.vision.attention.layer_norm_epsilon": 1e-4}, {"clip.use_gelu": False}):
        assert check_projector(replace(good, metadata=good.metadata | wrong), text, folder).verdict == "fail", wrong


def with_projector(pair: Pair, out: Path, **changes: Any) -> Pair:
    return replace(pair, projector=gguf_edit.rewrite(pair.projector, out, **changes))


def exchanged(data: Any) -> Any:
    """Patches [out, colours, height, width] with blue for red."""
    return data[:, ::-1].copy()


def renamed(pair: Pair, folder: Path) -> Pair:
    tokens = gguf_edit.metadata(pair.text, "tokenizer.ggml.tokens")
    tokens[tokens.index("<start_of_image>")] = "<begin_of_image>"
    text = gguf_edit.rewrite(pair.text, folder / "renamed.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    return Pair(text, Path(shutil.copy(pair.projector, folder / "renamed-mmproj.gguf")))


def cut(pair: Pair, out: Path) -> Pair:
    out.write_bytes(pair.projector.read_bytes()[:-4000])
    return replace(pair, projector=out)


OTHER_COLOURS = [0.45, 0.3, 0.4]


@pytest.fixture(scope="module")
def gemma_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """For each file what failed of it, with the words."""
    folder, pair = tmp_path_factory.mktemp("faults"), picture_pairs.pair("gemma3")
    mean, std = ({f"clip.vision.{key}": OTHER_COLOURS} for key in ("image_mean", "image_std"))
    other = shutil.copy(picture_pairs.pair("gemma3", seed=1).projector, folder / "other.gguf")
    family = shutil.copy(picture_pairs.pair("smolvlm").projector, folder / "family.gguf")
    pairs = {
        "other": replace(pair, projector=Path(other)),
        "family": replace(pair, projector=Path(family)),
        "cut": cut(pair, folder / "cut.gguf"),
        "mean": with_projector(pair, folder / "mean.gguf", metadata=mean),
        "std": with_projector(pair, folder / "std.gguf", metadata=std),
        "colours": with_projector(pair, folder / "colours.gguf", tensors={"v.patch_embd.weight": exchanged}),
        "renamed": renamed(pair, folder),
        "type": with_projector(pair, folder / "type.gguf", metadata={"general.file_type": 10}),  # q2_k
    }
    return {name: failed(judged(faulty, "gemma3")) for name, faulty in pairs.items()}


@pytest.mark.parametrize(
    ("file", "check", "said"),
    [
        ("other", "projector_weights", "it is of another model: 39 of 39 tensors"),
        ("other", "pictures", "tower or projector are not the model's"),
        ("family", "projector", "it is of another model: a projector of the type idefics3, and the model has gemma3"),
        ("cut", "file", "cut off"),
        ("mean", "projector", "clip.vision.image_mean is [0.45, 0.3, 0.4], and the model has [0.5, 0.5, 0.5]"),
        ("mean", "pictures", "each colour has another mean or deviation (0.45 and 0.5, 0.3 and 0.5, 0.4 and 0.5;"),
        ("std", "projector", "clip.vision.image_std is [0.45, 0.3, 0.4]"),
        ("std", "pictures", "each colour has another mean or deviation (0.5 and 0.45,"),
        ("colours", "projector_weights", "the colours are exchanged"),
        ("colours", "pictures", "tower or projector are not the model's"),
        ("type", "projector", "it states the type q2_k, which none of its tensors has"),
        ("renamed", "picture_tokens", "'<begin_of_image>', and the model's is '<start_of_image>'"),
        ("renamed", "pictures", "the tokens are others: at "),
    ],
)
def test_a_planted_fault_is_named(gemma_faults: dict[str, dict[str, str]], file: str, check: str, said: str) -> None:
    assert said in gemma_faults[file][check]


# llama.cpp takes the width inside a block from the tensors, and shows Qwen-VL pictures of any size.
UNREAD = {"feed_forward_length"}


@pytest.mark.parametrize("kind", tiny_vision.one_of_each("qwen2.5-vl"))
def test_each_number_of_a_projector_is_compared(kind: str) -> None:
    pair = picture_pairs.pair(kind)
    text, good = read_gguf(pair.text), read_gguf(pair.projector)
    unread, missed = UNREAD | ({"image_size"} if kind.startswith("qwen") else set()), []
    for key, value in good.metadata.items():
        if not key.startswith("clip.vision.") or key.removeprefix("clip.vision.") in unread:
            continue
        first = value[0] if isinstance(value, list) else value
        wrong = not first if isinstance(first, bool) else 1.05 * first + 1e-6 if isinstance(first, float) else first + 1
        others = (None, [wrong, *value[1:]] if isinstance(value, list) else wrong)
        for other in others:
            metadata = {name: one for name, one in (good.metadata | {key: other}).items() if one is not None}
            check = check_projector(replace(good, metadata=metadata), text, tiny_vision.cached(kind))
            missed += [] if check.verdict == "fail" else [(key, other)]
    assert missed == []


@pytest.mark.parametrize(("kind", "verdict"), [(3, "pass"), (4, "pass"), (1, "fail"), (6, "fail")])
def test_a_token_around_a_picture_that_is_not_found_in_a_text(kind: int, verdict: str) -> None:
    text, key = read_gguf(picture_pairs.pair("gemma3").text), "tokenizer.ggml.token_type"
    token = text.strings("tokenizer.ggml.tokens").index("<start_of_image>")
    types = [kind if number == token else one for number, one in enumerate(text.integers(key))]
    measured: Any = SimpleNamespace(kind="gemma3", token_texts={token: "<start_of_image>"})
    check = check_picture_tokens(
        replace(text, metadata=text.metadata | {key: types}), measured, tiny_vision.cached("gemma3")
    )
    assert check.verdict == verdict, check.detail


@pytest.mark.torture
def test_a_vocabulary_without_a_token_that_llama_cpp_needs_is_named(tmp_path: Path) -> None:
    """llama.cpp loads the pair, and fails on the first picture."""
    model = tiny_vision.without_tile_tokens(tmp_path / "model")
    for name in ("text", "projector"):
        (tmp_path / name).mkdir()
    text = gguf_maker.export(model, tmp_path / "text").rename(tmp_path / "text.gguf")
    projector = gguf_maker.export(model, tmp_path / "projector", options=("--mmproj",))
    found = failed(judged(Pair(text, projector), "idefics3", reference=model))
    assert found.keys() == {"picture_tokens", "loads_projector"}
    assert "llama.cpp puts the token <global-img> around a picture" in found["picture_tokens"]


def test_a_damaged_file_is_never_run(gemma_faults: dict[str, dict[str, str]]) -> None:
    assert gemma_faults["cut"].keys() == {"file"}


PARTS = [
    ("gemma3", "multi_modal_projector", "the projector was"),
    ("gemma3", "vision_tower", "the tower was"),
    ("smolvlm", "connector", "the projector was"),
    pytest.param("idefics3", "connector", "the projector was", marks=pytest.mark.torture),
    ("qwen2.5-vl", "visual.merger", "the projector was"),
    ("qwen3-vl", "visual.blocks", "the tower was"),
]


@pytest.mark.parametrize(("kind", "part", "said"), PARTS)
def test_a_part_that_was_trained_and_not_exported_is_named(kind: str, part: str, said: str, tmp_path: Path) -> None:
    base, file = tiny_vision.cached(kind), read_gguf(picture_pairs.pair(kind).projector)
    tuned = picture_pairs.changed(base, tmp_path / "tuned", part)
    right = check_projector_weights(file, base)
    assert (right.verdict, right.figures["looked_at"]) == ("pass", len(file.tensors))
    alone, with_base = check_projector_weights(file, tuned), check_projector_weights(file, tuned, base)
    assert {alone.verdict, with_base.verdict} == {"fail"}
    assert f"{said} trained and not exported, or is another's" in alone.detail
    assert f"{said} trained and not exported: " in with_base.detail
    assert "are the base's" in with_base.detail


def test_a_quantized_projector_of_another_length_is_named(tmp_path: Path) -> None:
    """No row is as far off as its type may be."""
    base = tiny_vision.cached("gemma3")
    good = read_gguf(picture_pairs.projector(base, tmp_path / "good.gguf", "q8_0"))
    tensor = next(name for name, each in good.tensors.items() if each.kind == "Q8_0")
    wrong = planted(good, tensor, times(1.02), tmp_path / "wrong.gguf")
    assert check_projector_weights(good, base).verdict == "pass"
    found = check_projector_weights(wrong, base)
    assert found.verdict == "fail" and f"{tensor} is 1.02 times " in found.detail


@pytest.mark.torture
def test_another_end_of_a_line_is_named(tmp_path: Path) -> None:
    """Of Mistral 3, whose projector holds it: a row of the embedding that was trained and not exported."""
    base, pair = tiny_vision.cached("mistral3"), picture_pairs.pair("mistral3")
    other = with_projector(pair, tmp_path / "m.gguf", tensors={"v.token_embd.img_break": lambda data: data + 0.5})
    found = failed(judged(other, "mistral3", picture_pairs.picture(140, 84)))
    assert "v.token_embd.img_break is not language_model.model.embed_tokens.weight" in found["projector_weights"]
    assert "pictures" in found
    right = check_projector_weights(read_gguf(pair.projector), base)
    assert (right.verdict, right.figures["looked_at"]) == ("pass", 34)


def test_patches_without_a_number_do_not_pass(tmp_path: Path) -> None:
    """Of Pixtral, whose ends of lines alone may have none in llama.cpp."""
    pair = picture_pairs.pair("pixtral")

    def planted(weights: Any) -> Any:
        weights[3] = float("nan")
        return weights

    other = with_projector(pair, tmp_path / "m.gguf", tensors={"mm.2.weight": planted})
    assert "pictures" in failed(judged(other, "pixtral", picture_pairs.picture(140, 84)))


def test_answers_of_an_old_tower_differ_too(tmp_path: Path) -> None:
    base = tiny_vision.cached("gemma3")
    tuned = picture_pairs.changed(base, tmp_path / "tuned", "vision_tower")
    found = failed(judged(picture_pairs.pair("gemma3"), "gemma3", reference=tuned, base=base))
    assert found.keys() == {"projector_weights", "pictures"}


def test_deepstack_that_was_dropped_is_named(tmp_path: Path) -> None:
    pair = picture_pairs.pair("qwen3-vl")
    content = pair.text.read_bytes()
    key = b"qwen3vl.n_deepstack_layers" + struct.pack("<I", 4)  # type 4 is a uint32
    text = tmp_path / "model-f16.gguf"
    text.write_bytes(content.replace(key + struct.pack("<I", 1), key + struct.pack("<I", 0)))
    layers = tuple(name for name in read_gguf(pair.projector).tensors if name.startswith("v.deepstack."))
    states = {"clip.vision.is_deepstack_layers": [False, False]}
    without = with_projector(Pair(text, pair.projector), tmp_path / "mmproj.gguf", metadata=states, without=layers)
    found = failed(judged(without, "qwen3-vl"))
    assert "deepstack was dropped: the file takes the tower's layers [], the model [0]" in found["projector"]
    assert "deepstack was dropped: v.deepstack.0." in found["projector_weights"]
    assert found.keys() & {"pictures", "loads_projector"}, "and the pair answers otherwise, or does not run"


def test_pixels_in_another_order_are_named() -> None:
    """What a program that hands llama.cpp blue for red would show."""
    image: ImageModel = {"model": str(tiny_vision.cached("gemma3")), "revision": None}
    measured = measure(image, [picture_pairs.question(picture_pairs.picture(140, 84))])
    prompt = measured.answers[0]
    assert prompt.pictures is not None
    swapped = [Picture(one.pixels[:, :, ::-1]) for one in prompt.pictures]
    given = [part.embeddings for part in prompt.parts]
    answers = ask_pictures(
        picture_pairs.pair("gemma3"), [PicturePrompt(prompt.text, swapped, given)], any_size=True, threads=2
    )
    check = check_same_pixels("mmproj.gguf", "f16", "f16", measured, answers)
    assert isinstance(check, Check)
    assert (check.verdict, "the colours are exchanged, blue for red" in check.detail) == ("fail", True)


def test_a_grey_picture_cannot_be_judged() -> None:
    grey = picture_pairs.picture(140, 84).point(lambda _: 127)
    found = judged(picture_pairs.pair("gemma3"), "gemma3", grey)
    assert failed(found) == {}
    reasons = [one.reason for one in found if isinstance(one, NotChecked) and one.name == "pictures"]
    assert [reason.startswith("cannot be judged: a grey picture changes the text by 0 nats") for reason in reasons] == [
        True
    ]


@pytest.mark.parametrize(
    ("kind", "size", "verdict", "said"),
    [
        # Derived by hand: the target of 300 x 200 is 252 x 196 (limit of 64 tokens), llama.cpp's own 308 x 196.
        (
            "qwen2-vl",
            (300, 200),
            "warn",
            "pictures of 1 of 1 questions get another size, up to 77 tokens in place of 54",
        ),
        # A square fills Gemma's square; what is left is the text around the picture.
        ("gemma3", (200, 200), "warn", "0% of the pixels differ, its server writes the text around a picture"),
        ("gemma3", (300, 150), "warn", "100% of the pixels differ"),
        # 288 x 192 is the target, and has the shape of the picture.
        ("qwen3-vl", (300, 200), "pass", "0% of the pixels differ"),
    ],
)
def test_what_users_of_llama_cpp_get_is_told(kind: str, size: tuple[int, int], verdict: str, said: str) -> None:
    used = named(judged(picture_pairs.pair(kind), kind, picture_pairs.picture(*size)), "pictures_as_used")
    assert (used.verdict, said in used.detail) == (verdict, True), used.detail
