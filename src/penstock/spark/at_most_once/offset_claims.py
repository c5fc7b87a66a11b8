"""At-most-once delivery on the driver: offsets are claimed before any task reads them, and are never handed out again.

The committed offsets of the query's group are the claims: everything below them has been handed out. The driver claims
a batch when it plans it, in a transaction under an id that belongs to the group, so that of two drivers only the newer
one can claim. Only then do the tasks of the batch get their task claims. A driver that plans the same batch again, with
the same checkpoint or without one, finds it claimed and hands out nothing; offsets that may have been lost in this way
are recorded and can be counted.

Brokers delete the offsets of a group that has not committed for about a week (offsets.retention.minutes). A query that
was stopped for longer has lost its claims and relies on its checkpoint alone.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.errors import ClientError, Fenced
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import CommittedOffset, committed_offsets, group_info
from penstock.client.wire.producer import RawProducer
from penstock.spark import internal_topics
from penstock.spark.at_most_once.task_claims import (
    ClaimError,
    TaskClaim,
    count_covered,
    count_skipped,
    ensure_claim_topics,
    skipped_document,
)
from penstock.spark.internal_topics import CLAIMS_TOPIC, SKIPPED_TOPIC
from penstock.spark.offsets import (
    COMMIT_REPEAT_MS,
    COMMIT_RETRY_MS,
    GROUP_METADATA,
    OffsetRange,
    Position,
    ranges_to_json,
)

__all__ = [
    "ClaimError",
    "OffsetClaim",
    "OffsetClaims",
    "claims_transactional_id",
    "count_skipped",
    "find_in_doubt",
    "split_at_claims",
]

_LOG: Final = logging.getLogger("penstock.spark")
_STATES_WITHOUT_MEMBERS: Final = ("", "Empty", "Dead")
_UNKNOWN: Final = -1


def claims_transactional_id(group: str) -> str:
    """Return the transactional id of a group's claims."""
    return f"penstock-claim-{group}"


class OffsetClaim(NamedTuple):
    """The claim on one partition: all offsets below `offset` have been handed out."""

    offset: int
    #: Id of the topic that the claim is for; None if unknown.
    topic_id: UUID | None = None
    #: Where the last batch that claimed offsets of this partition began; -1 if unknown.
    since: int = _UNKNOWN
    #: Offset of that batch's record in the claims topic; -1 if unknown.
    base: int = _UNKNOWN

    def is_for(self, topic_id: UUID | None) -> bool:
        """Return whether the claim is for this topic, and not for a deleted one of the same name."""
        return None in (self.topic_id, topic_id) or self.topic_id == topic_id


def split_at_claims(
    ranges: Iterable[OffsetRange], claims: Mapping[TopicPartition, OffsetClaim]
) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """Split the ranges into those that can still be handed out, and those that are already claimed."""
    unclaimed, claimed = [], []
    for each in ranges:
        claim = claims.get(each.topic_partition)
        if claim is None or claim.offset <= each.start or not claim.is_for(each.topic_id):
            unclaimed.append(each)
            continue
        claimed_end = min(claim.offset, each.end)
        claimed.append(each._replace(end=claimed_end))
        if claimed_end < each.end:
            unclaimed.append(each._replace(start=claimed_end))
    return unclaimed, claimed


def find_in_doubt(start: Position, claims: Mapping[TopicPartition, OffsetClaim]) -> list[OffsetRange]:
    """Return the offsets of the last claimed batch, which a query that starts over at `start` may lose.

    All earlier batches were finished when that batch was claimed.
    """
    last = max((claim.base for claim in claims.values()), default=_UNKNOWN)
    found = []
    for tp, claim in sorted(claims.items()):
        topic_id = start.ids.get(tp[0])
        if claim.base == last != _UNKNOWN and claim.is_for(topic_id):
            since = max(claim.since, start.offsets.get(tp, 0))
            found.append(OffsetRange(*(tp[0], topic_id, tp[1]), since, claim.offset))
    return [each for each in found if each.size]


