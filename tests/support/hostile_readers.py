"""Who reads files that somebody else made: each reader with the file that it reads, whole, and how it is called.

The campaign in `torture/test_foreign_files.py` puts each form of `hostile_forms` in place of each of these files.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

import hostile_records
from hostile import check_output, text
from hostile_files import ADAPTER, MODEL, RECIPE, _entry, _gguf, _plan, _safetensors, _whole_plan
from hostile_rows import ROWS, _parquet
from one_command import called
from skill_train.core.resources import demo
from skill_train.data import read_rows
from skill_train.data import scan as dataset
from skill_train.facts import ModelFacts
from skill_train.gguf import mix_file, ollama_modelfile
from skill_train.hub import dataset_card, flavors
from skill_train.hub import upload as hub_push
from skill_train.hub.rows import first_rows
from skill_train.llama import float_type, get_converter, gguf_header
from skill_train.llama import run_converter as converter
from skill_train.machine import read as machine
from skill_train.model import adapter, new_tokens
from skill_train.model import folder as model
from skill_train.model import foreign_files as model_files
from skill_train.model import sidecar_files as companions
from skill_train.model import weight_files as shards
from skill_train.model.convertible import from_config
from skill_train.model.convertible import vocabulary as llama_vocabulary
from skill_train.plan import file as plan_file
from skill_train.program.model_files import check_model, read_foreign
from skill_train.program.rows import iter_rows
from skill_train.program.start.inputs import check_base, load_plan
from skill_train.recipe import fields as recipe
from skill_train.run import cloud_record, earlier_start, plan_record, records, train_record
from skill_train.run import lock as run_lock
from skill_train.run.folder import RunDir
from skill_train.train import measured_speed as calibration
from skill_train.train import precision_probe
from skill_train.verify import check_header as verify_file
from skill_train.verify import check_template as verify_template
from skill_train.verify.metadata import check as verify_metadata

Call = Callable[[Path], object]


@dataclass(frozen=True)
class Reader:
    """One reader of one file.

    Attributes:
        file: below the folder that `make` fills.
        kind: of its content, for the forms.
        call: with that folder.
        shown: by whom it is called; part of its name.
        most: inputs of one form; fewer where a call is slow.
    """

    shown: str
    file: str
    kind: str
    make: Callable[[Path], None]
    call: Call
    most: int = 99

    @property
    def name(self) -> str:
        return f"{self.shown} of {self.file}"


def command(*arguments: object) -> int:
    """Runs one command in this process and checks that it explains itself."""
    done = called(*arguments)
    check_output(done, arguments)
    if "json" in arguments:
        answer = done.answer
        assert answer["ok"] or (answer["error"]["message"] and answer["error"]["hint"]), f"no hint: {answer}"
    return done.code


# --- A model folder ---

TOKENIZER_CONFIG = {
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "eos_token": {"content": "</s>"},
    "tokenizer_class": "LlamaTokenizer",
    "added_tokens_decoder": {"5": {"content": "x", "special": True}},
    "model_max_length": 512,
}
INDEX_OF = "model-00001-of-00001.safetensors"


def _model(folder: Path) -> None:
    """The demo's model, with the files beside it that others have, and weights of two tensors."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"):
        shutil.copyfile(MODEL / name, folder / name)
    (folder / "tokenizer_config.json").write_bytes(text(TOKENIZER_CONFIG))
    (folder / "chat_template.jinja").write_text(str(TOKENIZER_CONFIG["chat_template"]))
    (folder / "special_tokens_map.json").write_bytes(text({"eos_token": "</s>", "bos_token": {"content": "<s>"}}))
    (folder / "added_tokens.json").write_bytes(text({"x": 5}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    (folder / "model.safetensors").write_bytes(_weights())


def _sharded(folder: Path) -> None:
    _model(folder)
    (folder / "model.safetensors").rename(folder / INDEX_OF)
    names = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), INDEX_OF)
    (folder / shards.INDEX).write_bytes(text({"metadata": {"total_size": 256}, "weight_map": names}))


