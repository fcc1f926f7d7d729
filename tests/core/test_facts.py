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


def _fields(kind: Any) -> dict[str, Any]:
    names = (
        kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [each.name for each in dataclasses.fields(kind)]
    )
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in names}


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))


CLASSES = [kind for kind in vars(facts).values() if _has_fields(kind)]


def _example(hint: Any) -> Any:
    """A value of this type, with every field set and every list filled."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _example(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return tuple(_example(argument) for argument in arguments if argument is not ...)
    if origin is dict:
        return {"key": _example(arguments[1])}
    if _has_fields(hint):
        return hint(**{name: _example(each) for name, each in _fields(hint).items()})
    return {str: "text", int: 3, float: 1.5, bool: True}[hint]


def _is_of(hint: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of(argument, value) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(arguments[0], item) for item in value)
    if _has_fields(hint):
        return isinstance(value, hint) and all(_is_of(each, getattr(value, n)) for n, each in _fields(hint).items())
    return isinstance(value, origin or hint)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_fact_comes_back_as_what_it_was(kind: type) -> None:
    example = _example(kind)
    again = msgspec.convert(json.loads(msgspec.json.encode(example)), kind)
    assert again == example
    assert _is_of(kind, again)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_what_is_unknown_stays_unknown(kind: type) -> None:
    optional = {name for name, hint in _fields(kind).items() if type(None) in typing.get_args(hint)}
    example = kind(**{name: None if name in optional else _example(hint) for name, hint in _fields(kind).items()})
    assert msgspec.convert(json.loads(msgspec.json.encode(example)), kind) == example
