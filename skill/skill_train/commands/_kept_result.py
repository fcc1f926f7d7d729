"""The place of a job's result: its bucket, or the repository that it was pushed to."""

from __future__ import annotations

from skill_train.cloud.find_run import CloudRun
from skill_train.cloud.poll import patiently
from skill_train.core import waiting
from skill_train.core.errors import UsageError
from skill_train.hub import repositories
from skill_train.program.cloud.push import PROOF
from skill_train.run import plan_record, train_record
from skill_train.run.folder import RunDir


def why_not_pushed(cloud: CloudRun, run: RunDir) -> str:
    """Why the model repository cannot provide the result of this run; empty if it can.

    Raises:
        AccessError: the token may not read it.
    """
    from skill_train.hub import models

    repository = cloud.record.hub_model_id
    if not repository or cloud.now.live:
        return "the job has not kept anything yet" if repository else "its bucket has no result"
    waiting.tell(f"the bucket has no result; asking for {repository}")
    try:
        pushed = patiently(lambda: repositories.find("model", repository))
        files = pushed.files if pushed else ()
        if "train.json" not in files or PROOF in files:
            return f"neither its bucket nor {repository} has its result"
        trained = train_record.read(models.model_file(repository, "train.json"))
    except UsageError as error:
        return f"its bucket has no result, and {error.message}"
    same = trained.recipe_hash == plan_record.read(run.plan).recipe_hash
    return "" if same else f"its bucket has no result, and {repository} has that of another recipe"