class OffsetClaims:
    """The claims of one query, on its driver."""

    def __init__(
        self, cluster: Cluster, group: str, *, deadline: Callable[[float], Deadline] = Deadline
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._deadline = deadline
        self._producer: RawProducer | None = None
        self._refresh_after = deadline(0)
        #: Ranges that may have been lost, and are not yet recorded in the topic of skipped offsets.
        self._unrecorded: list[OffsetRange] = []

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    # Planning

    def skip_claimed(self, position: Position) -> Position:
        """Return where a query without a checkpoint starts: at `position`, but never below a claim.

        Raises ClaimError, Unavailable, Refused.
        """
        with self._fenced_as_claim_error():
            # Fence first: this aborts the open transaction of a dead driver, which `_claims` would wait for.
            self._begin()
            claims = self._claims(position.offsets)
        self._unrecorded += find_in_doubt(position, claims)
        offsets = position.offsets
        for tp, claim in claims.items():
            if claim.is_for(position.ids[tp[0]]):
                offsets[tp] = max(offsets[tp], claim.offset)
        return Position.of(offsets, position.ids)

    def without_claimed(self, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        """Return the parts of the ranges that are not claimed yet.

        Fences other drivers: none of them can claim offsets any more, unless it starts again and fences this one.

        Raises ClaimError, Unavailable, Refused.
        """
        with self._fenced_as_claim_error():
            self._begin()
            unclaimed, claimed = split_at_claims(
                ranges, self._claims(each.topic_partition for each in ranges)
            )
        if claimed:
            _LOG.warning(
                "%d offsets were claimed before: they may have been lost, and are not delivered again",
                count_covered(claimed),
            )
            self._unrecorded += claimed
        return unclaimed

    def claim(self, tasks: Sequence[OffsetRange]) -> list[TaskClaim]:
        """Claim the ranges, one for each task, and return the task claims.

        When this returns, the ranges are claimed; when it raises, they may be claimed or not.

        Raises ClaimError, Unavailable, Refused.
        """
        if not tasks and not self._unrecorded:
            return []
        with self._fenced_as_claim_error():
            producer, batch = self._begin(), uuid.uuid4().hex
            base = self._write(producer, batch, tasks)
            producer.commit_offsets(self._group, claimed_offsets(tasks, base))
            producer.end(commit=True)
        self._unrecorded = []
        self._refresh_after = self._deadline(COMMIT_REPEAT_MS)
        return [TaskClaim(self._group, batch, base, index) for index in range(len(tasks))]

    def _write(self, producer: RawProducer, batch: str, tasks: Sequence[OffsetRange]) -> int:
        claim = {"group": self._group, "batch": batch, "ranges": ranges_to_json(tasks)}
        sent = producer.send(
            *internal_topics.only_partition(CLAIMS_TOPIC), internal_topics.encode_document(claim, key=batch)
        )
        if self._unrecorded:
            skipped = skipped_document(self._group, self._unrecorded)
            data = internal_topics.encode_document(skipped, key=self._group)
            producer.send(*internal_topics.only_partition(SKIPPED_TOPIC), data)
        producer.flush()
        # If the broker does not return the offset of the record, tasks search the whole claims topic.
        return (
            sent.offset
            if sent.offset is not None
            else internal_topics.beginning_offset(self._cluster, CLAIMS_TOPIC)
        )

    # Refreshing claims

    def refresh(self) -> None:
        """Commit the claims again, so that brokers do not expire them while the query has nothing to read for weeks.

        Raises ClaimError if another driver has fenced this one. Other errors are only logged.
        """
        if not self._refresh_after.is_over:
            return
        try:
            with self._fenced_as_claim_error():
                producer = self._begin()
                producer.commit_offsets(self._group, self._committed_offsets())
                producer.end(commit=True)
        except ClaimError:
            raise
        except ClientError as trouble:
            _LOG.warning("group %s: the claims could not be committed again: %s", self._group, trouble)
            # The next `_begin` fences any driver that has taken over. Still no offset is handed out twice, because each
            # driver checks the claims first.
            self.close()
            self._refresh_after = self._deadline(COMMIT_RETRY_MS)
        else:
            self._refresh_after = self._deadline(COMMIT_REPEAT_MS)

    # The claiming producer

    def _begin(self) -> RawProducer:
        if self._producer is None:
            self._refuse_members()
            ensure_claim_topics(self._cluster)
            producer = RawProducer(self._cluster, transactional_id=claims_transactional_id(self._group))
            producer.init()
            self._producer = producer
        return self._producer

    def _refuse_members(self) -> None:
        info = group_info(self._cluster, self._group)
        if info is not None and info.state not in _STATES_WITHOUT_MEMBERS:
            raise ClaimError(
                f"group {self._group} has members; a query with contract=at-most-once needs a group of its own "
                "(kafka.group.id)"
            )

    def _committed_offsets(self) -> dict[TopicPartition, CommittedOffset]:
        """Return the group's offsets in topics that still exist; brokers reject commits for deleted topics."""
        found = committed_offsets(self._cluster, self._group)
        existing = self._cluster.topics({topic for topic, _ in found})
        return {tp: each for tp, each in found.items() if tp[0] in existing}

    def _claims(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetClaim]:
        wanted = sorted(set(partitions))
        found = committed_offsets(self._cluster, self._group, wanted, stable=True) if wanted else {}
        return {tp: parse_claim(each) for tp, each in found.items()}

    @contextmanager
    def _fenced_as_claim_error(self) -> Iterator[None]:
        try:
            yield
        except Fenced:
            raise ClaimError(
                f"group {self._group}: another driver has fenced this one; with contract=at-most-once only one query "
                "at a time can use a group (kafka.group.id)"
            ) from None


# Committed offsets of the group


def claimed_offsets(tasks: Iterable[OffsetRange], base: int) -> dict[TopicPartition, CommittedOffset]:
    """Return the offsets that the group commits to claim these ranges."""
    starts: dict[TopicPartition, int] = {}
    found = {}
    for each in sorted(tasks, key=lambda each: (each.topic_partition, each.start)):
        since = starts.setdefault(each.topic_partition, each.start)
        metadata: dict[str, Any] = {"topic": str(each.topic_id)} if each.topic_id is not None else {}
        metadata |= {"since": since, "base": base}
        # It starts with GROUP_METADATA, as the metadata of every query does.
        text = f"{GROUP_METADATA} {json.dumps(metadata)}"
        found[each.topic_partition] = CommittedOffset(offset=each.end, metadata=text)
    return found


def parse_claim(position: CommittedOffset) -> OffsetClaim:
    """Parse a claim. Accepts an offset that any client has committed, with any metadata."""
    metadata = _parse_metadata(position.metadata)
    topic_id = metadata.get("topic")
    return OffsetClaim(
        offset=position.offset,
        topic_id=UUID(topic_id) if topic_id else None,
        since=metadata.get("since", _UNKNOWN),
        base=metadata.get("base", _UNKNOWN),
    )


def _parse_metadata(metadata: str) -> dict[str, Any]:
    if not metadata.startswith(GROUP_METADATA):
        return {}
    try:
        found = json.loads(metadata.removeprefix(GROUP_METADATA))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
