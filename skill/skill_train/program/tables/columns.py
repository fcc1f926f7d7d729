"""Columns of Arrow: their values as they were written."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from skill_train.program.examples import Row, with_distinct_keys


def as_written(rows: Iterable[Row], schema: Any, *, json_read: bool = False) -> Iterator[Row]:
    """Rows of Arrow without the nulls that Arrow added. A column has one type, so each call of a tool would have the
    arguments of all the others. JSON inside a column is parsed, unless `json_read` says that it was; its nulls stay.
    Numbers of classes become their names, and bytes of a text become the text."""
    readers = {field.name: read for field in schema if (read := arrow_reader(field.type, json_read=json_read))}
    readers |= class_readers(schema)
    for row in rows:
        yield {**row, **{name: read(row[name]) for name, read in readers.items()}} if readers else row


def class_readers(schema: Any) -> dict[str, Callable[[Any], Any]]:
    """A function for each column of `datasets`' ClassLabel, which turns a number into the name of its class. -1, and
    what is no number of a class, stands for none."""
    import pyarrow

    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        named = {name: kind["names"] for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
        texts: dict[str, dict[Any, str]] = {name: dict(enumerate(map(str, names))) for name, names in named.items()}
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return {}
    whole = [field.name for field in schema if pyarrow.types.is_integer(field.type)]
    return {name: texts[name].get for name in texts.keys() & whole}


def text_in_bytes(value: Any) -> Any:
    """The text in these bytes. Bytes that are no UTF-8 or have a 0 stay, as those of pictures, sounds and films."""
    try:
        return value.decode() if isinstance(value, bytes) and b"\0" not in value else value
    except UnicodeDecodeError:
        return value


def arrow_reader(kind: Any, *, json_read: bool) -> Callable[[Any], Any] | None:
    """A function that turns a value of this Arrow type into the value that was written; None if both are the same."""
    import pyarrow

    types = pyarrow.types
    if getattr(kind, "extension_name", None) == "arrow.json":
        return None if json_read else json_in_column
    if types.is_binary(kind) or types.is_large_binary(kind):
        return text_in_bytes
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = arrow_reader(kind.value_type, json_read=json_read)
        return item and (lambda values: [item(value) for value in values] if isinstance(values, list) else values)
    if types.is_map(kind) and types.is_string(kind.key_type):  # as Spark writes dictionaries of Python
        each = arrow_reader(kind.item_type, json_read=json_read) or (lambda part: part)
        return lambda pairs: (
            pairs if pairs is None else with_distinct_keys([(name, each(part)) for name, part in pairs])
        )
    if not types.is_struct(kind):
        return None
    fields = {each.name: arrow_reader(each.type, json_read=json_read) for each in kind}
    if fields.get("bytes") is text_in_bytes:  # of a picture
        del fields["bytes"]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):  # null, or what `datasets` makes of an image
            return value
        return {
            name: field(part) if (field := fields.get(name)) else part
            for name, part in value.items()
            if part is not None
        }

    return read


def json_in_column(text: Any) -> Any:
    """The value of a column of JSON; null stays."""
    return json.loads(text, object_pairs_hook=with_distinct_keys) if isinstance(text, str) else text
