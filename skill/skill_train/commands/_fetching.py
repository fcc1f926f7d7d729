"""Fetches the result of a run: from the bucket of its job, or from the repository that the job pushed it to."""

from skill_train.cloud.bucket import StoredRun
from skill_train.cloud.find_run import CloudRun
from skill_train.cloud.pull import Pull
from skill_train.commands._job_snapshot import why_not_of_run
from skill_train.core.console import Console
from skill_train.run import train_record
from skill_train.run.folder import RunDir


def from_bucket(console: Console, here: RunDir, there: StoredRun) -> tuple[Pull, list[str]]:
    from skill_train.cloud import pull

    with console.progress("fetching") as progress:
        return pull.from_bucket(here, there, progress=progress)


def from_repository(cloud: CloudRun, here: RunDir) -> tuple[Pull, list[str]]:
    """Fetches all files at the commit of the record, because another run may be pushed meanwhile."""
    from skill_train.cloud import pull
    from skill_train.hub import models

    repository = cloud.record.hub_model_id
    record = models.model_file(repository, "train.json")
    trained = train_record.read(record)
    if why := why_not_of_run(cloud, here, trained):
        raise pull.nothing_kept(here.path, why)
    files = tuple(pull.in_repository(trained).values())
    folder, commit = models.model_folder(repository, record.parent.name, files=files)
    return pull.from_repository(here, repository, folder, commit)
