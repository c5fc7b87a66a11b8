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
from penstock.groups.topics import Topics
from penstock.groups.transactional_offsets import Place, StagedOffsets
from penstock.groups.work import Step
from penstock.protocol.errors import ErrorCode

TopicPartition = tuple[str, int]


class OffsetStore:
    """Group -> topic -> partition -> offset, and what open transactions have staged. Only replay writes here."""

    __slots__ = ("_groups", "_staged")

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
        self._staged = StagedOffsets()

    def replay(self, record: OffsetRecord) -> None:
        place = Place(record.group, record.topic, record.partition)
        if record.value is None:
            self._remove(record.group, record.topic, record.partition)
            self._staged.drop(place)
        else:
            self._put(place, record.value)
            self._staged.overtake(place)

    def replay_pending(self, producer_id: int, record: OffsetRecord) -> None:
        assert record.value is not None
        place = Place(record.group, record.topic, record.partition)
        self._staged.stage(producer_id, place, record.value)

    def end_transaction(self, producer_id: int, committed: bool) -> tuple[str, ...]:
        """The groups that it was open in."""
        groups = self._staged.groups_of(producer_id)
        for place, offset in self._staged.end(producer_id, committed=committed):
            self._put(place, offset)
        return groups

    def is_staged(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction may change this offset."""
        return Place(group_id, topic, partition) in self._staged

    def has_transaction(self, group_id: str) -> bool:
        return self._staged.has_transaction(group_id)

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        return self._groups.get(group_id, {}).get(topic, {}).get(partition)

    def of_group(self, group_id: str) -> Iterator[tuple[str, int, CommittedOffset]]:
        for topic, partitions in self._groups.get(group_id, {}).items():
            for partition, offset in partitions.items():
                yield topic, partition, offset

    def places_of(self, group_id: str) -> Iterator[TopicPartition]:
        """Where a group has an offset, be it only staged."""
        committed = ((topic, partition) for topic, partition, _ in self.of_group(group_id))
        staged = ((place.topic, place.partition) for place in self._staged.of_group(group_id))
        yield from dict.fromkeys((*committed, *staged))

    def of_topic(self, topic: str) -> Iterator[tuple[str, int]]:
        """(group, partition) of every offset in this topic, be it only staged."""
        committed = (
            (group_id, partition)
            for group_id, topics in self._groups.items()
            for partition in topics.get(topic, {})
        )
        staged = ((place.group, place.partition) for place in self._staged.of_topic(topic))
        yield from dict.fromkeys((*committed, *staged))

    def has(self, group_id: str) -> bool:
        return group_id in self._groups or self.has_transaction(group_id)

    def staged(self) -> dict[Place, tuple[tuple[int, CommittedOffset | None], ...]]:
        """By producer, in the order in which they count; None where another commit has overtaken it."""
        return self._staged.snapshot()

    def _put(self, place: Place, offset: CommittedOffset) -> None:
        self._groups.setdefault(place.group, {}).setdefault(place.topic, {})[place.partition] = offset

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
        # Who uses no membership (generation -1) may commit to a group that nobody has made.
        return ErrorCode.none if request.generation < 0 else request.error_if_no_group
    if not request.knows_member_epochs and group.needs_member_epoch(request.member_id):
        return ErrorCode.unsupported_version
    return group.check_commit(request, topics)


def commit(group: Group | None, request: CommitRequest, step: Step) -> PartitionsReply:
    error = check_commit(group, request, step.topics)
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    if group is not None:
        group.heard_of(request.member_id, step)
    return PartitionsReply(partitions=tuple(_commit_one(request, each, step) for each in request.offsets))


def stage(group: Group | None, request: CommitRequest, step: Step) -> PartitionsReply:
    """A commit as part of a transaction, for which its producer vouches that the member has it (KIP-447)."""
    if group is None:
        error = ErrorCode.none if request.generation < 0 else ErrorCode.illegal_generation
    else:
        error = group.check_commit(request, step.topics, is_transactional=True)
    if error is ErrorCode.stale_member_epoch:
        # Producers know of generations only.
        error = ErrorCode.illegal_generation
    if error is not ErrorCode.none:
        return PartitionsReply(error=error)
    return PartitionsReply(partitions=tuple(_commit_one(request, each, step) for each in request.offsets))


def _commit_one(request: CommitRequest, each: OffsetToCommit, step: Step) -> PartitionError:
    if len(each.metadata) > step.settings.offset_metadata_max_bytes or not can_store(each.metadata):
        error = ErrorCode.offset_metadata_too_large
        return PartitionError(topic=each.topic, partition=each.partition, error=error)
    expire_ms = None if request.retention_ms is None else step.now_ms + request.retention_ms
    topic = step.topics.get(each.topic)
    committed = CommittedOffset(
        offset=each.offset,
        leader_epoch=each.leader_epoch,
        metadata=each.metadata,
        commit_timestamp_ms=step.now_ms,
        expire_timestamp_ms=expire_ms,
        topic_id=None if topic is None else topic.id,
    )
    step.store_offset(
        OffsetRecord(group=request.group_id, topic=each.topic, partition=each.partition, value=committed)
    )
    return PartitionError(topic=each.topic, partition=each.partition)


def fetch(
    store: OffsetStore,
    group_id: str,
    partitions: Iterable[TopicPartition] | None,
    topics: Topics,
    *,
    require_stable: bool = False,
) -> tuple[FetchedOffset, ...]:
    """All of a group's offsets when no partitions are named.

    With `require_stable`, an offset that an open transaction may change is not told, but that it is unstable.
    """
    if partitions is None:
        partitions = [
            (topic, partition)
            for topic, partition, committed in store.of_group(group_id)
            if not _is_of_another(committed, topic, topics)
        ]
    return tuple(
        _fetch_one(store, group_id, topic, partition, topics, require_stable)
        for topic, partition in partitions
    )


def is_of_the_present(committed: CommittedOffset | None, topic: str, step: Step) -> bool:
    """Whether the offset is known to be of the topic that has this name now."""
    known = step.topics.get(topic)
    return committed is not None and known is not None and committed.topic_id == known.id


def _is_of_another(committed: CommittedOffset, topic: str, topics: Topics) -> bool:
    """Whether it was committed to an earlier topic of the same name, which its coordinator did not see go."""
    known = None if committed.topic_id is None else topics.get(topic)
    return known is not None and committed.topic_id != known.id


def _fetch_one(
    store: OffsetStore, group_id: str, topic: str, partition: int, topics: Topics, require_stable: bool
) -> FetchedOffset:
    is_unstable = require_stable and store.is_staged(group_id, topic, partition)
    committed = None if is_unstable else store.get(group_id, topic, partition)
    if committed is not None and _is_of_another(committed, topic, topics):
        committed = None
    return FetchedOffset(topic=topic, partition=partition, committed=committed, is_unstable=is_unstable)


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
    is_there = store.get(group.group_id, topic, partition) is not None
    if is_there or store.is_staged(group.group_id, topic, partition):
        forget(group.group_id, topic, partition, step)
    return PartitionError(topic=topic, partition=partition)


def forget(group_id: str, topic: str, partition: int, step: Step) -> None:
    step.store_offset(OffsetRecord(group=group_id, topic=topic, partition=partition, value=None))


def expire(store: OffsetStore, group: Group, step: Step) -> bool:
    """Forget the offsets whose time is up, unless a transaction is about them. True when the group has none left."""
    kept = store.has_transaction(group.group_id)
    for topic, partition, offset in store.of_group(group.group_id):
        in_use = group.is_subscribed(topic) or store.is_staged(group.group_id, topic, partition)
        if in_use or not _has_expired(group, offset, step):
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
