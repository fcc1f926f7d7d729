"""Computes the timeout and the cost of a job: long enough for the estimate, and within `--max-cost`. Pure functions."""

import math
import re
from dataclasses import dataclass
from typing import TypedDict

from skill_train.core.errors import DecisionNeeded, UsageError
from skill_train.core.units import bill, dollars
from skill_train.run.plan_record import Estimate

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_DAYS = 365  # the longest timeout; a larger number is a typing error


class Cost(TypedDict):
    """The cost of a job in dollars, for JSON answers: the estimate, and the upper bound `most`. None if unknown."""

    low: float | None
    high: float | None
    most: float | None
    usd_per_hour: float | None
    basis: str


@dataclass(frozen=True)
class Budget:
    flavor: str
    timeout_seconds: int
    usd_per_hour: float | None
    # seconds, cost_usd: `(low, high)` of the estimate; None if the plan has no estimate, and `basis` says why. The
    # costs are for whole minutes, and for no more than the timeout.
    seconds: tuple[float, float] | None
    cost_usd: tuple[float, float] | None
    most_usd: float | None  # the upper bound: the cost of a job that runs until its timeout; None if no price is known
    basis: str  # the source of the price, and why there is no estimate
    lowered: bool = False  # the plan's timeout was shortened, so that `most_usd` stays within `max_cost`

    @property
    def tight(self) -> bool:
        return self.seconds is not None and self.timeout_seconds < self.seconds[1]

    @property
    def in_words(self) -> str:
        if self.most_usd is None:
            return self.basis
        most = f"{dollars(self.most_usd)} at most, when it runs until its timeout"
        return most if self.cost_usd is None else f"{dollars(self.cost_usd[0])} to {dollars(self.cost_usd[1])}; {most}"

    @property
    def to_agree(self) -> str | None:
        """The value of `--agreed` in the hint: `most_usd`, rounded up to a cent. None if it is 0 or unknown."""
        return None if not self.most_usd else f"{math.ceil(self.most_usd * 100 - 1e-9) / 100:.2f}"

    def beyond(self, agreed: float | None) -> bool:
        """Whether the job may cost more than the `agreed` dollars; False if the user named no amount."""
        return agreed is not None and (self.most_usd is None or self.most_usd > agreed + 1e-9)

    def as_dict(self) -> Cost:
        low, high = (None, None) if self.cost_usd is None else (round(end, 6) for end in self.cost_usd)
        most = None if self.most_usd is None else round(self.most_usd, 6)
        return {"low": low, "high": high, "most": most, "usd_per_hour": self.usd_per_hour, "basis": self.basis}


@dataclass(frozen=True)
class Need:
    """The machine, the seconds and the timeout that the plan computed for a job."""

    flavor: str
    seconds: Estimate
    timeout_seconds: int | None


@dataclass(frozen=True)
class Price:
    """The price of a machine; None if it is unknown. `source` is shown to the user."""

    usd_per_hour: float | None
    source: str


def budget(
    need: Need, *, price: Price, timeout: int | None, max_cost: float | None, spent: float = 0.0, command: str = ""
) -> Budget:
    """The budget of a job.

    Args:
        timeout: the requested seconds; None takes the timeout of the plan, or less if `max_cost` requires it.
        max_cost: dollars that all jobs of the plan together may never exceed.
        spent: dollars that the earlier jobs cost.
        command: the user's command without its timeout; the hint adds a sufficient one.

    Raises:
        DecisionNeeded: no timeout is known, it is below the lower estimate, or the cost may exceed `max_cost`.
    """
    estimate, usd_per_hour = need.seconds, price.usd_per_hour
    seconds = None
    if estimate.low is not None and estimate.high is not None:
        seconds = (float(estimate.low), float(estimate.high))
    limit = _timeout(need, timeout, seconds, command)
    lowered = False
    if max_cost is not None and usd_per_hour and timeout is None:
        affordable = _affordable(max_cost - spent, usd_per_hour)
        lowered = affordable < limit and seconds is not None and affordable >= seconds[1]
        limit = affordable if lowered else limit
    basis = "no price is known" if usd_per_hour is None else f"{dollars(usd_per_hour)} an hour, {price.source}"
    cost = None
    if seconds is None:
        basis += f"; no estimate: {estimate.basis}"
    elif usd_per_hour is not None:
        low, high = (bill(max(1.0, min(each, limit)), usd_per_hour) for each in seconds)
        cost = (low, high)
    most = None if usd_per_hour is None else bill(limit, usd_per_hour)
    job_budget = Budget(need.flavor, limit, usd_per_hour, seconds, cost, most, basis, lowered)
    if max_cost is not None:
        _check_ceiling(job_budget, max_cost, spent, command)
    return job_budget


