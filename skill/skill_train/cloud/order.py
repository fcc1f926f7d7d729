"""What is sent to the cloud, and the job that it leads to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from skill_train.cloud.stage_data import Staged
from skill_train.core.resources import train_program
from skill_train.run import cloud_record
from skill_train.run.cloud_record import CloudRecord
from skill_train.run.plan_record import Plan


@dataclass(frozen=True)
class Order:
    """What is to be submitted.

    Attributes:
        plan: with `policy.hub_model_id` and the timeout that it is sent with.
        usd_per_hour: None when no price is known.
        staged: local data; None for data on the Hub. `data_repo`: the dataset repository that it goes to, if not into
            the bucket.
        max_cost: dollars that the job may never exceed; None where nobody said.
    """

    plan: Plan
    namespace: str
    usd_per_hour: float | None
    staged: Staged | None
    data_repo: str | None
    max_cost: float | None = None

    @property
    def plan_hash(self) -> str:
        return cloud_record.plan_hash(self.plan)


@dataclass(frozen=True)
class Sent:
    """A job of a run.

    Attributes:
        stage: as the Hub said it last; None when it did not answer.
        reused: it was there already.
    """

    record: CloudRecord
    stage: str | None
    reused: bool


class Upload(TypedDict):
    """What goes where. `left_out` of the data: what lies in its folder and stays here."""

    what: str
    name: str | None
    files: int | None
    bytes: int | None
    to: str
    left_out: NotRequired[list[str]]


def uploads(order: Order) -> list[Upload]:
    """The files that leave this machine and where they go; last the results of the job, whose size is not known yet."""
    bucket = f"the private bucket {order.namespace}/jobs-artifacts"
    program, made = train_program(), json.dumps(order.plan.as_dict(), indent=1, ensure_ascii=False)
    listed: list[Upload] = [
        {"what": "program", "name": program.name, "files": 1, "bytes": program.stat().st_size, "to": bucket},
        {"what": "plan", "name": "plan.json", "files": 1, "bytes": len(made.encode()) + 1, "to": bucket},
    ]
    if order.staged is not None:
        name, size, files = order.plan.recipe.data, order.staged.bytes, len(order.staged.files)
        to = f"the private dataset {order.data_repo}" if order.data_repo else bucket
        listed.append({"what": "data", "name": name, "files": files, "bytes": size, "to": to})
        if order.staged.left_out:
            listed[-1]["left_out"] = list(order.staged.left_out)
    repository = order.plan.policy.hub_model_id
    to = "a private repository of the Hub, which the job makes"
    return [*listed, {"what": "result", "name": repository, "files": None, "bytes": None, "to": to}]
