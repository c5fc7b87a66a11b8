"""Records that a query should have read and that are gone: an error, or a warning with their count."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client.errors import ClientError, OutOfRange

_LOG: Final = logging.getLogger("penstock.spark")
_NAMED_MAX: Final = 10


class DataLoss(ClientError):
    """What the query goes on with would leave out records that it has not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The offsets start <= offset < end of a partition, or an end that nobody knows."""

    topic: str
    partition: int
    start: int
    end: int | None
    why: str

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.topic}[{self.partition}] from offset {self.start} on ({self.why})"
        return f"{self.topic}[{self.partition}] offsets {self.start} to {self.end - 1} ({self.why})"


def outside(error: OutOfRange, end: int) -> Loss:
    """What a task that reads up to `end` cannot have."""
    is_before = error.asked < error.log_start
    return Loss(
        topic=error.topic,
        partition=error.partition,
        start=error.asked,
        end=min(error.log_start, end) if is_before else end,
        why=f"the log goes from {error.log_start} to {error.log_end}",
    )


def report(losses: Sequence[Loss], *, fails: bool) -> None:
    """Raises DataLoss where the query is to fail, else says what is left out."""
    if not losses:
        return
    named = "; ".join(str(each) for each in losses[:_NAMED_MAX])
    more = f"; and {len(losses) - _NAMED_MAX} more" if len(losses) > _NAMED_MAX else ""
    if fails:
        raise DataLoss(
            f"records are gone that were to be read: {named}{more}. "
            "Set failOnDataLoss=false to go on without them"
        )
    count = sum(each.end - each.start for each in losses if each.end is not None)
    _LOG.warning("left out %d offsets of records that are gone: %s%s", count, named, more)
