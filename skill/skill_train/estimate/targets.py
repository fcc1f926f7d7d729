"""The device that a file is made for: a row of the table of published devices, or what the user states. Pure."""

import difflib
import re
from functools import cache
from pathlib import Path

import msgspec

from skill_train.core.errors import UsageError
from skill_train.estimate.devices import device_speed
from skill_train.facts import MachineFacts

_TABLE = Path(__file__).with_name("targets.json")
_SHORT = {"memory_gb": "gb", "gigabytes_per_second": "gb_s"}  # in the table
# The key in `Table.usable` for each family, if a row has none of its own. All other families are `mac`.
_USABLE = {"ios": "ios", "phone": "android", "nvidia": "gpu", "nvidia_hbm": "gpu", "amd": "gpu", "cpu": "computer"}
_GIB = 1 << 30  # memory is sold in powers of two
_STATED_USABLE = (0.75, 0.9)  # as for a computer of the table
# Without a name nobody knows which kind of chip it is; `decode.FAMILIES` has the widest range for this one.
UNKNOWN_FAMILY = "unknown"
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_BYTES = 1e18  # no device and no file is as large
_LEAST_BANDWIDTH = 1e-6  # 10^9 bytes a second
_SHOWN = 80  # characters of a name in a message
_SIZE = re.compile(r"\b(\d+)\s*GI?B\b", re.IGNORECASE)
# What says nothing about the chip: makers, the Mac around it, the size of a screen, trade marks.
_MAKERS = re.compile(
    r"\b(apple|nvidia|geforce|amd|radeon|qualcomm|intel|samsung|galaxy|google|5g|gpu|bionic|with|ram)\b"
    r"|\b(imac|mac (mini|studio)|macbook (air|pro))\b|\b\d+(\.\d+)?[ -]?(inch\b|\")|\((r|tm)\)"
)
_GENERATION = re.compile(r"\b(\d+)(st|nd|rd|th)( gen(eration)?)?\b")


class TargetDevice(msgspec.Struct, frozen=True):
    name: str
    family: str  # of `decode.FAMILIES`: how much of the bandwidth such chips reach
    memory_bytes: float  # all of it. `usable_bytes` is what a program may use, from the least to the most.
    usable_bytes: tuple[float, float]
    gigabytes_per_second: float | None  # the bandwidth of the memory, 10^9 bytes; None when it is not known
    reasons: tuple[str, ...]  # where each value comes from, in sentences
    reached: float | None = None  # 10^9 bytes a second that weights were read with, where `bench` measured it


class Usable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The share of the memory that a program may use, from the least to the most."""

    share: tuple[float, float]
    source: str


class TableRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_SHORT):
    """One device of the table. `names` are others of the same memory and bandwidth. `memory_gb` are the sizes that are
    sold, in GiB, smallest first. A chip with several bandwidths has a row for each, the slowest first."""

    name: str
    family: str
    usable: str
    memory_gb: list[int]
    gigabytes_per_second: float
    source: str
    names: list[str] = []


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`targets.json`. Rows name their source, and the share of memory, by their keys here."""

    usable: dict[str, Usable]
    sources: dict[str, str]
    devices: list[TableRow]


@cache
def read_table() -> Table:
    document = msgspec.json.decode(_TABLE.read_bytes())
    families = document["devices"].items()
    rows = [{"family": name, "usable": _USABLE.get(name, "mac")} | row for name, rows in families for row in rows]
    return msgspec.convert(document | {"devices": rows}, Table)


def find_target(name: str | None, memory: str | None, bandwidth: str | None) -> TargetDevice:
    """The device that the options describe.

    Args:
        name: of a row, with or without the maker; sizes of memory may follow, as in `M2 16GB`.
        memory: such as `8GB`; takes the place of the row's.
        bandwidth: such as `68GB/s`; likewise.

    Raises:
        UsageError: no such device, or a value that is not a size.
    """
    stated = None if memory is None else parse_bytes(memory, "--memory")
    speed = None if bandwidth is None else _parse_bandwidth(bandwidth)
    if name is None:
        if stated is None:
            raise UsageError(
                "--bandwidth alone does not describe a device",
                code="bad_usage",
                expected="--memory, such as 8GB, or --for with the name of a device",
                hint="references/devices.md lists the devices",
            )
        usable_as = "usable: as of a computer, judged, not measured: the system takes 10 to 25 %; a phone takes more"
        reasons = ["memory: --memory", usable_as]
        reasons.append("bandwidth: " + ("not known; --bandwidth sets it" if speed is None else "--bandwidth"))
        usable = (_STATED_USABLE[0] * stated, _STATED_USABLE[1] * stated)
        name_of_size = f"a device of {stated / 1e9:g} GB" + ("" if speed is None else f" and {speed:g} GB/s")
        return TargetDevice(name_of_size, UNKNOWN_FAMILY, stated, usable, speed, tuple(reasons))
    rows, size = _find_rows(name)
    memory_bytes = stated or (size * _GIB if size else None)
    return _row_target(_with_memory(rows, memory_bytes), memory_bytes, speed)


