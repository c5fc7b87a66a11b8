"""At most once, in tasks: a task may do its work when it is the first to say so in the topic of claims.

Spark starts tasks again when they fail, beside others that are slow, and with whole stages when machines are lost; it
does not tell a task all of that. So each attempt writes down what it is about to do and reads what others have written
before: the order of the log decides, for all of them in the same way. Whoever is not the first gets nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, OutOfRange
from penstock.client.retrying import Deadline
from penstock.client.topics import NewTopic
from penstock.spark import bookkeeping
from penstock.spark.bookkeeping import CLAIMS, SKIPPED
from penstock.spark.offsets import OffsetRange

_LOG: Final = logging.getLogger("penstock.spark")
_WEEK_MS: Final = 7 * 24 * 3_600_000
#: Nobody looks at a claim again when its batch is over, so that what is old can go.
_CLAIMS_TOPIC: Final = NewTopic(
    name=CLAIMS,
    partitions=1,
    settings={
        "cleanup.policy": "delete",
        "retention.ms": str(_WEEK_MS),
        "retention.bytes": str(1 << 30),
        "segment.bytes": str(64 << 20),
    },
)
_SKIPPED_TOPIC: Final = NewTopic(
    name=SKIPPED, partitions=1, settings={"cleanup.policy": "delete", "retention.ms": str(5 * _WEEK_MS)}
)
_SPECULATION: Final = "spark.speculation"


class ClaimError(ClientError):
    """What is to be read or written at most once cannot be."""


class Ticket(NamedTuple):
    """For one task: whoever is the first to redeem it may do the work."""

    group: str
    batch: str
    #: From here on the topic of claims says who was first.
    base: int
    #: Of the task among those of its batch.
    number: int


class TaskAttempt(NamedTuple):
    stage: int
    partition: int
    attempt: int


def make_topics(cluster: Cluster) -> None:
    for topic in (_CLAIMS_TOPIC, _SKIPPED_TOPIC):
        bookkeeping.make_ready(cluster, topic)


def fresh_ticket(cluster: Cluster) -> Ticket:
    """For the tasks of one job that writes; each of them puts its own number in. Raises Unavailable, Refused."""
    make_topics(cluster)
    return Ticket("", uuid.uuid4().hex, bookkeeping.end_of(cluster, CLAIMS), -1)


def this_attempt() -> TaskAttempt:
    """Raises ClaimError outside of tasks, and where Spark runs tasks twice on purpose."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClaimError("Spark does not tell which task this is, so it cannot be done at most once")
    refuse_speculation(context.getLocalProperty(_SPECULATION))
    return TaskAttempt(context.stageId(), context.partitionId(), context.attemptNumber())


def refuse_speculation(setting: str | None) -> None:
    """A twin gets nothing, and Spark would take that for the result of the task. Raises ClaimError."""
    if str(setting).strip().lower() == "true":
        raise ClaimError(
            "contract=at-most-once does not go together with spark.speculation=true: of two attempts at a task one "
            "gets nothing, and Spark would go on with that one; set spark.speculation=false"
        )


def redeem(cluster: Cluster, ticket: Ticket, attempt: TaskAttempt) -> bool:
    """Whether this attempt is the first. Raises ClaimError where another one did this on purpose; Unavailable, Refused.

    When it raises, the ticket may be redeemed all the same: then nobody gets anything.
    """
    token = uuid.uuid4().hex
    told = {"group": ticket.group, "batch": ticket.batch, "task": ticket.number, "token": token}
    bookkeeping.append(cluster, CLAIMS, told | attempt._asdict(), key=ticket.batch)
    first = _first(cluster, ticket, Deadline(cluster.settings.retry_deadline_ms))
    if first["token"] == token:
        return True
    if (first["stage"], first["partition"]) != (attempt.stage, attempt.partition):
        raise read_twice(ticket)
    return False


def _first(cluster: Cluster, ticket: Ticket, deadline: Deadline) -> Mapping[str, Any]:
    try:
        for _ in cluster.attempts(deadline):
            for each in bookkeeping.documents(cluster, CLAIMS, ticket.base, key=ticket.batch):
                if each.get("task") == ticket.number:
                    return each
    except OutOfRange:
        pass
    raise ClaimError(
        f"what was claimed for batch {ticket.batch} of group {ticket.group} is not in {CLAIMS}: "
        "somebody has deleted from that topic"
    )


def read_twice(ticket: Ticket) -> ClaimError:
    return ClaimError(
        f"a batch of group {ticket.group} is read a second time, and contract=at-most-once gives it once: two actions "
        "in foreachBatch, sorting or repartitioning by range, or one stream used twice do that. Let the first action "
        "be batch.localCheckpoint(), or cache the batch, and go on with what that returns"
    )


# What may have been lost


def ranges_json(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    return [
        [each.topic, str(each.topic_id) if each.topic_id else None, each.partition, each.start, each.end]
        for each in ranges
    ]


def skipping(group: str, ranges: Iterable[OffsetRange]) -> dict[str, Any]:
    """That these may have been lost, as it is written down."""
    return {"group": group, "ranges": ranges_json(ranges)}


def tell_skipped(cluster: Cluster, ticket: Ticket, wanted: OffsetRange, attempt: TaskAttempt) -> None:
    """Of an attempt that was not the first. Raises Unavailable, Refused."""
    _LOG.warning(
        "%s[%d] offsets %d to %d were given to another attempt at this task; attempt %d gets nothing of them, and they "
        "are lost if the other one has failed",
        *(wanted.topic, wanted.partition, wanted.start, wanted.end - 1, attempt.attempt),
    )
    bookkeeping.append(cluster, SKIPPED, skipping(ticket.group, [wanted]), key=ticket.group)


def skipped(cluster: Cluster, group: str) -> int:
    """How many offsets a group may have lost, in the time that brokers keep of that. Raises Unavailable, Refused."""
    if SKIPPED not in cluster.topics([SKIPPED]):
        return 0
    start = bookkeeping.beginning_of(cluster, SKIPPED)
    told = bookkeeping.documents(cluster, SKIPPED, start, key=group)
    return covered(_range(each) for document in told for each in document["ranges"])


def _range(told: list[Any]) -> OffsetRange:
    topic, topic_id, partition, start, end = told
    return OffsetRange(topic, UUID(topic_id) if topic_id else None, partition, start, end)


def covered(ranges: Iterable[OffsetRange]) -> int:
    """How many offsets lie in one or more of these: what is told of twice counts once."""
    total, last = 0, None
    for each in sorted(ranges, key=lambda each: (each.topic, str(each.topic_id), each.partition, each.start)):
        of = (each.topic, each.topic_id, each.partition)
        reached = last[1] if last is not None and last[0] == of else each.start
        total += max(each.end - max(each.start, reached), 0)
        last = (of, max(each.end, reached))
    return total