@cache
def _weights() -> bytes:
    header = {"model.embed_tokens.weight": _entry((8, 4), 0), "lm_head.weight": _entry((8, 4), 128)}
    return _safetensors({**header, "__metadata__": {"format": "pt"}}, b"", 256)


def _planned(folder: Path) -> None:
    facts = model.read_model(folder)
    text(msgspec.to_builtins(facts))


def _checked(folder: Path) -> None:
    check_model(folder)
    check_base(str(folder), None)


def _with_companions(folder: Path) -> None:
    """What a merge copies and changes, from the base and from the adapter."""
    config = model.read_config(folder)
    shards.read_folder(folder)
    for name in ("part", "part-2", "other"):
        folder.with_name(name).mkdir()
    part, other = folder.with_name("part"), folder.with_name("other")
    companions.copy_companions(folder, other, part, lambda code, said: None)
    companions.copy_companions(other, folder, folder.with_name("part-2"), lambda code, said: None)
    companions.write_config(folder, part, {"vocab_size": 9, "new": config.get("vocab_size")}, "bfloat16")
    new_tokens.require_rows(folder, folder, 9, trained_whole=False, fewer=False)
    companions.model_digests(folder)


def _exported(folder: Path) -> None:
    model_files.require_sound(folder)
    from_config.why_not(model.read_config(folder), model.read_config(folder), files=set(os.listdir(folder)))
    llama_vocabulary.why_no_vocabulary(folder, "LlamaForCausalLM")
    converter.warn_of_window(folder, lambda code, said: None)
    shards.stored_tensors(folder)
    with converter.without_code(folder):
        pass


def _stored(folder: Path) -> None:
    float_type.choose(shards.stored_tensors(folder), "auto")


def _licence(folder: Path) -> None:
    model_files.require_sound(folder)
    hub_push.licence_in(folder)


def _of_models() -> list[Reader]:
    files = {
        "config.json": "json", "generation_config.json": "json", "tokenizer_config.json": "json",
        "tokenizer.json": "json", "special_tokens_map.json": "json", "added_tokens.json": "json",
        "chat_template.jinja": "text", "tokenizer.model": "binary", "model.safetensors": "safetensors",
    }  # fmt: skip
    calls: dict[str, Call] = {
        "plan": _planned,
        "the training program": _checked,
        "merge": _with_companions,
        "export": _exported,
        "the weights": _stored,
    }
    made = [
        Reader(shown, file, kind, _model, call)
        for shown, call in calls.items()
        for file, kind in files.items()
        if shown != "the weights" or kind == "safetensors"
    ]
    made += [
        Reader(f"{shown}, in parts,", file, kind, _sharded, call)
        for shown, call in calls.items()
        for file, kind in ((shards.INDEX, "json"), (INDEX_OF, "safetensors"))
    ]
    return [*made, Reader("the licence", "README.md", "text", _model, _licence)]


# --- An adapter, a GGUF file ---

_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def _adapter(folder: Path) -> None:
    (folder / adapter.CONFIG).write_bytes(text(ADAPTER))
    header = {f"{_LAYER}.lora_A.weight": _entry((4, 8), 0), f"{_LAYER}.lora_B.weight": _entry((8, 4), 128)}
    (folder / adapter.WEIGHTS).write_bytes(_safetensors(header, b"", 256))
    (folder / "tokenizer_config.json").write_bytes(text(TOKENIZER_CONFIG))
    (folder / "chat_template.jinja").write_text(str(TOKENIZER_CONFIG["chat_template"]))


def _read_adapter(folder: Path) -> None:
    found = adapter.read_adapter(folder)
    adapter.why_not_streamed(found)
    for module in found.modules:
        adapter.pattern_value(found.config["rank_pattern"], module, 1)
    companions.chat_template(folder)
    new_tokens.end_token(folder)