def seconds_of(text: str) -> int:
    """The seconds of a duration such as `90`, `90s`, `30m`, `1.5h` or `1d`.

    Raises:
        UsageError: the text is not a duration, is longer than a year, or is shorter than a minute.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text.strip())
    seconds = int(float(match[1]) * _UNITS[match[2] or "s"]) if match else 0
    if not 60 <= seconds <= _MOST_DAYS * 86400:
        raise UsageError(
            f"{text[:40]!r} is not a valid timeout",
            code="bad_timeout",
            expected=f"a number with s, m, h or d, at least a minute and at most {_MOST_DAYS} days",
            got=text[:40],
            hint="--timeout 30m, --timeout 2h or --timeout 5400",
        )
    return seconds


def _affordable(max_cost: float, usd_per_hour: float) -> int:
    """The seconds that `max_cost` dollars pay for, rounded down to whole minutes."""
    return math.floor(max_cost / usd_per_hour * 60 + 1e-9) * 60


def _timeout(need: Need, timeout_seconds: int | None, seconds: tuple[float, float] | None, command: str) -> int:
    limit = timeout_seconds or need.timeout_seconds
    if limit is None:
        raise DecisionNeeded(
            "no timeout can be computed, because the duration of this run is unknown",
            code="bad_timeout",
            expected="--timeout, after which the job is stopped; its checkpoints are kept",
            got=need.seconds.basis,
            hint=f"{command} --timeout 2h".lstrip(),
        )
    if seconds is not None and limit < seconds[0]:
        enough = need.timeout_seconds or math.ceil(seconds[1] / 60) * 60
        raise DecisionNeeded(
            f"a timeout of {limit} s is too short: the run takes at least {seconds[0]:.0f} s by the estimate",
            code="bad_timeout",
            expected=f"at least {seconds[0]:.0f} s; {enough} s for the upper estimate",
            got=f"{limit} s",
            hint=f"{command} --timeout {enough}".lstrip(),
        )
    return int(limit)


def _check_ceiling(job_budget: Budget, max_cost: float, spent: float, command: str) -> None:
    if job_budget.most_usd is None:
        raise DecisionNeeded(
            f"--max-cost cannot be checked, because the price of {job_budget.flavor} is unknown",
            code="over_budget",
            expected=f"at most {dollars(max_cost)}",
            got=job_budget.basis,
            hint="run the same command again when the Hub lists its price, or name another --flavor",
        )
    if job_budget.most_usd + spent > max_cost + 1e-9:
        before = f", and {dollars(spent)} of the jobs before it" if spent else ""
        at_most = f"{dollars(job_budget.most_usd)} at its timeout of {job_budget.timeout_seconds} s{before}"
        estimate = (
            ""
            if job_budget.cost_usd is None
            else f"{dollars(job_budget.cost_usd[0])} to {dollars(job_budget.cost_usd[1])} estimated, "
        )
        raise DecisionNeeded(
            f"this job{' and those before it' if spent else ''} may cost more than --max-cost {max_cost:g}",
            code="over_budget",
            expected=f"at most {dollars(max_cost)}",
            got=f"{estimate}{at_most} ({job_budget.basis})",
            hint=_cheaper(job_budget, max_cost, spent, command),
        )


def _cheaper(job_budget: Budget, max_cost: float, spent: float, command: str) -> str:
    """The hint: the longest affordable timeout in which the job could end, or else the lowest cost."""
    assert job_budget.usd_per_hour
    paid_for = _affordable(max_cost - spent, job_budget.usd_per_hour)
    needed = job_budget.seconds[0] if job_budget.seconds else 60.0
    if paid_for >= needed:
        return f"{command} --timeout {paid_for // 60}m".lstrip()
    least = bill(needed, job_budget.usd_per_hour) + spent
    return f"--max-cost of {dollars(least)} or more, a cheaper --flavor, or fewer steps; no timeout is short enough"
