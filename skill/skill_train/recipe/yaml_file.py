"""Reads the YAML file of a recipe. Its size is limited, and no key may occur twice."""

import re
from pathlib import Path
from typing import Any

from skill_train.core.errors import UsageError

_MOST_BYTES = 1_000_000  # a recipe has a few hundred bytes; PyYAML takes minutes for much larger files


def bad_recipe(message: str, *, expected: str = "", got: str = "", hint: str = "") -> UsageError:
    return UsageError(message, code="bad_recipe", expected=expected, got=got, hint=hint)


def loader() -> Any:
    """PyYAML's safe loader, which also refuses a key that occurs twice, and a number in another base: YAML reads 010 as
    8, and 1:30.5 as 90.5."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            keys = [key for key, _ in node.value] if node.id == "mapping" else []
            for key in (key for key in keys if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_yaml_int(self, node: Any) -> Any:
            return as_written(node, super().construct_yaml_int(node), r"[-+]?(0|[1-9][0-9_]*)")

        def construct_yaml_float(self, node: Any) -> Any:
            return as_written(node, super().construct_yaml_float(node), "[^:]*")

    def as_written(node: Any, number: float, form: str) -> float:
        if not re.fullmatch(form, node.value):
            message = f"{node.value} is {number} in YAML: write it with the digits of 10, and no 0 before them"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return number

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    return Loader


def small_text(path: Path) -> str:
    if not path.is_dir() and path.exists() and not path.is_file():
        raise bad_recipe(
            f"{path} is a pipe or a device, and a recipe must be readable more than once",
            expected="a YAML file with at least model and data",
            got=str(path),
            hint="write the recipe to a file and use that file",
        )
    if path.stat().st_size > _MOST_BYTES:
        raise bad_recipe(
            f"{path} is too large for a recipe",
            expected=f"at most {_MOST_BYTES} bytes",
            hint="a recipe is a short YAML file: references/recipe.md",
        )
    return path.read_text(encoding="utf-8")