def _read_gguf(folder: Path) -> None:
    found = gguf_header.read_gguf(folder / "x.gguf")
    _ = found.architecture, found.of_architecture("block_count")
    verify_file.file_type(found), verify_file.check_file(found), verify_file.check_types(found)
    verify_metadata.check_metadata(found, json.loads((MODEL / "config.json").read_text()))
    verify_template.identity(found)


def _of_adapters() -> list[Reader]:
    files = {adapter.CONFIG: "json", adapter.WEIGHTS: "safetensors", "tokenizer_config.json": "json"}
    files["chat_template.jinja"] = "text"
    return [Reader("merge", file, kind, _adapter, _read_adapter) for file, kind in files.items()]


def _of_ggufs() -> list[Reader]:
    def make(folder: Path) -> None:
        (folder / "x.gguf").write_bytes(_gguf())

    return [Reader("its header", "x.gguf", "gguf", make, _read_gguf)]


# --- A dataset, a recipe, a plan ---


def _dataset(file: str) -> bytes:
    suffix = file.rpartition(".")[2]
    if suffix == "parquet":
        return _parquet()
    if suffix in ("csv", "tsv"):
        sign = "," if suffix == "csv" else "\t"
        return "".join(f"{a}{sign}{b}\n" for a, b in [("prompt", "completion"), *[("q", "a")] * 9]).encode()
    some = [*ROWS[:1] * 6, *ROWS[6:7]]
    return text(some) if suffix == "json" else b"\n".join(map(text, some)) + b"\n"


def _in_place(folder: Path, file: str, content: bytes) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(content)


def _asked(data: Path) -> recipe.Recipe:
    return recipe.from_dict({"model": "m", "data": str(data)})


def _scanned(data: Path) -> None:
    dataset.scan(_asked(data))


def _all_rows(data: Path) -> None:
    """As the training program reads them, and as `data` counts what is broken."""
    for _ in read_rows.read(_asked(data)):
        pass
    for _ in iter_rows(str(data), split="train", config=None, revision=None):
        pass


def _looked_at(data: Path) -> int:
    return command("data", data, "--format", "json")


def _of_datasets() -> list[Reader]:
    kinds = {"jsonl": "jsonl", "json": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}
    calls: dict[str, Call] = {"scan": _scanned, "train": _all_rows, "data": _looked_at}
    made = []
    for suffix, kind in kinds.items():
        file = f"rows.{suffix}"
        for shown, call in calls.items():
            whole = _dataset(file)
            made.append(
                Reader(
                    shown,
                    file,
                    kind,
                    lambda folder, file=file, whole=whole: _in_place(folder, file, whole),
                    lambda folder, file=file, call=call: call(folder / file),
                )
            )
    return [*made, *_of_starts()]


def _of_starts() -> list[Reader]:
    """The start of a file on the Hub, and the card of its dataset, from their bytes."""

    def start(suffix: str) -> Call:
        def read(folder: Path) -> None:
            content = read_foreign(folder / f"start.{suffix}", 1 << 20)
            for whole in (True, False):
                first_rows.numbered(content, f"start.{suffix}", whole=whole)

        return read

    def card(folder: Path) -> None:
        try:
            said = json.loads(read_foreign(folder / "card.json", 1 << 20))
        except (ValueError, RecursionError):  # the client reads it
            return
        if isinstance(said, dict):
            names = ["data/a.json", "data/b.json", "train.csv"]
            found = dataset_card.configuration(said, names, chosen=None, dataset="me/x")
            dataset_card.split_files(found, "train", dataset="me/x")

    suffixes = {"jsonl": "jsonl", "json": "json", "csv": "csv", "tsv": "csv", "txt": "text"}
    made = [
        Reader(
            "the first rows",
            f"start.{suffix}",
            kind,
            lambda folder, suffix=suffix: _in_place(folder, f"start.{suffix}", _dataset(f"start.{suffix}")),
            start(suffix),
        )
        for suffix, kind in suffixes.items()
    ]
    said = {"configs": [{"config_name": "a", "data_files": [{"split": "train", "path": "data/*.json"}]}],
            "dataset_info": {"config_name": "a", "splits": [{"name": "train", "num_examples": 5}]}}  # fmt: skip
    return [
        *made,
        Reader("the card", "card.json", "json", lambda folder: _in_place(folder, "card.json", text(said)), card),
    ]


