"""At-most-once delivery in tasks: an attempt may do its work if it is the first to claim the task in the claims topic.

Spark starts another attempt at a task when the task fails, when it is slow (speculation), and when a lost machine makes
Spark repeat a whole stage. A task cannot always see this. So each attempt appends a claim and reads the claims before
it: the order of the log decides, and all attempts see the same order. Every attempt but the first gets no records.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from penstock.client.errors import ClientError, OutOfRange
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.topics import NewTopic
from penstock.spark import internal_topics
from penstock.spark.internal_topics import CLAIMS_TOPIC, SKIPPED_TOPIC
from penstock.spark.offsets import OffsetRange, ranges_from_json, ranges_to_json

_LOG: Final = logging.getLogger("penstock.spark")
_WEEK_MS: Final = 7 * 24 * 3_600_000
#: Claims are not read again after their batch has finished, so old ones can be deleted.
_CLAIMS_TOPIC: Final = NewTopic(
    name=CLAIMS_TOPIC,
    partitions=1,
    settings={
        "cleanup.policy": "delete",
        "retention.ms": str(_WEEK_MS),
        "retention.bytes": str(1 << 30),
        "segment.bytes": str(64 << 20),
    },
)
_SKIPPED_TOPIC: Final = NewTopic(
    name=SKIPPED_TOPIC, partitions=1, settings={"cleanup.policy": "delete", "retention.ms": str(5 * _WEEK_MS)}
)
_SPECULATION: Final = "spark.speculation"


class ClaimError(ClientError):
    """Data cannot be read or written at most once."""


class TaskClaim(NamedTuple):
    """The right to run one task. The first attempt that appends the claim to the claims topic may do the work."""

    group: str
    batch: str
    #: Offset in the claims topic from which the claims of attempts are read.
    base: int
    #: Number of the task within its batch.
    number: int


class TaskAttempt(NamedTuple):
    stage: int
    partition: int
    attempt: int


def ensure_claim_topics(cluster: Cluster) -> None:
    for topic in (_CLAIMS_TOPIC, _SKIPPED_TOPIC):
        internal_topics.ensure_internal_topic(cluster, topic)


def new_task_claim(cluster: Cluster) -> TaskClaim:
    """Return a claim for the tasks of one write job. Each task sets its own number. Raises Unavailable, Refused."""
    ensure_claim_topics(cluster)
    return TaskClaim("", uuid.uuid4().hex, internal_topics.end_offset(cluster, CLAIMS_TOPIC), -1)


def current_attempt() -> TaskAttempt:
    """Return the current task attempt. Raises ClaimError outside of a task, and if speculation is enabled."""
    # The status command counts skipped offsets with this module, and runs without Spark.
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise ClaimError("Spark does not say which task this is, so it cannot run at most once")
    refuse_speculation(context.getLocalProperty(_SPECULATION))
    return TaskAttempt(context.stageId(), context.partitionId(), context.attemptNumber())


def refuse_speculation(setting: str | None) -> None:
    """Raise ClaimError if speculation is enabled.

    A speculative attempt gets no records, and Spark could accept its empty result as that of the task.
    """
    if str(setting).strip().lower() == "true":
        raise ClaimError(
            "contract=at-most-once needs spark.speculation=false: of two attempts at a task one gets no records, and "
            "Spark might use the result of that one"
        )


def claim_task(cluster: Cluster, task_claim: TaskClaim, attempt: TaskAttempt) -> bool:
    """Append a claim for this attempt, and return whether it is the first.

    Raises ClaimError if the first claim is that of another task, because the program reads the batch twice;
    Unavailable, Refused. When it raises, the claim may have been appended: then no attempt gets the records.
    """
    token = uuid.uuid4().hex
    claim = {"group": task_claim.group, "batch": task_claim.batch, "task": task_claim.number, "token": token}
    internal_topics.append_document(cluster, CLAIMS_TOPIC, claim | attempt._asdict(), key=task_claim.batch)
    first = _first_claim(cluster, task_claim, Deadline(cluster.settings.retry_deadline_ms))
    if first["token"] == token:
        return True
    if (first["stage"], first["partition"]) != (attempt.stage, attempt.partition):
        raise read_twice_error(task_claim)
    return False


def _first_claim(cluster: Cluster, task_claim: TaskClaim, deadline: Deadline) -> Mapping[str, Any]:
    try:
        for _ in cluster.attempts(deadline):
            for each in internal_topics.read_documents(
                cluster, CLAIMS_TOPIC, task_claim.base, key=task_claim.batch
            ):
                if each.get("task") == task_claim.number:
                    return each
    except OutOfRange:
        pass
    raise ClaimError(
        f"the claims of batch {task_claim.batch} of group {task_claim.group} are not in {CLAIMS_TOPIC}: records were "
        "deleted from that topic"
    )


def read_twice_error(task_claim: TaskClaim) -> ClaimError:
    return ClaimError(
        f"a batch of group {task_claim.group} is read a second time, and contract=at-most-once delivers it once. Two "
        "actions in foreachBatch, sorting or repartitioning by range, or using one stream twice read it again. Call "
        "batch.localCheckpoint() or batch.cache() first, and use what it returns"
    )


# Offsets that may have been lost


def skipped_document(group: str, ranges: Iterable[OffsetRange]) -> dict[str, Any]:
    """Return the document that records these ranges as possibly lost."""
    return {"group": group, "ranges": ranges_to_json(ranges)}


def record_skipped(
    cluster: Cluster, task_claim: TaskClaim, wanted: OffsetRange, attempt: TaskAttempt
) -> None:
    """Record that this attempt was not the first, so the range may be lost. Raises Unavailable, Refused."""
    _LOG.warning(
        "%s[%d] offsets %d to %d were delivered to another attempt at this task; attempt %d gets no records. If the "
        "other attempt failed, they are lost",
        *(wanted.topic, wanted.partition, wanted.start, wanted.end - 1, attempt.attempt),
    )
    internal_topics.append_document(
        cluster, SKIPPED_TOPIC, skipped_document(task_claim.group, [wanted]), key=task_claim.group
    )


def count_skipped(cluster: Cluster, group: str) -> int:
    """Return how many offsets a group may have lost, within the retention of the topic. Raises Unavailable, Refused."""
    if SKIPPED_TOPIC not in cluster.topics([SKIPPED_TOPIC]):
        return 0
    start = internal_topics.beginning_offset(cluster, SKIPPED_TOPIC)
    documents = internal_topics.read_documents(cluster, SKIPPED_TOPIC, start, key=group)
    return count_covered(each for document in documents for each in ranges_from_json(document["ranges"]))


def count_covered(ranges: Iterable[OffsetRange]) -> int:
    """Return how many offsets the ranges cover. Offsets in several ranges count once."""
    total, last = 0, None
    for each in sorted(ranges, key=lambda each: (each.topic, str(each.topic_id), each.partition, each.start)):
        log = (each.topic, each.topic_id, each.partition)
        counted_to = last[1] if last is not None and last[0] == log else each.start
        total += max(each.end - max(each.start, counted_to), 0)
        last = (log, max(each.end, counted_to))
    return total
