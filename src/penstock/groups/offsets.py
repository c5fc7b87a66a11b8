"""Committed offsets: their storage, which clients may commit, which offsets may be deleted, and when they expire.

Offsets that are committed in a transaction stay pending, and invisible, until the transaction commits. If several
commits are made for one partition, the last one in the log counts, no matter when its transaction ends, because
compaction keeps that one. A committed offset therefore supersedes every pending offset that precedes it in the log.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.groups.coordinator_records import CommittedOffset, OffsetCommitRecord
from penstock.groups.group import (
    CommitRequest,
    FetchedOffset,
    Group,
    OffsetToCommit,
    Operation,
    PartitionError,
    PartitionsReply,
)
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import can_store


class OffsetKey(NamedTuple):
    group: str
    topic: str
    partition: int


#: By producer, in log order. None is a superseded offset whose transaction has not ended yet.
PendingByProducer = dict[int, CommittedOffset | None]


class PendingTransactionalOffsets:
    """Only replay changes it."""

    __slots__ = ("_groups", "_partitions", "_producers", "_transactions")

    def __init__(self) -> None:
        self._partitions: dict[OffsetKey, PendingByProducer] = {}
        #: The partitions of each producer's open transaction.
        self._producers: dict[int, dict[OffsetKey, None]] = {}
        #: The producers with an open transaction in each group, even if none of its offsets is left; and the reverse.
        self._transactions: dict[str, dict[int, None]] = {}
        self._groups: dict[int, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<StagedOffsets of {len(self._producers)} transactions in {len(self._partitions)} partitions>"

    def __contains__(self, partition: OffsetKey) -> bool:
        return partition in self._partitions

    def has_transaction(self, group_id: str) -> bool:
        return group_id in self._transactions

    def groups_of(self, producer_id: int) -> tuple[str, ...]:
        return tuple(self._groups.get(producer_id, ()))

    def of_group(self, group_id: str) -> Iterator[OffsetKey]:
        partitions = (
            partition
            for producer_id in self._transactions.get(group_id, ())
            for partition in self._producers.get(producer_id, ())
            if partition.group == group_id
        )
        yield from dict.fromkeys(partitions)

    def of_topic(self, topic: str) -> Iterator[OffsetKey]:
        yield from (partition for partition in self._partitions if partition.topic == topic)

    def stage(self, producer_id: int, partition: OffsetKey, offset: CommittedOffset) -> None:
        staged = self._partitions.setdefault(partition, {})
        staged.pop(producer_id, None)
        staged[producer_id] = offset
        self._producers.setdefault(producer_id, {})[partition] = None
        self._transactions.setdefault(partition.group, {})[producer_id] = None
        self._groups.setdefault(producer_id, {})[partition.group] = None

    def overtake(self, partition: OffsetKey) -> None:
        """Supersede all pending offsets of the partition, because a commit without a transaction follows them in the
        log."""
        staged = self._partitions.get(partition)
        if staged:
            self._partitions[partition] = dict.fromkeys(staged)

    def drop(self, partition: OffsetKey) -> None:
        """Drop the pending offsets of a partition whose offset was deleted."""
        for producer_id in self._partitions.pop(partition, ()):
            del self._producers[producer_id][partition]

    def end(self, producer_id: int, *, committed: bool) -> tuple[tuple[OffsetKey, CommittedOffset], ...]:
        """Return the offsets that are committed now. They supersede pending offsets of other producers before them."""
        ended = []
        for partition in self._producers.pop(producer_id, ()):
            staged = self._partitions[partition]
            offset = self._commit_pending(staged, producer_id) if committed else staged.pop(producer_id)
            if not staged:
                del self._partitions[partition]
            if committed and offset is not None:
                ended.append((partition, offset))
        for group_id in self._groups.pop(producer_id, ()):
            del self._transactions[group_id][producer_id]
            if not self._transactions[group_id]:
                del self._transactions[group_id]
        return tuple(ended)

    def snapshot(self) -> dict[OffsetKey, tuple[tuple[int, CommittedOffset | None], ...]]:
        return {partition: tuple(staged.items()) for partition, staged in sorted(self._partitions.items())}

    @staticmethod
    def _commit_pending(staged: PendingByProducer, producer_id: int) -> CommittedOffset | None:
        for earlier in staged:
            if earlier == producer_id:
                break
            staged[earlier] = None
        return staged.pop(producer_id)


TopicPartition = tuple[str, int]


class OffsetStore:
    """Group -> topic -> partition -> offset, and the pending offsets of open transactions. Only replay changes it."""

    __slots__ = ("_groups", "_staged")

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
        self._staged = PendingTransactionalOffsets()

    def replay(self, record: OffsetCommitRecord) -> None:
        partition = OffsetKey(record.group, record.topic, record.partition)
        if record.value is None:
            self._remove(record.group, record.topic, record.partition)
            self._staged.drop(partition)
        else:
            self._put(partition, record.value)
            self._staged.overtake(partition)

    def replay_pending(self, producer_id: int, record: OffsetCommitRecord) -> None:
        assert record.value is not None
        partition = OffsetKey(record.group, record.topic, record.partition)
        self._staged.stage(producer_id, partition, record.value)

    def end_transaction(self, producer_id: int, committed: bool) -> tuple[str, ...]:
        """Return the groups in which the transaction was open."""
        groups = self._staged.groups_of(producer_id)
        for partition, offset in self._staged.end(producer_id, committed=committed):
            self._put(partition, offset)
        return groups

    def is_staged(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may change this offset."""
        return OffsetKey(group_id, topic, partition) in self._staged

    def has_transaction(self, group_id: str) -> bool:
        return self._staged.has_transaction(group_id)

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        return self._groups.get(group_id, {}).get(topic, {}).get(partition)

    def of_group(self, group_id: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        for topic, partitions in self._groups.get(group_id, {}).items():
            for partition, offset in partitions.items():
                yield topic, partition, offset

    def places_of(self, group_id: str) -> Iterator[TopicPartition]:
        """The partitions for which a group has a committed or pending offset."""
        committed = ((topic, partition) for topic, partition, _ in self.of_group(group_id))
        staged = ((tp.topic, tp.partition) for tp in self._staged.of_group(group_id))
        yield from dict.fromkeys((*committed, *staged))

    def of_topic(self, topic: str) -> Iterator[tuple[str, int]]:
        """(group, partition) of every committed or pending offset in this topic."""
        committed = (
            (group_id, partition)
            for group_id, topics in self._groups.items()
            for partition in topics.get(topic, {})
        )
        staged = ((tp.group, tp.partition) for tp in self._staged.of_topic(topic))
        yield from dict.fromkeys((*committed, *staged))

    def has(self, group_id: str) -> bool:
        return group_id in self._groups or self.has_transaction(group_id)

    def staged(self) -> dict[OffsetKey, tuple[tuple[int, CommittedOffset | None], ...]]:
        """The pending offsets by producer, in log order; None if a later commit has superseded the offset."""
        return self._staged.snapshot()

    def _put(self, partition: OffsetKey, offset: CommittedOffset) -> None:
        self._groups.setdefault(partition.group, {}).setdefault(partition.topic, {})[partition.partition] = (
            offset
        )

    def _remove(self, group_id: str, topic: str, partition: int) -> None:
        topics = self._groups.get(group_id, {})
        partitions = topics.get(topic, {})
        partitions.pop(partition, None)
        if not partitions:
            topics.pop(topic, None)
        if not topics:
            self._groups.pop(group_id, None)


def check_commit(group: Group | None, request: CommitRequest, topics: Topics) -> ErrorCode:
    if group is None:
        # A client that is not a member (generation -1) may commit to a group that does not exist.
        return ErrorCode.none if request.generation < 0 else request.error_if_no_group
    if not request.knows_member_epochs and group.needs_member_epoch(request.member_id):
        return ErrorCode.unsupported_version
    return group.check_commit(request, topics)


def commit_offsets(group: Group | None, request: CommitRequest, operation: Operation) -> PartitionsReply:
    error = check_commit(group, request, operation.topics)
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    if group is not None:
        group.member_committed(request.member_id, operation)
    return PartitionsReply(
        partitions=tuple(_commit_one(request, each, operation) for each in request.offsets)
    )


def commit_transactional_offsets(
    group: Group | None, request: CommitRequest, operation: Operation
) -> PartitionsReply:
    """Commit in a transaction; the producer sends the member for which it commits (KIP-447)."""
    if group is None:
        error = ErrorCode.none if request.generation < 0 else ErrorCode.illegal_generation
    else:
        error = group.check_commit(request, operation.topics, is_transactional=True)
    if error is ErrorCode.stale_member_epoch:
        # Producers know only generations.
        error = ErrorCode.illegal_generation
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    return PartitionsReply(
        partitions=tuple(_commit_one(request, each, operation) for each in request.offsets)
    )


def _commit_one(request: CommitRequest, each: OffsetToCommit, operation: Operation) -> PartitionError:
    if len(each.metadata) > operation.settings.offset_metadata_max_bytes or not can_store(each.metadata):
        error = ErrorCode.offset_metadata_too_large
        return PartitionError(topic=each.topic, partition=each.partition, error=error)
    expire_ms = None if request.retention_ms is None else operation.now_ms + request.retention_ms
    topic = operation.topics.get(each.topic)
    committed = CommittedOffset(
        offset=each.offset,
        leader_epoch=each.leader_epoch,
        metadata=each.metadata,
        commit_timestamp_ms=operation.now_ms,
        expire_timestamp_ms=expire_ms,
        topic_id=None if topic is None else topic.id,
    )
    operation.store_offset(
        OffsetCommitRecord(
            group=request.group_id, topic=each.topic, partition=each.partition, value=committed
        )
    )
    return PartitionError(topic=each.topic, partition=each.partition)


def fetch_offsets(
    store: OffsetStore,
    group_id: str,
    partitions: Iterable[TopicPartition] | None,
    topics: Topics,
    *,
    require_stable: bool = False,
) -> tuple[FetchedOffset, ...]:
    """Return all of a group's offsets if `partitions` is None.

    With `require_stable`, an offset that an open transaction may change is not returned, but marked as unstable.
    """
    if partitions is None:
        partitions = [
            (topic, partition)
            for topic, partition, committed in store.of_group(group_id)
            if not _belongs_to_earlier_topic(committed, topic, topics)
        ]
    return tuple(
        _fetch_one(store, group_id, topic, partition, topics, require_stable)
        for topic, partition in partitions
    )


def belongs_to_current_topic(committed: CommittedOffset | None, topic: str, operation: Operation) -> bool:
    """Whether the offset is known to belong to the topic that has this name now."""
    known = operation.topics.get(topic)
    return committed is not None and known is not None and committed.topic_id == known.id


def _belongs_to_earlier_topic(committed: CommittedOffset, topic: str, topics: Topics) -> bool:
    """Whether it belongs to an earlier topic of the same name, whose deletion the coordinator missed."""
    known = None if committed.topic_id is None else topics.get(topic)
    return known is not None and committed.topic_id != known.id


def _fetch_one(
    store: OffsetStore, group_id: str, topic: str, partition: int, topics: Topics, require_stable: bool
) -> FetchedOffset:
    is_unstable = require_stable and store.is_staged(group_id, topic, partition)
    committed = None if is_unstable else store.get(group_id, topic, partition)
    if committed is not None and _belongs_to_earlier_topic(committed, topic, topics):
        committed = None
    return FetchedOffset(topic=topic, partition=partition, committed=committed, is_unstable=is_unstable)


def delete_offsets(
    store: OffsetStore, group: Group | None, partitions: Iterable[TopicPartition], operation: Operation
) -> PartitionsReply:
    if group is None:
        return PartitionsReply(error=ErrorCode.group_id_not_found)
    error = group.check_offset_deletion()
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    return PartitionsReply(
        partitions=tuple(
            _delete_one(store, group, topic, partition, operation) for topic, partition in partitions
        )
    )


def _delete_one(
    store: OffsetStore, group: Group, topic: str, partition: int, operation: Operation
) -> PartitionError:
    if group.is_subscribed(topic):
        error = ErrorCode.group_subscribed_to_topic
        return PartitionError(topic=topic, partition=partition, error=error)
    is_there = store.get(group.group_id, topic, partition) is not None
    if is_there or store.is_staged(group.group_id, topic, partition):
        delete_offset(group.group_id, topic, partition, operation)
    return PartitionError(topic=topic, partition=partition)


def delete_offset(group_id: str, topic: str, partition: int, operation: Operation) -> None:
    operation.store_offset(OffsetCommitRecord(group=group_id, topic=topic, partition=partition, value=None))


def expire_offsets(store: OffsetStore, group: Group, operation: Operation) -> bool:
    """Delete expired offsets, unless an open transaction may change them. Return True if the group has none left."""
    kept = store.has_transaction(group.group_id)
    for topic, partition, offset in store.of_group(group.group_id):
        in_use = group.is_subscribed(topic) or store.is_staged(group.group_id, topic, partition)
        if in_use or not _has_expired(group, offset, operation):
            kept = True
        else:
            delete_offset(group.group_id, topic, partition, operation)
    return not kept


def _has_expired(group: Group, offset: CommittedOffset, operation: Operation) -> bool:
    retained_from_ms = group.retained_from_ms(offset)
    if retained_from_ms is None:
        return False
    if offset.expire_timestamp_ms is not None:
        return operation.now_ms >= offset.expire_timestamp_ms
    return operation.now_ms - retained_from_ms >= operation.settings.offsets_retention_ms