def _of_folders_of_rows() -> list[Reader]:
    """A folder as `datasets` writes it: slower, so it has a group of its own."""
    files = {name: "json" if name.endswith("json") else "binary" for name in sorted(os.listdir(_saved()))}
    return [Reader("a folder", file, kind, _folder_of_rows, _scanned) for file, kind in files.items()]


def _folder_of_rows(folder: Path) -> None:
    shutil.copytree(_saved(), folder, dirs_exist_ok=True)


@cache
def _saved() -> Path:
    from datasets import Dataset

    made = _temporary("skill-train-saved-")
    Dataset.from_list([{"prompt": f"q{n}", "completion": "a"} for n in range(9)]).save_to_disk(str(made))
    return made


def _temporary(prefix: str) -> Path:
    """A folder for as long as this process lives."""
    made = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(text(RECIPE))


def _read_recipe(folder: Path) -> None:
    loaded = recipe.load(folder / "recipe.yaml")
    again = {key: value for key, value in vars(loaded).items() if value is not None}
    assert recipe.from_dict(yaml.safe_load(recipe.to_yaml(again))) == loaded


def _planned_recipe(folder: Path) -> int:
    return command("plan", folder / "recipe.yaml", "--where", "local", "--format", "json")


def _small_recipe(folder: Path) -> None:
    values = {"model": str(MODEL), "data": str(demo() / "data.parquet"), "max_length": 64, "max_steps": 2}
    (folder / "recipe.yaml").write_bytes(text(values))


def _given_plan(folder: Path) -> None:
    (folder / "plan.json").write_text(_whole_plan())


def _program_plan(folder: Path) -> None:
    load_plan(folder / "plan.json")


def _taken_plan(folder: Path) -> None:
    path = folder / "plan.json"
    for where in ("local", "cloud"):
        if plan_file.is_plan(path):
            plan_file.read_unchanged_plan(path, {}, where)
    plan_file.require_free(path)


def _of_recipes() -> list[Reader]:
    return [
        Reader("recipe", "recipe.yaml", "yaml", _recipe, _read_recipe),
        Reader("plan", "recipe.yaml", "yaml", _small_recipe, _planned_recipe),
        Reader("the training program", "plan.json", "json", _given_plan, _program_plan),
        Reader("local and submit", "plan.json", "json", _given_plan, _taken_plan),
        Reader(
            "submit", "plan.json", "json", _given_plan,
            lambda folder: command("submit", folder / "plan.json", "--dry-run", "--format", "json"),
        ),
        *(Reader("export-gguf --mix", name, "json", _mix, partial(_read_mix, name)) for name in _MIXES),
    ]  # fmt: skip


_MIXES = ("mix.json", "quantize.json")


def _read_mix(name: str, folder: Path) -> object:
    return mix_file.read_mix(folder / name, None)


def _mix(folder: Path) -> None:
    types = {"blk.0.attn_q.weight": "q4_k", "output.weight": "q6_k"}
    file = {"bytes": 9, "sha256": "0" * 64, "quant": "auto-5bpw", "tensor_types": types}
    (folder / "mix.json").write_bytes(text(types))
    record = {"schema": "skill-train/step/1", "step": "quantize", "outputs": {"gguf/m-auto-5bpw.gguf": file}}
    (folder / "quantize.json").write_bytes(text(record))


# --- A run directory, caches ---

