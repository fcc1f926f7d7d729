"""Facts written as JSON and read again: the same classes, at every depth."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

import msgspec
import pytest

from skill_train import facts

CLASSES = [kind for kind in vars(facts).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def _example(hint: Any) -> Any:
    """A value of this type, with every field set and every list filled."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _example(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return tuple(_example(argument) for argument in arguments if argument is not ...)
    if origin is dict:
        return {"key": _example(arguments[1])}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{field.name: _example(hints[field.name]) for field in dataclasses.fields(hint)})
    return {str: "text", int: 3, float: 1.5, bool: True}[hint]


def _is_of(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(argument, value) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(arguments[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        named = [field.name for field in dataclasses.fields(hint)]
        return isinstance(value, typing.cast(type, hint)) and all(_is_of(hints[n], getattr(value, n)) for n in named)
    return isinstance(value, origin or hint)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_fact_comes_back_as_what_it_was(kind: type) -> None:
    example = _example(kind)
    again = msgspec.convert(json.loads(json.dumps(dataclasses.asdict(example))), kind)
    assert again == example
    assert _is_of(kind, again)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_what_is_unknown_stays_unknown(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    optional = {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}
    example = dataclasses.replace(_example(kind), **dict.fromkeys(optional))
    assert msgspec.convert(json.loads(json.dumps(dataclasses.asdict(example))), kind) == example
