"""Plans a merge: which tensors of the base change and how, and which fields of its config change. It reads files and
computes no weights.

An adapter uses the names that modules have in memory. A checkpoint may use another prefix (GPT-2's old `h.0.…` for
`transformer.h.0.…`). So all names are matched by one rule. A name without a tensor is reported and never dropped.

With tied embeddings one tensor is both the input embedding and the output head. If both sides were trained alike, it
stays one tensor. If only one side was trained, the tensor becomes two, because either value is still needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError
from skill_train.facts import JsonObject
from skill_train.model.adapter import Adapter, bad_adapter, pattern_value, scale_of, whole_tensors
from skill_train.model.lora_math import Change, linear, same
from skill_train.model.weight_files import FLOAT_BYTES, Shard, StoredTensor, same_bytes
from skill_train.reference.checkpoint_names import TEXT

# These models store weights as [in, out] (transformers 5.23: the families that use pytorch_utils.Conv1D).
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "tokens_embed")
_HEADS = ("lm_head", "embed_out")
_OTHER_BASE = "use the base model that the adapter was trained on (base_model_name_or_path in adapter_config.json)"
_SAVE_EMBEDDINGS = (
    "if tokens were added in training, save the adapter again from the trained model, with "
    "save_pretrained(…, save_embedding_layers=True); else use the base model that it was trained on"
)


@dataclass(frozen=True)
class Base:
    """A base model's folder: its config and the header entries of its weights."""

    folder: Path
    config: JsonObject
    shards: list[Shard]
    task: str = TEXT  # `TEXT` or `PICTURES`: which of transformers' AutoModelFor… classes loads the model
    names: Mapping[str, str] = field(default_factory=dict)  # for a vision model: the tensor by the name in memory

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: stored for shard in self.shards for name, stored in shard.tensors.items()}


@dataclass
class MergePlan:
    changes: dict[str, Change] = field(default_factory=dict)  # the changes by the tensor's name in the checkpoint
    # tensors to add, each with the stored tensor that it is copied from (an untied head)
    copies: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)  # the fields of config.json that get another value
    # adapter tensors without a tensor in the checkpoint, by the expected name
    unmatched: dict[str, str] = field(default_factory=dict)
    ambiguous: bool = False  # whether the names match in more than one way


def plan_merge(base: Base, adapter: Adapter) -> MergePlan:
    """The plan for an adapter that can be streamed according to `adapter.why_not_streamed`.

    Raises:
        UsageError: a shape does not fit, or a tensor has no partner; the message names the tensor.
    """
    tensors = base.tensors
    if adapter.config.get("trainable_token_indices") and not any("token_rows" in p for p in adapter.modules.values()):
        lacks = f"{adapter.folder} lacks the rows of trainable_token_indices"
        raise bad_adapter(lacks, "a tensor trainable_tokens_delta", "no such tensor")
    tie = _find_tie(base, tensors)
    parameters = wanted_parameters(adapter)
    free = {name for name in parameters if tie and not tie.stored and _last_module(name) in _HEADS}
    matches = match_names(list(parameters), set(tensors), free)
    if len(matches) != 1:
        unknown = {name: tensor for name, tensor in parameters.items() if name not in tensors and name not in free}
        missing = {} if matches else unknown
        return MergePlan(unmatched=missing, ambiguous=len(matches) > 1)
    names = matches[0]
    if free:
        tie = replace(tie, head=next(iter(free))) if tie else None
    plan = MergePlan()
    for module in adapter.modules:
        _plan_module(plan, base, adapter, module, names, tie)
    for parameter, tensor in adapter.replaced.items():
        _merge_into(plan, names[parameter], replace=adapter.tensor(tensor))
    if tie:
        _keep_or_untie(plan, tie, _own_value(adapter, tie, names))
    _check_shapes(plan, base, adapter, names, tie)
    return plan


def match_names(parameters: list[str], stored: set[str], free: set[str]) -> list[dict[str, str]]:
    """Every consistent way to match parameters with the checkpoint: unchanged, or with one prefix replaced."""
    matches: list[dict[str, str]] = []
    for strip, add in [("", ""), *_prefixes(parameters, stored, free)]:
        names = {name: _renamed(name, strip, add, stored) for name in parameters}
        is_whole = all(new in stored or new in free for new in names.values())
        if not is_whole or len(set(names.values())) != len(parameters):
            continue
        if not strip and not add:
            return [names]
        if names not in matches:
            matches.append(names)
    return matches