_LINES: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": train_record.read_steps,
    "samples.jsonl": train_record.read_fed_rows,
    "held_out.jsonl": train_record.read_rows,
}
_TEXTS = ("recipe.yaml", "gguf/Modelfile", "train.log")


def _run(folder: Path) -> None:
    made = hostile_records.make_run(folder.parent / "made", cloud=False)
    shutil.rmtree(folder)
    made.rename(folder)
    (folder / "train.log").write_text("started\n" * 9)


def _cloud_run(folder: Path) -> None:
    made = hostile_records.make_run(folder.parent / "made", cloud=True)
    shutil.rmtree(folder)
    made.rename(folder)


def _of_runs() -> list[Reader]:
    """Each command that needs neither network nor torch, on a run of which one file is hostile."""
    calls: dict[str, Call] = {
        "status": lambda run: command("status", run, "--format", "json"),
        "diff": lambda run: command("diff", run, hostile_records.RUNS / "tiny", "--format", "human"),
        "push": lambda run: command("push", run, "--repo", "me/x", "--dry-run", "--format", "json"),
        "resume": lambda run: command("local", "--resume", "--run-dir", run, "--format", "human"),
        "verify": lambda run: command("verify", run, "--format", "json"),
        "merge": lambda run: command("merge", run, "--format", "json"),
    }
    return [Reader(shown, file, kind, _run, call, 2) for shown, call in calls.items() for file, kind in _files_of_run()]


def _of_reports() -> list[Reader]:
    """A page takes a second, so it has a group of its own."""
    call = lambda run: command("report", run, "--format", "json")  # noqa: E731
    return [Reader("report", file, kind, _run, call, 1) for file, kind in _files_of_run()]


def _files_of_run() -> list[tuple[str, str]]:
    names = sorted(name for name in hostile_records.documents() if name not in _CLOUD)
    files = [(name, "json") for name in names] + [(name, "jsonl") for name in _LINES]
    files += [(name, "text") for name in _TEXTS] + [("adapter/adapter_config.json", "json"), (".lock", "text")]
    return [*files, ("adapter/adapter_model.safetensors", "safetensors")]


_CLOUD = ("train.failed.json", "pull.json", "cloud.json", "push.json")


def _of_records() -> list[Reader]:
    """The readers of records themselves: a thousand a second."""
    names = [name for name in sorted(hostile_records.documents()) if name != "cloud.json"]
    made = [
        Reader("a record", name, "json", _cloud_run, lambda run, name=name: _read_record(run / name)) for name in names
    ]
    made += [
        Reader("lines", name, "jsonl", _cloud_run, lambda run, name=name, read=read: read(run / name))
        for name, read in _LINES.items()
    ]
    calls: dict[str, Call] = {
        "the record of the jobs": lambda run: cloud_record.read(RunDir(run)),
        "the way on": lambda run: cloud_record.continue_command(RunDir(run)),
    }
    made += [Reader(shown, "cloud.json", "json", _cloud_run, call) for shown, call in calls.items()]
    made.append(
        Reader("a plan", "plan.json", "json", _run, lambda run: text(plan_record.read(run / "plan.json").as_dict()))
    )
    made.append(Reader("what was trained", "plan.json", "json", _run, lambda run: str(RunDir(run).tuned)))
    made.append(Reader("what has begun", "plan.json", "json", _run, _begun))
    made.append(Reader("the lock", ".lock", "text", _run, lambda run: run_lock.is_locked(RunDir(run))))
    return made


def _read_record(path: Path) -> None:
    """Read, and written again."""
    kind = hostile_records.CLASSES.get(path.name)
    if kind is None:
        text(records.read_json(path))
    else:
        records.write(path.with_name("again.json"), records.read(path, kind))


def _begun(run: Path) -> None:
    earlier_start.has_begun(RunDir(run)) and earlier_start.trained(RunDir(run))
    earlier_start.already_there(RunDir(run), plan_record.from_dict(_plan(""), Path("plan.json")), resume=True)


