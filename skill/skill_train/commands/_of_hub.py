"""The fields of a recipe that apply only to its model or dataset on the Hub, such as the revision."""

from collections.abc import Mapping
from pathlib import Path

from skill_train.core.errors import UsageError, quoted
from skill_train.recipe.fields import Recipe

OF_HUB = {"model": ("revision",), "data": ("data_revision", "data_config", "data_file")}  # by the field they belong to


def with_flags(values: Mapping[str, object], flags: Mapping[str, object]) -> dict[str, object]:
    """The values of a recipe, replaced by the options of the command line. If an option names another model or dataset,
    the fields of `OF_HUB` for the recipe's own one are left out."""
    others = [key for key in OF_HUB if key in flags and flags[key] != values.get(key)]
    gone = {name for key in others for name in OF_HUB[key]}
    return {key: value for key, value in values.items() if key not in gone} | dict(flags)


def require_on_hub(recipe: Recipe) -> None:
    """Refuses a field of `OF_HUB` for a local model or dataset, because nothing would read it.

    Raises:
        UsageError: the recipe has such a field, and its model or data is not on the Hub.
    """
    for key, names in OF_HUB.items():
        place, named = getattr(recipe, key), [name for name in names if getattr(recipe, name) is not None]
        if named and Path(place).exists():
            raise UsageError(
                f"{named[0]} is for a repository of the Hub, and {place} is here",
                code="bad_recipe",
                expected=f"{key}: OWNER/NAME of the Hub, or no {named[0]}",
                got=f"{named[0]}: {getattr(recipe, named[0])[:200]}",
                hint=f"remove {named[0]} from the recipe, or start from a folder without {quoted(place)} for the Hub's",
            )
