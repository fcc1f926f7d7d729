"""The machines that Hugging Face Jobs offers: from its API, from a recent answer, or from a dated table."""

import contextlib
import hashlib
import json
import time
from pathlib import Path

import msgspec

from skill_train.core.errors import SkillTrainError, UsageError
from skill_train.facts import Flavor, JsonObject
from skill_train.hub.address import endpoint
from skill_train.machine.read import cache_dir
from skill_train.run import records

_TABLE = Path(__file__).with_name("flavors.json")
_DAY = 24 * 3600.0
_GB = 1_000_000_000


class _CachedFlavors(msgspec.Struct, frozen=True):
    endpoint: str
    asked: records.Number
    flavors: tuple[Flavor, ...]


def shipped() -> tuple[Flavor, ...]:
    """The table that is shipped with the package; `read_at` of each flavor gives its date."""
    table: JsonObject = json.loads(_TABLE.read_bytes())
    return tuple(Flavor(**_in_bytes(row), read_at=table["read_at"], source=table["source"]) for row in table["flavors"])


def known_flavor(name: str | None) -> Flavor | None:
    """A flavor from the cache or the shipped table, without a request; None if neither has it."""
    return next((flavor for flavor in current(live=False)[0] if flavor.name == name), None)


def usd_per_hour(name: str | None) -> float | None:
    """The last known price of a flavor; None if the flavor is unknown."""
    flavor = known_flavor(name)
    return None if flavor is None else flavor.usd_per_hour


def current(live: bool, max_age: float = _DAY) -> tuple[tuple[Flavor, ...], str]:
    """The flavors, and a text that names their source and its date.

    An answer of the Jobs API is cached for a day. Each Hub has its own cache, because another Hub has other prices. If
    the API cannot be asked, the cached answer or the shipped table counts, whichever is newer.

    Args:
        live: whether the Jobs API may be asked, for at most 3 seconds.
        max_age: seconds for which a cached answer is used without asking again.
    """
    hub_address = endpoint()
    api = f"the Jobs API of {hub_address}"
    cached, age = _cached(hub_address)
    if cached and age < max_age:
        return cached, f"{api}, asked {_ago(age)}"
    why = f"{api} was not asked"
    if live:
        from skill_train.hub import models

        try:
            fresh = models.live_flavors()
        except SkillTrainError as error:
            why = error.message
        else:
            _keep(fresh, hub_address)
            return fresh, f"{api}, asked now"
    table = shipped()
    if cached and cached[0].read_at > table[0].read_at:
        return cached, f"{api}, asked {_ago(age)}: {why}"
    return table, f"the table of huggingface.co shipped with skill-train, of {table[0].read_at}: {why}"


def _in_bytes(row: JsonObject) -> JsonObject:
    """Converts a row of the shipped table, whose sizes are in GB, to bytes."""
    return {
        name.replace("_gb", "_bytes"): value * _GB if name.endswith("_gb") and value is not None else value
        for name, value in row.items()
    }


def _cached(hub_address: str) -> tuple[tuple[Flavor, ...], float]:
    """The last answer of this Hub and its age in seconds; nothing if there is none or it cannot be read."""
    try:
        answer = records.read(_cache_file(hub_address), _CachedFlavors)
    except (OSError, UsageError):
        return (), 0.0
    age = time.time() - answer.asked
    whole = answer.endpoint == hub_address and all(flavor.usd_per_hour >= 0 for flavor in answer.flavors)
    return (answer.flavors, age) if whole and age >= 0 else ((), 0.0)  # below 0 the clock was set back


def _keep(flavors: tuple[Flavor, ...], hub_address: str) -> None:
    with contextlib.suppress(OSError):  # without the cache the next command only asks again
        records.write(_cache_file(hub_address), _CachedFlavors(hub_address, time.time(), flavors))


def _cache_file(hub_address: str) -> Path:
    """The cache file for this Hub. Earlier versions wrote `flavors.json`, which does not name the Hub."""
    return cache_dir() / f"flavors-{hashlib.sha256(hub_address.encode()).hexdigest()[:12]}.json"


def _ago(seconds: float) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time.time() - seconds))
    if seconds < _DAY:
        return f"{seconds / 3600:.1f} hours ago ({moment})"
    return f"{seconds / _DAY:.1f} days ago ({moment})"