def _cache(folder: Path) -> None:
    """Of the Hub's prices, the speeds of this machine and the converter: what earlier commands left."""
    shutil.rmtree(folder)
    shutil.copytree(_kept_cache(), folder)


@cache
def _kept_cache() -> Path:
    made = _temporary("skill-train-cache-")
    with _cached_in(made):
        flavors._keep(flavors.shipped(), flavors.endpoint())
        found = calibration._path(_machine(), "cpu", "float32")
        found.parent.mkdir(parents=True)
        kept = {"flops_per_second": 1e9, "parameters": 5, "basis": "x", "steps": 3}
        shapes = {"x": kept, calibration._shape(_facts()): kept}
        found.write_bytes(text({"schema": calibration.SCHEMA, "chip": "x", "dtype": "float32", "shapes": shapes}))
        shutil.move(found, made / "calibration" / "speeds.json")
        figures = {name: {"seconds": 1.0, "loss": 2.0} for name in ("float32", "bfloat16")}
        with contextlib.suppress(Exception):
            probe = precision_probe._probe_file("cpu", _machine(), _facts())
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(text(figures))
            probe.rename(made / "probe.json")
        next(made.glob("flavors-*.json")).rename(made / "flavors.json")
        (made / "converter").mkdir()
        (made / "converter" / "a.py").write_bytes(b"pass")
        digest = {"bytes": 4, "sha256": hashlib.sha256(b"pass").hexdigest()}
        (made / "converter" / get_converter.MANIFEST).write_bytes(text({"files": {"a.py": digest}}))
    return made


@cache
def _machine() -> Any:
    return machine.read_machine()


@cache
def _facts() -> ModelFacts:
    return model.read_model(MODEL)


@contextlib.contextmanager
def _cached_in(folder: Path) -> Any:
    before = os.environ.get("SKILL_TRAIN_CACHE")
    os.environ["SKILL_TRAIN_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("SKILL_TRAIN_CACHE")
        os.environ |= {"SKILL_TRAIN_CACHE": before} if before is not None else {}


def _prices(folder: Path) -> None:
    with _cached_in(folder):
        os.rename(folder / "flavors.json", flavors._cache_file(flavors.endpoint()))
        found, _ = flavors.current(live=False)
        for flavor in found:
            json.dumps(msgspec.to_builtins(flavor))


def _speeds(folder: Path) -> None:
    with _cached_in(folder):
        os.rename(folder / "calibration" / "speeds.json", calibration._path(_machine(), "cpu", "float32"))
        calibration.known_speeds(_machine(), _facts(), "cpu")


def _probed(folder: Path) -> None:
    with _cached_in(folder):
        target = precision_probe._probe_file("cpu", _machine(), _facts())
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / "probe.json", target)
        precision_probe.known_probe("cpu", _machine(), _facts())


def _of_caches() -> list[Reader]:
    return [
        Reader("the prices", "flavors.json", "json", _cache, _prices),
        Reader("the speeds", "calibration/speeds.json", "json", _cache, _speeds),
        Reader("the probe", "probe.json", "json", _cache, _probed),
        Reader(
            "the converter", f"converter/{get_converter.MANIFEST}", "json", _cache,
            lambda folder: get_converter.is_whole(folder / "converter"),
        ),
        Reader("the Modelfile", "config.json", "json", _model, lambda folder: _checked_modelfile(folder)),
    ]  # fmt: skip


def _checked_modelfile(folder: Path) -> None:
    model_files.require_sound(folder)
    ollama_modelfile.read_json(folder / "config.json")


GROUPS: dict[str, Callable[[], list[Reader]]] = {
    "models": _of_models,
    "adapters": _of_adapters,
    "ggufs": _of_ggufs,
    "datasets": _of_datasets,
    "folders of rows": _of_folders_of_rows,
    "recipes and plans": _of_recipes,
    "records": _of_records,
    "caches": _of_caches,
    "runs": _of_runs,
    "reports": _of_reports,
}
