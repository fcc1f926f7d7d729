"""One job is asked for, and never two: each order of failures and of what a listing shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skill_train.cloud import find_run, start_once
from skill_train.core import waiting
from skill_train.core.errors import AccessError, SkillTrainError, Temporary
from skill_train.hub import client as hub_client
from skill_train.hub import jobs
from skill_train.hub.errors import StillAsking
from skill_train.run import cloud_record
from skill_train.run.cloud_record import CloudJob, CloudRecord
from skill_train.run.folder import RunDir

RECORD = CloudRecord("0123456789ab", "0123456789abcdef", "me", "me/x")
ASKED = CloudJob(1, "starting", "t4-small", 600, "2026-11-21T10:00:00Z")
FAILED = Temporary("no answer", code="hub_error")
BUSY = Temporary("too many requests", code="rate_limit")
LATE = StillAsking("no answer", code="hub_unreachable")
REFUSED = AccessError("no credit", code="no_credit")


def _job(number: int) -> jobs.Job:
    moment = datetime(2026, 11, 21, 10, 0, number, tzinfo=UTC)
    labels = {"run": RECORD.run_id}
    place = ("me/jobs-artifacts", f"folder-{number}")
    return jobs.Job(f"{number:024x}", "me", "url", "RUNNING", None, "t4-small", labels, place, moment, None, None)


class Hub:
    """Posts and listings, each as a list of what happens; an error happens by being raised."""

    def __init__(self, posts: list[Any], listings: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.posts, self.listings, self.asked = posts, listings, list[str]()
        monkeypatch.setattr(start_once, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(hub_client, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(jobs, "find", self._find)

    def post(self) -> jobs.Job:
        self.asked.append("post")
        job: jobs.Job = self._next(self.posts)
        return job

    def _find(self, namespace: str, labels: dict[str, str]) -> list[jobs.Job]:
        assert (namespace, labels) == ("me", {"run": RECORD.run_id, "attempt": "1"})
        self.asked.append("find")
        found: list[jobs.Job] = self._next(self.listings)
        return found

    def _next(self, happens: list[Any]) -> Any:
        what = happens.pop(0)
        if isinstance(what, Exception):
            raise what
        return what


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any], list[Any]], Hub]:
    return lambda posts, listings: Hub(posts, listings, monkeypatch)


def _start(run: RunDir, hub: Hub) -> CloudRecord:
    return start_once.start(run, RECORD, ASKED, hub.post)


@pytest.mark.parametrize(
    ("posts", "listings", "order", "number"),
    [
        ([_job(1)], [], "post", 1),
        ([FAILED], [[_job(1)]], "post find", 1),
        ([FAILED], [[], [_job(1)]], "post find find", 1),  # a listing that is a moment behind
        ([FAILED], [[]] * 14 + [[_job(1)]], "post" + " find" * 15, 1),  # a gateway that gave up, and made it later
        ([FAILED, _job(2)], [[]] * 15, "post" + " find" * 15 + " post", 2),
        ([BUSY, _job(2)], [[], []], "post find find post", 2),  # said before anything was done
        ([FAILED], [FAILED, FAILED, [_job(1)]], "post find find find", 1),
        ([BUSY, BUSY, BUSY], [[], [], [], [], [], [_job(3)]], "post find find " * 3, 3),
        ([LATE], [[]] * 14 + [[_job(1)]], "post" + " find" * 15, 1),
    ],
)
def test_the_job_is_found_or_asked_for_again(
    hub: Any, tmp_path: Path, posts: list[Any], listings: list[Any], order: str, number: int
) -> None:
    server, run = hub(list(posts), list(listings)), RunDir(tmp_path)
    record = _start(run, server)
    assert server.asked == order.split()
    assert (server.posts, server.listings) == ([], [])
    [job] = record.jobs
    assert (job.state, job.job_id, job.created_at) == ("started", f"{number:024x}", f"2026-11-21T10:00:0{number}Z")
    assert (record.bucket, record.folder) == ("me/jobs-artifacts", f"folder-{number}")
    assert cloud_record.read(run) == record


def test_a_job_of_this_number_that_another_folder_asked_for(hub: Any, tmp_path: Path) -> None:
    """Nobody here knows when it is stopped, and its price is another."""
    theirs = msgspec.structs.replace(_job(1), flavor="a100-large")
    [job] = _start(RunDir(tmp_path), hub([FAILED], [[theirs]])).jobs
    assert (job.job_id, job.flavor, job.timeout_seconds, job.usd_per_hour) == (theirs.id, "a100-large", None, None)


@pytest.mark.parametrize(
    ("posts", "listings", "asked", "states"),
    [
        ([REFUSED], [], 1, []),  # there is no job, and nothing to look for
        ([FAILED] * 3, [[]] * 45, 3, ["starting"]),
        ([BUSY] * 3, [[]] * 6, 3, ["starting"]),
        ([FAILED], [FAILED] * 4, 1, ["starting"]),  # nobody knows, so nobody asks again
        ([LATE], [[]] * 60, 1, ["starting"]),  # two minutes, with 2 s between two looks
    ],
)
def test_the_record_says_what_is_known(
    hub: Any, tmp_path: Path, posts: list[Any], listings: list[Any], asked: int, states: list[str]
) -> None:
    server, run = hub(list(posts), list(listings)), RunDir(tmp_path)
    with pytest.raises(SkillTrainError) as caught:
        _start(run, server)
    assert caught.value is posts[0]
    assert server.asked.count("post") == asked
    assert server.listings == []
    record = cloud_record.read(run)
    assert record is not None and [job.state for job in record.jobs] == states


def test_it_is_on_disk_before_it_is_asked_for(hub: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def post() -> jobs.Job:
        record = cloud_record.read(run)
        assert record is not None and record.last is not None
        assert msgspec.structs.replace(record.last, asked_at=ASKED.asked_at) == ASKED
        return _job(1)

    start_once.start(run, RECORD, ASKED, post)


def test_a_question_is_asked_again_and_not_for_ever(hub: Any) -> None:
    server = hub([FAILED, FAILED, FAILED, _job(1)], [])
    assert hub_client.patiently(server.post) == _job(1)
    endless = hub([FAILED] * 9, [])
    with pytest.raises(Temporary):
        hub_client.patiently(endless.post)
    assert len(endless.asked) == 4


def test_of_two_jobs_that_run_under_one_number_ours_stays(hub: Any) -> None:
    """A server made the first of two requests late. Who took the other job for ours would let ours run on unseen."""
    ours, other = (msgspec.structs.replace(_job(n), labels={"run": RECORD.run_id, "attempt": "1"}) for n in (1, 2))
    record, said = RECORD.with_job(start_once.started_job(ASKED, ours)), list[str]()

    def seen(*listed: jobs.Job) -> str | None:
        with pytest.MonkeyPatch.context() as patch, waiting.of_command(said.append, []):
            patch.setattr(jobs, "find", lambda namespace, labels: list(listed))
            return find_run.with_unrecorded_jobs(record).jobs[0].job_id

    assert seen(other, ours) == seen(ours, other) == ours.id
    assert len(said) == 2 and all(f"skill-train cancel {other.id}" in line for line in said)
    assert seen(other, msgspec.structs.replace(ours, stage="CANCELED")) == other.id
