"""Committed offsets: what is stored, who may commit, what may be deleted and when an offset expires."""

from collections.abc import Iterable, Iterator

from penstock.groups.group import Group
from penstock.groups.messages import (
    CommitRequest,
    FetchedOffset,
    OffsetToCommit,
    PartitionError,
    PartitionsReply,
)
from penstock.groups.records import CommittedOffset, OffsetRecord, can_store
from penstock.groups.work import Step
from penstock.protocol.errors import ErrorCode

TopicPartition = tuple[str, int]


class OffsetStore:
    """Group -> topic -> partition -> offset. Only replay writes here."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}

    def replay(self, record: OffsetRecord) -> None:
        if record.value is None:
            self._remove(record.group, record.topic, record.partition)
        else:
            topics = self._groups.setdefault(record.group, {})
            topics.setdefault(record.topic, {})[record.partition] = record.value

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        return self._groups.get(group_id, {}).get(topic, {}).get(partition)

    def of_group(self, group_id: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        for topic, partitions in self._groups.get(group_id, {}).items():
            for partition, offset in partitions.items():
                yield topic, partition, offset

    def of_topic(self, topic: str) -> Iterator[tuple[str, int]]:
        """(group, partition) of every offset in this topic."""
        for group_id, topics in self._groups.items():
            for partition in topics.get(topic, {}):
                yield group_id, partition

    def has(self, group_id: str) -> bool:
        return group_id in self._groups

    def _remove(self, group_id: str, topic: str, partition: int) -> None:
        topics = self._groups.get(group_id, {})
        partitions = topics.get(topic, {})
        partitions.pop(partition, None)
        if not partitions:
            topics.pop(topic, None)
        if not topics:
            self._groups.pop(group_id, None)


def check_commit(group: Group | None, request: CommitRequest) -> ErrorCode:
    if group is None:
        # Who uses no membership (generation -1) may commit to a group that nobody has made.
        return ErrorCode.none if request.generation < 0 else request.error_if_no_group
    return group.check_commit(request.member_id, request.instance_id, request.generation)


def commit(group: Group | None, request: CommitRequest, step: Step) -> PartitionsReply:
    error = check_commit(group, request)
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    if group is not None:
        group.heard_of(request.member_id, step)
    return PartitionsReply(partitions=tuple(_commit_one(request, each, step) for each in request.offsets))


def _commit_one(request: CommitRequest, each: OffsetToCommit, step: Step) -> PartitionError:
    if len(each.metadata) > step.settings.offset_metadata_max_bytes or not can_store(each.metadata):
        error = ErrorCode.offset_metadata_too_large
        return PartitionError(topic=each.topic, partition=each.partition, error=error)
    expire_ms = None if request.retention_ms is None else step.now_ms + request.retention_ms
    committed = CommittedOffset(
        offset=each.offset,
        leader_epoch=each.leader_epoch,
        metadata=each.metadata,
        commit_timestamp_ms=step.now_ms,
        expire_timestamp_ms=expire_ms,
    )
    step.store_offset(
        OffsetRecord(group=request.group_id, topic=each.topic, partition=each.partition, value=committed)
    )
    return PartitionError(topic=each.topic, partition=each.partition)


def fetch(
    store: OffsetStore, group_id: str, partitions: Iterable[TopicPartition] | None
) -> tuple[FetchedOffset, ...]:
    """All of a group's offsets when no partitions are named."""
    if partitions is None:
        return tuple(
            FetchedOffset(topic=topic, partition=partition, committed=offset)
            for topic, partition, offset in store.of_group(group_id)
        )
    return tuple(
        FetchedOffset(topic=topic, partition=partition, committed=store.get(group_id, topic, partition))
        for topic, partition in partitions
    )


def delete_offsets(
    store: OffsetStore, group: Group | None, partitions: Iterable[TopicPartition], step: Step
) -> PartitionsReply:
    if group is None:
        return PartitionsReply(error=ErrorCode.group_id_not_found)
    error = group.check_offset_deletion()
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    return PartitionsReply(
        partitions=tuple(_delete_one(store, group, topic, partition, step) for topic, partition in partitions)
    )


def _delete_one(store: OffsetStore, group: Group, topic: str, partition: int, step: Step) -> PartitionError:
    if group.is_subscribed(topic):
        error = ErrorCode.group_subscribed_to_topic
        return PartitionError(topic=topic, partition=partition, error=error)
    if store.get(group.group_id, topic, partition) is not None:
        forget(group.group_id, topic, partition, step)
    return PartitionError(topic=topic, partition=partition)


def forget(group_id: str, topic: str, partition: int, step: Step) -> None:
    step.store_offset(OffsetRecord(group=group_id, topic=topic, partition=partition, value=None))


def expire(store: OffsetStore, group: Group, step: Step) -> bool:
    """Forget the offsets whose time is up. True when the group has none left."""
    kept = False
    for topic, partition, offset in store.of_group(group.group_id):
        if group.is_subscribed(topic) or not _has_expired(group, offset, step):
            kept = True
        else:
            forget(group.group_id, topic, partition, step)
    return not kept


def _has_expired(group: Group, offset: CommittedOffset, step: Step) -> bool:
    retained_from_ms = group.retained_from_ms(offset)
    if retained_from_ms is None:
        return False
    if offset.expire_timestamp_ms is not None:
        return step.now_ms >= offset.expire_timestamp_ms
    return step.now_ms - retained_from_ms >= step.settings.offsets_retention_ms
