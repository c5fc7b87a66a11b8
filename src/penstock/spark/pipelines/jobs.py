"""Jobs: work on topics that has an end, and that tells how much of it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.spark.pipelines.settings import RunSettings

#: How much is done, and of how much if that is known.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a job is given to work with."""

    spark: Any
    run: RunSettings
    progress: Progress
    #: Whether somebody wants it to end; to be asked wherever it can leave off and be taken up again.
    should_stop: Callable[[], bool]
    #: Something that people should know, and the result of a job that has one in words.
    note: Callable[[str], None]


@runtime_checkable
class Job(Protocol):
    @property
    def name(self) -> str:
        """As pipelines have one: what status and stop know it by."""

    def run(self, context: JobContext) -> None:
        """Until it is done, or somebody wants it to end."""


def description(job: Job) -> str:
    """For people, where the job has one: `describe` is not asked for."""
    describe = getattr(job, "describe", None)
    return str(describe()) if callable(describe) else ""