def machine_target(machine: MachineFacts) -> TargetDevice:
    """This machine. The bandwidth is known of the GPUs and the Apple chips of `devices`, and of no other processor."""
    device, reading = device_speed(machine), machine.reading
    speed = None if device is None else device.gigabytes_per_second
    reached = None if reading is None else reading.gigabytes_per_second
    bandwidth = "not known of this processor; bench measures it" if speed is None else "table of devices"
    if reading is not None:
        bandwidth = f"{reading.gigabytes_per_second:.1f} GB/s were reached here ({reading.basis})"
    reasons = ("memory: of this machine", "usable: what is free now, up to all of it", f"bandwidth: {bandwidth}")
    usable = float(machine.available_bytes or machine.memory_bytes or 0), float(machine.memory_bytes or 0)
    return TargetDevice(machine.chip, family_of(machine), usable[1], usable, speed, reasons, reached)


def family_of(machine: MachineFacts) -> str:
    """The kind of chip that computes here, of `decode.FAMILIES`."""
    if machine.device == "cuda":
        return "nvidia_hbm" if re.search(r"\b(A100|H100|H200|B200|V100)\b", machine.chip) else "nvidia"
    if machine.device == "mps":
        size = re.search(r"\b(Max|Ultra)\b", machine.chip)
        return f"apple_{size[1].lower()}" if size else "apple"
    return "cpu"


def parse_bytes(text: str, option: str) -> float:
    """`8GB` as bytes: 8e9. `GiB` counts powers of two.

    Raises:
        UsageError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    value = float(match[1]) * unit if match and unit else 0.0
    if not (1 <= value <= _MOST_BYTES) or (match and match[2] == "" and value < 1e6):
        expected, hint = "a size such as 8GB or 700MB", f"{option} 8GB"
        raise UsageError(f"{option} is not a size", code="bad_usage", expected=expected, got=text, hint=hint)
    return value


def _parse_bandwidth(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([gt]b)/s)?\s*", text, re.IGNORECASE)
    value = float(match[1]) * (1000 if (match[2] or "").lower() == "tb" else 1) if match else 0.0
    if not _LEAST_BANDWIDTH <= value < 1e5:
        expected, hint = "a bandwidth such as 68GB/s", "--bandwidth 68GB/s"
        raise UsageError("--bandwidth is not a bandwidth", code="bad_usage", expected=expected, got=text, hint=hint)
    return value


def _find_rows(name: str) -> tuple[list[TableRow], int | None]:
    """The rows of a name, and the size of memory in GiB that stands in the name."""
    sizes, plain_name = _SIZE.findall(name), _plain(_SIZE.sub(" ", name))
    rows: dict[str, list[TableRow]] = {}
    names: dict[str, str] = {}
    for row in read_table().devices:
        for alias in (row.name, *row.names):
            rows.setdefault(_plain(alias), []).append(row)
            names[_plain(alias)] = alias
    same_name = rows.get(plain_name)
    if same_name is None or len(sizes) > 1:
        near = difflib.get_close_matches(plain_name, rows, n=3, cutoff=0.5)
        raise UsageError(
            f"no device {name[:_SHOWN]!r} is in the table",
            code="bad_usage",
            expected="one of " + ", ".join(names[key] for key in near) if near else "a device of the table",
            hint="state a computer: --memory 8GB --bandwidth 51GB/s; a phone: --for 'Android mid-range' --memory 8GB; "
            "references/devices.md lists those that have a name",
        )
    size = int(sizes[0]) if sizes else None
    sold = sorted({size for row in same_name for size in row.memory_gb})
    if size is not None and size not in sold:  # phones are sold by their storage
        raise UsageError(
            f"{same_name[0].name} is not sold with {size} GB of memory",
            code="bad_usage",
            expected=f"{', '.join(map(str, sold))} GB, or no size",
            got=name,
            hint="a size in the name is that of the memory, and not of the storage; --memory states another",
        )
    return same_name, size


def _with_memory(rows: list[TableRow], memory: float | None) -> TableRow:
    """The row that is sold with this memory; the first row, which is the slowest, if no row is, or `memory` is None.
    Sizes of 8e9 bytes and of 8 GiB are both called 8 GB."""
    sold = (row for row in rows if memory is not None and {memory / _GIB, memory / 1e9} & set(row.memory_gb))
    return next(sold, rows[0])


def _plain(name: str) -> str:
    """A name without maker, computer, screen, case, spaces and hyphens: `RTX-4090` and `rtx4090` are one device."""
    words = _MAKERS.sub(" ", _GENERATION.sub(r"\1", name.lower().replace("+", " plus")))
    return "".join(re.sub(r"[-()]", " ", words).split())


def _row_target(row: TableRow, memory: float | None, speed: float | None) -> TargetDevice:
    usable = read_table().usable[row.usable]
    total = memory or row.memory_gb[0] * _GIB
    sold = f"memory: {row.memory_gb[0]} GB, " + (
        "the only size that is sold" if len(row.memory_gb) == 1 else "the smallest that is sold; --memory sets another"
    )
    reasons = (
        "memory: as stated" if memory else sold,
        f"usable: {usable.share[0]:.0%} to {usable.share[1]:.0%}, as of {row.usable!r} in references/devices.md",
        "bandwidth: --bandwidth" if speed else f"bandwidth: source {row.source!r} in references/devices.md",
    )
    shares = (usable.share[0] * total, usable.share[1] * total)
    return TargetDevice(row.name, row.family, total, shares, speed or row.gigabytes_per_second, reasons)
