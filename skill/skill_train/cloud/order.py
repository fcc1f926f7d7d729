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
        plan: the plan with its final timeout and `policy.hub_model_id`.
        usd_per_hour: None if no price is known.
        staged: local data; None for data on the Hub. `data_repo`: the dataset repository for it; None for the bucket.
        max_cost: dollars that the job may never exceed; None if the user set no limit.
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
        stage: the last known stage on the Hub; None if the Hub did not answer.
        reused: the job already existed.
    """

    record: CloudRecord
    stage: str | None
    reused: bool


class Upload(TypedDict):
    """What goes where. `left_out`: files in the folder of the data that stay here."""

    what: str
    name: str | None
    files: int | None
    bytes: int | None
    to: str
    left_out: NotRequired[list[str]]


def uploads(order: Order) -> list[Upload]:
    """The files that leave this machine and where they go. The last entry is the result of the job, whose size is not
    known yet."""
    bucket = f"the private bucket {order.namespace}/jobs-artifacts"
    program, plan_text = train_program(), json.dumps(order.plan.as_dict(), indent=1, ensure_ascii=False)
    listed: list[Upload] = [
        {"what": "program", "name": program.name, "files": 1, "bytes": program.stat().st_size, "to": bucket},
        {"what": "plan", "name": "plan.json", "files": 1, "bytes": len(plan_text.encode()) + 1, "to": bucket},
    ]
    if (staged := order.staged) is not None:
        to = f"the private dataset {order.data_repo}" if order.data_repo else bucket
        name, rows = order.plan.recipe.data, staged.files.keys() - staged.pictures
        listed.append({"what": "data", "name": name, "files": len(rows), "bytes": staged.bytes_of(rows), "to": to})
        if staged.left_out:
            listed[-1]["left_out"] = list(staged.left_out)
        if count := len(staged.pictures):
            size = staged.bytes_of(staged.pictures)
            listed.append({"what": "pictures", "name": None, "files": count, "bytes": size, "to": to})
    repository = order.plan.policy.hub_model_id
    to = "a private repository of the Hub, which the job makes"
    return [*listed, {"what": "result", "name": repository, "files": None, "bytes": None, "to": to}]