@dataclass(frozen=True)
class _Tie:
    """One tensor with two roles. `stored` is True if the checkpoint holds it under both names."""

    embedding: str
    head: str
    stored: bool


def _find_tie(base: Base, tensors: dict[str, StoredTensor]) -> _Tie | None:
    """How the base ties its embeddings; None if it does not, or if their names are unknown."""
    inputs = [name for name in tensors if _last_module(name) in _EMBEDDINGS]
    heads = [name for name in tensors if _last_module(name) in _HEADS]
    if len(inputs) != 1 or len(heads) > 1:
        return None
    if not heads:
        return _Tie(inputs[0], "lm_head.weight", False)
    # transformers 5 ties two stored tensors only if they are equal, even if the config ties them.
    if base.config.get("tie_word_embeddings") is False or not same_bytes(tensors[inputs[0]], tensors[heads[0]]):
        return None
    return _Tie(inputs[0], heads[0], True)


def wanted_parameters(adapter: Adapter) -> dict[str, str]:
    """The base parameters that the adapter needs, each with one of the adapter's tensors, which messages name."""
    parameters = {f"{module}.weight": next(iter(parts.values())) for module, parts in adapter.modules.items()}
    parameters |= {f"{module}.bias": parts["b_bias"] for module, parts in adapter.modules.items() if "b_bias" in parts}
    return parameters | adapter.replaced


