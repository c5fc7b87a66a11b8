"""Transactional and plain commits to the same offsets: the log alone decides which one counts."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.groups.coordinator_records import OffsetCommitRecord, decode_record
from penstock.groups.group import CommitRequest, GroupResult, OffsetToCommit, TransactionProducer
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.offsets import OffsetKey

SETTINGS = GroupCoordinatorConfig(offsets_retention_ms=50_000, offsets_retention_check_interval_ms=20_000)
PRODUCERS = (7, 8, 9)
PLACES = tuple(OffsetKey(group, topic, 0) for group in "gh" for topic in "tu")


class Entry(NamedTuple):
    """A record in the log; `producer` is None outside of transactions. An end has no key, and `value` says how."""

    producer: int | None
    key: bytes | None
    value: bytes | bool | None


Log = list[Entry]


class World:
    def __init__(self) -> None:
        self.shard = GroupCoordinatorShard(SETTINGS)
        self.log: Log = []
        self.now_ms = 0
        self.count = 0
        self._apply(self.shard.loaded(0))

    def commit(self, place: OffsetKey, producer: int | None) -> None:
        self.count += 1
        offset = OffsetToCommit(topic=place.topic, partition=place.partition, offset=self.count)
        request = CommitRequest(
            group_id=place.group, member_id="", generation=-1, instance_id=None, offsets=(offset,)
        )
        if producer is None:
            self._apply(self.shard.commit(request, "commit", now_ms=self.now_ms))
        else:
            who = TransactionProducer(producer, 0)
            self._apply(self.shard.commit_in_transaction(request, who, "commit", now_ms=self.now_ms))

    def end(self, producer: int, committed: bool) -> None:
        self._replay(Entry(producer, None, committed))

    def delete(self, place: OffsetKey) -> None:
        where = [(place.topic, place.partition)]
        self._apply(self.shard.delete_offsets(place.group, where, "delete", now_ms=self.now_ms))

    def delete_group(self, place: OffsetKey) -> None:
        self._apply(self.shard.delete_groups([place.group], "delete", now_ms=self.now_ms))

    def forget_topic(self, place: OffsetKey) -> None:
        self._apply(self.shard.forget_topics([place.topic], "forget", now_ms=self.now_ms))

    def wait(self, by_ms: int) -> None:
        self.now_ms += by_ms
        deadline_ms = self.shard.next_deadline_ms()
        while deadline_ms is not None and deadline_ms <= self.now_ms:
            self._apply(self.shard.tick(self.now_ms))
            deadline_ms = self.shard.next_deadline_ms()

    def _apply(self, work: GroupResult) -> None:
        for key, value in work.records:
            self._replay(Entry(None if work.producer is None else work.producer.id, key, value))

    def _replay(self, entry: Entry) -> None:
        self.log.append(entry)
        replay(self.shard, entry)


def replay(shard: GroupCoordinatorShard, entry: Entry) -> None:
    if entry.key is None:
        assert entry.producer is not None
        shard.transaction_ended(entry.producer, bool(entry.value))
        return
    assert not isinstance(entry.value, bool)
    if entry.producer is None:
        shard.replay(entry.key, entry.value)
    else:
        shard.replay_pending(entry.producer, entry.key, entry.value)


def loaded(log: Log) -> GroupCoordinatorShard:
    shard = GroupCoordinatorShard(SETTINGS)
    for entry in log:
        replay(shard, entry)
    return shard


def place_of(entry: Entry) -> OffsetKey | None:
    if entry.key is None:
        return None
    assert not isinstance(entry.value, bool)
    record = decode_record(entry.key, entry.value)
    return (
        OffsetKey(record.group, record.topic, record.partition)
        if isinstance(record, OffsetCommitRecord)
        else None
    )


def outcome(log: Log, position: int) -> bool | None:
    """Whether what stands here counts; None while its transaction is open."""
    entry = log[position]
    if entry.producer is None:
        return True
    ends = (later.value for later in log[position:] if later.key is None and later.producer == entry.producer)
    how = next(ends, None)
    return None if how is None else bool(how)


def committed_by_log(log: Log, place: OffsetKey) -> int | None:
    """The last that counts, by the place in the log alone."""
    for position in reversed(range(len(log))):
        entry = log[position]
        if place_of(entry) == place and outcome(log, position):
            return number(entry)
        if place_of(entry) == place and entry.value is None:
            return None
    return None


def number(entry: Entry) -> int | None:
    if entry.value is None:
        return None
    assert entry.key is not None
    assert isinstance(entry.value, bytes)
    record = decode_record(entry.key, entry.value)
    assert isinstance(record, OffsetCommitRecord)
    assert record.value is not None
    return record.value.offset


def unstable_by_log(log: Log, place: OffsetKey) -> bool:
    mine = [position for position, entry in enumerate(log) if place_of(entry) == place]
    deleted = max((position for position in mine if log[position].value is None), default=-1)
    return any(outcome(log, position) is None for position in mine if position > deleted)


def compacted(log: Log, *, keeps_tombstones: bool) -> Log:
    """What a cleaner leaves: below the first open transaction, the last of each key that was not aborted."""
    opened = (
        position for position in range(len(log)) if log[position].key and outcome(log, position) is None
    )
    bound = next(opened, len(log))
    last = {
        entry.key: position
        for position, entry in enumerate(log[:bound])
        if entry.key is not None and outcome(log, position)
    }
    kept = []
    for position, entry in enumerate(log):
        is_last = entry.key is None or last.get(entry.key) == position
        is_tombstone = entry.key is not None and entry.value is None
        if position >= bound or (is_last and (keeps_tombstones or not is_tombstone)):
            kept.append(entry)
    return kept


def committed(shard: GroupCoordinatorShard, place: OffsetKey) -> int | None:
    (fetched,) = shard.fetch(place.group, [(place.topic, place.partition)])
    return None if fetched.committed is None else fetched.committed.offset


def is_unstable(shard: GroupCoordinatorShard, place: OffsetKey) -> bool:
    (fetched,) = shard.fetch(place.group, [(place.topic, place.partition)], require_stable=True)
    return fetched.is_unstable


places = st.sampled_from(PLACES)
producers = st.sampled_from(PRODUCERS)
#: Most of what can go wrong is between a few commits to one place.
crowd = st.one_of(
    st.tuples(st.just("commit"), st.just(PLACES[0]), st.sampled_from((None, 7, 8))),
    st.tuples(st.just("end"), st.sampled_from((7, 8)), st.booleans()),
)
operations = st.one_of(
    crowd,
    crowd,
    st.tuples(st.just("commit"), places, st.one_of(st.none(), producers)),
    st.tuples(st.just("commit"), places, producers),
    st.tuples(st.just("end"), producers, st.booleans()),
    st.tuples(st.just("delete"), places),
    st.tuples(st.just("delete_group"), places),
    st.tuples(st.just("forget_topic"), places),
    st.tuples(st.just("wait"), st.sampled_from((10_000, 60_000))),
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.lists(crowd, max_size=12), st.lists(operations, max_size=40)))
def test_the_last_commit_in_the_log_counts(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        for place in PLACES:
            assert committed(world.shard, place) == committed_by_log(world.log, place)
            assert is_unstable(world.shard, place) == unstable_by_log(world.log, place)
            has_offset = committed(world.shard, place) is not None or is_unstable(world.shard, place)
            assert not has_offset or place.group in world.shard.groups


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=40), st.data())
def test_a_shard_loaded_from_any_prefix_is_what_it_was_then(
    steps: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    prefix = world.log[: data.draw(st.integers(0, len(world.log)))]
    shard = loaded(prefix)
    for place in PLACES:
        assert committed(shard, place) == committed_by_log(prefix, place)
        assert is_unstable(shard, place) == unstable_by_log(prefix, place)
    for keeps_tombstones in (True, False):
        cleaned = loaded(compacted(prefix, keeps_tombstones=keeps_tombstones))
        assert cleaned.stored() == shard.stored()
        assert cleaned.offsets.staged().keys() == shard.offsets.staged().keys()


@settings(max_examples=100, deadline=None)
@given(st.lists(operations, max_size=40))
def test_nothing_is_left_of_transactions_that_have_ended(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    for producer in PRODUCERS:
        world.end(producer, committed=False)
    assert world.shard.offsets.staged() == {}
    assert loaded(world.log).stored() == world.shard.stored()
    world.wait(200_000)
    assert world.shard.groups == {}, "and then everything expires"
