"""Loads a Hub dataset with the `datasets` library, as the training program does, but within the usual time limits.
Every failure becomes one of our errors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from skill_train.core.errors import SkillTrainError, Temporary, UsageError
from skill_train.hub.client import ask
from skill_train.hub.errors import HubResource, gated, no_revision, translated, unknown
from skill_train.hub.repositories import check_access
from skill_train.hub.session import offline

SECONDS = 4.0  # limit of the single request of `promptly`


@contextlib.contextmanager
def within_limits(name: str) -> Iterator[None]:
    """Applies the time limits of a request while the library loads a dataset. The library requests files one by one and
    has no limits of its own."""
    try:
        import datasets
    except ImportError:  # the code that needs the library reports that it is missing
        yield
        return
    resource, asks = HubResource("dataset", name), (datasets.load_dataset, datasets.load_dataset_builder)

    def limited(load: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *which, **how: ask(
            resource, lambda: _explained(resource, lambda: load(*which, **how)), seconds=None
        )

    datasets.load_dataset, datasets.load_dataset_builder = map(limited, asks)
    try:
        yield
    finally:
        datasets.load_dataset, datasets.load_dataset_builder = asks


@contextlib.contextmanager
def promptly(name: str) -> Iterator[None]:
    """`within_limits` for a dataset that the command does not need. The client tries an unreachable Hub six times, for
    at least 23 s. This function asks the Hub once, and reads only the cache if there is no answer.

    Raises:
        Temporary: the Hub does not answer, and the cache does not have the dataset.
    """
    try:
        check_access("dataset", name, seconds=SECONDS)
    except Temporary as trouble:
        with _cache_alone(), within_limits(name):
            try:
                yield
            except Temporary:
                raise trouble from None
        return
    with within_limits(name):
        yield


@contextlib.contextmanager
def _cache_alone() -> Iterator[None]:
    try:
        import datasets
    except ImportError:
        yield
        return
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        with offline():
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _explained(resource: HubResource, question: Callable[[], Any]) -> Any:
    """Returns the answer of `question`. Replaces an error of the library by the error that caused it, or by our own."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        return question()
    except SkillTrainError:
        raise
    except Exception as error:
        if (cause := _cause(error, resource)) is not None:
            raise cause from None
        if isinstance(error, DatasetNotFoundError):
            raise _not_found(resource, str(error)) from None
        broken = isinstance(error, DatasetsError) or type(error).__module__.startswith("pyarrow")
        if broken or str(error).startswith("Dataset scripts are no longer"):
            raise UsageError(
                f"{resource} cannot be read",
                code="unreadable_dataset",
                expected="files of rows, such as JSON Lines or Parquet",
                got=_line(error),
                hint="try another data_revision, or download the files, repair them and use the local copy",
            ) from None
        if isinstance(error, ValueError) and str(error).startswith(("Unknown split", "BuilderConfig", "Config name")):
            raise UsageError(
                f"{resource} has no such split or configuration",
                code="bad_split",
                got=_line(error),
                hint=f"see {resource.page}, then set --split, or data_config in a recipe",
            ) from None
        raise


def _cause(error: BaseException, resource: HubResource) -> BaseException | None:
    """The first Hub error among the causes of an error, as one of our errors; None if there is none. A file that is
    missing from the cache does not count."""
    cause = error.__cause__ or error.__context__
    while isinstance(cause, Exception):
        ours = translated(cause, resource)
        if isinstance(ours, SkillTrainError) and not isinstance(cause, FileNotFoundError):
            return ours
        cause = cause.__cause__ or cause.__context__
    return None


def _not_found(resource: HubResource, words: str) -> SkillTrainError:
    """The error for a gated or unknown dataset, or an unknown revision. datasets 5.2 hides the Hub's answer, so its
    message decides."""
    if "gated dataset" in words:
        return gated(resource)
    return no_revision(resource) if words.startswith("Revision") else unknown(resource)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