def _prefixes(parameters: list[str], stored: set[str], free: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs of prefixes to remove and to add, derived from the first name that is not stored."""
    missing = next((name for name in parameters if name not in stored and name not in free), None)
    if missing is None:
        return
    parts = missing.split(".")
    for cut in range(min(4, len(parts) - 1)):  # the longest known prefix is "model.language_model."; one part to spare
        tail = ".".join(parts[cut:])
        if any(part.isdigit() for part in parts[:cut]):
            return  # the number of a layer is never part of a prefix
        for name in sorted(stored):
            add = name.removesuffix(tail)
            if f".{name}".endswith(f".{tail}") and not any(part.isdigit() for part in add.split(".")):
                yield missing.removesuffix(tail), add


def _renamed(name: str, strip: str, add: str, stored: set[str]) -> str:
    new = add + name.removeprefix(strip) if name.startswith(strip) else name
    return new if new in stored else name


def _plan_module(
    plan: MergePlan, base: Base, adapter: Adapter, module: str, names: dict[str, str], tie: _Tie | None
) -> None:
    """Adds the change of one adapted module."""
    config, parts = adapter.config, adapter.modules[module]
    target = names[f"{module}.weight"]
    if "token_rows" in parts:
        # A tied head follows the embedding, and the config names only the embedding.
        of = next((name for name in adapter.modules if tie and names[f"{name}.weight"] == tie.embedding), module)
        ids = _token_ids(adapter, (module, of) if tie and target == tie.head else (module,), parts)
        _merge_into(plan, target, token_ids=ids, token_rows=adapter.tensor(parts["token_rows"]))
        return
    pair = ("embedding_a", "embedding_b") if "embedding_a" in parts or "embedding_b" in parts else ("a", "b")
    expected = {*pair} | ({"magnitude"} if config.get("use_dora") else set())
    expected |= {"b_bias"} if "a" in pair and config.get("lora_bias") else set()
    if set(parts) != expected:
        message = f"the adapter's tensors for {module} are incomplete"
        raise bad_adapter(message, ", ".join(sorted(expected)), ", ".join(sorted(parts)))
    a, b = (adapter.tensor(parts[kind]) for kind in pair)
    rank = pattern_value(config["rank_pattern"], module, config["r"])
    if (len(a), b.shape[1]) != (rank, rank):
        stated = f"rank {rank}, as {adapter.folder / 'adapter_config.json'} says"
        raise bad_adapter(f"the adapter's tensor {parts[pair[0]]!r} has another rank", stated, str(tuple(a.shape)))
    scale = scale_of(config, module)
    magnitude = adapter.tensor(parts["magnitude"]) if "magnitude" in parts else None
    transposed = "embedding_a" in pair or is_conv1d(base, target)
    plan.changes[target] = linear(a, b, scale, transposed=transposed, magnitude=magnitude)
    if "b_bias" in parts:
        _merge_into(plan, names[f"{module}.bias"], add=adapter.tensor(parts["b_bias"]).float() * scale)


def _merge_into(plan: MergePlan, name: str, **fields: Any) -> None:
    plan.changes[name] = replace(plan.changes.get(name, Change()), **fields)


def _token_ids(adapter: Adapter, modules: tuple[str, ...], parts: dict[str, str]) -> Any:
    """The trained rows of an embedding: one list for the model's input embedding, or one list for each module name.

    Args:
        modules: the names to look up; the first one in the config counts.
    """
    import torch

    ids = adapter.config.get("trainable_token_indices")
    if isinstance(ids, dict):
        named = (value for module in modules for name, value in ids.items() if f".{module}".endswith(f".{name}"))
        ids = next(named, None)
    rows = adapter.tensors[parts["token_rows"]].shape[0]
    if not isinstance(ids, list) or len(ids) != rows or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise _misfit(parts["token_rows"], "one row for each of trainable_token_indices", (rows,))
    return torch.tensor(ids)


def _keep_or_untie(plan: MergePlan, tie: _Tie, own: Any) -> None:
    """Decides whether one tensor still serves both sides. `own` is the result of `_own_value`."""
    at_input, at_head = plan.changes.get(tie.embedding), plan.changes.get(tie.head)
    if at_input is None and at_head is None:
        return
    at_input, at_head = at_input or Change(), at_head or Change()
    if own is not None:
        # PEFT loads a saved base embedding into the one parameter that both sides share.
        at_input, at_head = (
            replace(change, replace=own) if change.replace is None else change for change in (at_input, at_head)
        )
    if at_head.token_ids is None and at_input.token_ids is not None:
        # Trained token rows follow the tie (peft 0.21, TrainableTokensWrapper with a tied adapter).
        at_head = replace(at_head, token_ids=at_input.token_ids, token_rows=at_input.token_rows)
    plan.changes[tie.embedding], plan.changes[tie.head] = at_input, at_head
    if same(at_input, at_head):
        if not tie.stored:
            del plan.changes[tie.head]
        return
    plan.config["tie_word_embeddings"] = False
    if not tie.stored:
        plan.copies[tie.head] = tie.embedding


def _own_value(adapter: Adapter, tie: _Tie, names: dict[str, str]) -> Any:
    """The adapter's value for the one parameter below both sides of a tie; None if it has none.

    Raises:
        UsageError: the adapter has two different values.
    """
    sides = [name for name in adapter.replaced if names[name] in (tie.embedding, tie.head)]
    values = [adapter.replaced[name] for name in sides if name in adapter.shared]
    values += [adapter.originals[name] for name in sides if name in adapter.originals]
    _require_equal(adapter, values)
    if adapter.config.get("ensure_weight_tying") and len({name in adapter.originals for name in sides}) == 1:
        _require_equal(adapter, [adapter.replaced[name] for name in sides])  # both are wrapped, and were trained as one
    return adapter.tensor(values[0]) if values else None


def _require_equal(adapter: Adapter, tensors: list[str]) -> None:
    for other in tensors[1:]:
        if not same_bytes(adapter.tensors[tensors[0]], adapter.tensors[other]):
            raise UsageError(
                f"the adapter's tensors {tensors[0]!r} and {other!r} differ, but the base model ties them",
                code="wrong_base",
                expected="one matrix for the embedding and the output head, as in the base model",
                got="two, so the model was untied before it was trained",
                hint="merge into the untied model that it was trained on: load the base with "
                "tie_word_embeddings=False, copy the embedding into lm_head, save_pretrained(UNTIED), and give it as "
                "--base UNTIED",
            )


def _check_shapes(plan: MergePlan, base: Base, adapter: Adapter, names: dict[str, str], tie: _Tie | None) -> None:
    """Checks that every change fits its tensor. Embedding and head may both have the same new number of rows."""
    own = {names[name]: tensor for name, tensor in wanted_parameters(adapter).items() if name in names}
    tensors = base.tensors
    rows: dict[str, int] = {}
    vocabulary = {name for name in tensors if _last_module(name) in (*_EMBEDDINGS, *_HEADS)} | set(plan.copies)
    for name, change in plan.changes.items():
        stored = tensors[plan.copies.get(name, name)]
        label = own.get(name) or own.get(tie.head if tie else "") or name
        if stored.dtype not in FLOAT_BYTES:
            raise _misfit(label, f"a base tensor of a float type for {name}", stored.dtype)
        shape = stored.shape
        if change.replace is not None:
            new = tuple(change.replace.shape)
            if new[1:] != shape[1:] or (new != shape and name not in vocabulary):
                raise _misfit(label, shape, new)
            shape = new
        _check_change(change, shape, label, _SAVE_EMBEDDINGS if name in vocabulary else _OTHER_BASE)
        if name in vocabulary:
            rows[name] = shape[0]
    before = {name: tensors[plan.copies.get(name, name)].shape[0] for name in vocabulary}
    if any(before[name] != count for name, count in rows.items()):
        plan.config["vocab_size"] = _new_vocabulary({*(before | rows).values()})


def _check_change(change: Change, shape: tuple[int, ...], label: str, hint: str) -> None:
    if change.left is not None:
        covers = (change.left.shape[0], change.right.shape[1])
        if covers != shape:
            raise _misfit(label, f"an update of shape {shape}", covers, hint)
    if change.magnitude is not None:
        features = shape[1] if change.by_column else shape[0]
        if tuple(change.magnitude.shape) != (features,):
            raise _misfit(label, f"a magnitude for {features} features", tuple(change.magnitude.shape))
    if change.add is not None and tuple(change.add.shape) != shape:
        raise _misfit(label, f"a bias of shape {shape}", tuple(change.add.shape))
    if change.token_ids is not None:
        fits = tuple(change.token_rows.shape[1:]) == shape[1:] and int(change.token_ids.max()) < shape[0]
        if not fits:
            got = f"row {int(change.token_ids.max())} of a width of {change.token_rows.shape[1]}"
            raise _misfit(label, f"rows of a tensor of shape {shape}", got, hint)


def _new_vocabulary(rows: set[int]) -> int:
    """The number of rows of embedding and head after a resize."""
    if len(rows) > 1:
        raise bad_adapter(
            "the adapter resizes only one of the embedding and the output head",
            expected="the same number of rows in both",
            got=f"{sorted(rows)} rows",
            hint="save the adapter again from the trained model, with save_pretrained(…, save_embedding_layers=True); "
            "or train with both saved whole: modules_to_save of the embedding and the output head",
        )
    return rows.pop()


def vocabulary_rows(base: Base, adapter: Adapter) -> tuple[int | None, bool, bool]:
    """The rows of the merged model's embedding, None if its name is unknown; whether it was trained whole; and whether
    the base has more.

    Raises:
        UsageError: the adapter has new rows for only one of embedding and head, and the base does not tie them.
    """
    sides = [_rows(base.tensors, kind) for kind in (_EMBEDDINGS, _HEADS)]
    saved = [_rows(whole_tensors(adapter), kind) for kind in (_EMBEDDINGS, _HEADS)]
    after = [new or old for new, old in zip(saved, sides, strict=True)]
    if any(saved) and all(after) and not _find_tie(base, base.tensors):
        _new_vocabulary(set().union(*after))
    counts = saved[0] or saved[1] or sides[0]
    whole = any(_last_module(name) in _EMBEDDINGS for name in adapter.replaced.keys() - adapter.shared)
    rows = next(iter(counts)) if len(counts) == 1 else None
    return rows, whole, rows is not None and rows < max(sides[0], default=0)


def _rows(tensors: dict[str, StoredTensor], kind: tuple[str, ...]) -> set[int]:
    return {stored.shape[0] for name, stored in tensors.items() if _last_module(name) in kind and stored.shape}


def is_conv1d(base: Base, name: str) -> bool:
    """Whether the file stores the weight as [in, out]."""
    return base.config.get("model_type") in _CONV1D_MODELS and _last_module(name) not in _HEADS


def _misfit(tensor: str, expected: Any, got: Any, hint: str = _OTHER_BASE) -> UsageError:
    return UsageError(
        f"the adapter's tensor {tensor!r} does not fit the base model",
        code="wrong_base" if hint == _OTHER_BASE else "bad_adapter",
        expected=str(expected),
        got=str(tuple(got) if not isinstance(got, str) else got),
        hint=hint,
    )


def _last_module(name: str) -> str:
    """`embed_tokens` of `model.embed_tokens.weight`; empty for anything but a weight."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] == "weight" else ""
