"""The replica fetcher: sessions, backoff, new partitions, and the replication quota."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.unit.broker.partition.follower_world import NOW_MS, Follower, FollowerPartition, Leader, batch_of
from tests.unit.log.helpers import read_batches
from tests.waiting import eventually_async

from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager, ReplicationQuota
from penstock.log.log import Log
from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchRequest

TOPIC_ID = UUID(int=1000)


@pytest.fixture
async def follower(tmp_path: Path) -> AsyncIterator[Follower]:
    node = Follower(tmp_path)
    yield node
    await node.close()


@pytest.fixture
async def leader(follower: Follower, tmp_path: Path) -> Leader:
    leader = follower.leaders[1] = Leader(tmp_path / "one")
    return leader


@pytest.fixture
async def fetchers(follower: Follower) -> AsyncIterator[ReplicaFetcherManager]:
    fetchers = follower.fetchers()
    yield fetchers
    await fetchers.close()


def contents(log: Log) -> list[bytes]:
    return [batch for _, batch in read_batches(log)]


async def has(partition: FollowerPartition, leader: Leader) -> None:
    log = leader.log(partition.index, partition.topic_id)
    await until(lambda: partition.high.offset == log.end_offset)
    assert contents(partition.log) == contents(log)


async def until(check: Callable[[], bool]) -> None:
    async def checked() -> bool:
        return check()

    await eventually_async(checked)


def asked_for(request: FetchRequest) -> list[int]:
    return [asked.partition for _, partitions in request.topics for asked in partitions]


async def test_partitions_follow_their_leader(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partitions = [follower.partition(index) for index in range(3)]
    for index in range(3):
        leader.write(b"before", index=index)
    for partition in partitions:
        fetchers.follow(partition)
    for partition in partitions:
        await has(partition, leader)
    leader.write(b"after", b"that", index=1)
    await has(partitions[1], leader)
    assert fetchers.bytes_fetched == sum(leader.log(index).size_bytes for index in range(3))
    assert sorted(fetchers.lags()) == [("orders", index, 1, 0) for index in range(3)]


async def test_requests_tell_who_asks_and_only_what_has_changed(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    for index in range(60):
        leader.write(b"a", index=index)
        fetchers.follow(follower.partition(index))
    first, second = await leader.asked(1), await leader.asked(2)
    assert (first.replica_id, first.session_epoch, first.min_bytes) == (2, 0, 1)
    assert sorted(asked_for(first)) == list(range(60))
    assert (second.session_epoch, sorted(asked_for(second))) == (1, list(range(60)))
    leader.write(b"b", index=37)
    third = await leader.asked(3)
    assert (third.session_epoch, asked_for(third), third.forgotten) == (2, [37], [])
    assert third.topics[0][1][0].offset == 2


async def test_an_idle_round_asks_for_nothing_by_name(follower: Follower, leader: Leader) -> None:
    fetchers = follower.fetchers(replica_fetch_wait_max_ms="1")
    leader.log()
    fetchers.follow(follower.partition())
    later = await leader.asked(4)
    assert (later.topics, later.forgotten) == ([], [])
    await fetchers.close()


async def test_a_newcomer_does_not_wait_for_a_parked_request(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    leader.log()
    fetchers.follow(follower.partition())
    await leader.asked(2)  # parked for a minute, as there is no news
    leader.log(1).append(batch_of(b"unseen"), leader_epoch=1, now_ms=NOW_MS)
    newcomer = follower.partition(1)
    fetchers.follow(newcomer)
    await until(lambda: newcomer.log.end_offset == 1)
    assert leader.given_up >= 1
    assert all(request.session_epoch > 0 for request in leader.requests[1:]), "the session went on"


async def test_after_a_request_was_given_up_what_is_not_known_to_be_committed_is_asked_for_again(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    """Its answer may have been on its way, with a high watermark that a leader tells once."""
    leader.log(0).append(batch_of(b"not committed"), leader_epoch=1, now_ms=NOW_MS)
    leader.write(b"committed", index=1)
    leader.log(2)
    for index in range(2):
        fetchers.follow(follower.partition(index))
    await until(lambda: leader.session and all(asked.offset == 1 for asked in leader.session.values()))
    await until(lambda: leader.waiting == 1)
    fetchers.follow(follower.partition(2))
    await until(lambda: (TOPIC_ID.bytes, 2) in leader.session)
    asked = [{part.partition for _, parts in request.topics for part in parts} for request in leader.requests]
    assert next(indexes for indexes in asked if 2 in indexes) == {0, 2}


async def test_who_is_no_longer_followed_is_forgotten(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    one, other = follower.partition(0), follower.partition(1)
    leader.log(0), leader.log(1)
    fetchers.follow(one)
    fetchers.follow(other)
    await leader.asked(1)
    await fetchers.unfollow(one)
    leader.write(b"b", index=1)
    await has(other, leader)
    await until(lambda: set(leader.session) == {(TOPIC_ID.bytes, 1)})
    leader.write(b"a", index=0)
    leader.write(b"c", index=1)
    await has(other, leader)
    assert one.log.end_offset == 0


async def test_a_leader_of_nothing_is_fetched_from_no_more(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    leader.log()
    partition = follower.partition()
    fetchers.follow(partition)
    await leader.asked(1)
    await fetchers.unfollow(partition)
    await until(lambda: not follower.environment.tasks)


async def test_a_lost_fetch_session_is_created_again(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partition = follower.partition()
    leader.write(b"a")
    fetchers.follow(partition)
    await has(partition, leader)
    leader.forget_session()
    leader.write(b"b")
    await has(partition, leader)
    assert [request.session_epoch for request in leader.requests].count(0) == 2


async def test_a_leader_that_is_not_there_is_tried_again(
    fetchers: ReplicaFetcherManager, follower: Follower, tmp_path: Path
) -> None:
    partition = follower.partition()
    fetchers.follow(partition)
    await asyncio.sleep(0)
    leader = follower.leaders[1] = Leader(tmp_path / "late")
    leader.write(b"a")
    fetchers.brokers_changed([1, 9])
    await has(partition, leader)


async def only_second_is_fetched(
    fetchers: ReplicaFetcherManager, leader: Leader, first: Any, second: Any
) -> None:
    leader.write(b"a", index=0)
    leader.write(b"a", index=1)
    fetchers.follow(first)
    fetchers.follow(second)
    await has(second, leader)
    leader.write(b"b", index=1)
    await has(second, leader)
    assert first.log.end_offset == 0


async def test_a_partition_that_fails_rests_alone(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    bad, good = follower.partition(0), follower.partition(1)
    leader.errors[TOPIC_ID.bytes, 0] = ErrorCode.kafka_storage_error
    await only_second_is_fetched(fetchers, leader, bad, good)
    assert any(request.forgotten == [(TOPIC_ID.bytes, [0])] for request in leader.requests)
    leader.errors.clear()
    await has(bad, leader)


async def test_a_new_epoch_of_the_same_leader_is_asked_for(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partition = follower.partition()
    leader.write(b"a")
    fetchers.follow(partition)
    await has(partition, leader)
    leader.epoch = partition.leader_epoch = 2
    fetchers.follow(partition)
    leader.write(b"b", epoch=2)
    await has(partition, leader)
    assert leader.session[TOPIC_ID.bytes, 0].leader_epoch == 2


async def test_an_image_that_is_behind_is_waited_for(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partition = follower.partition()
    partition.leader_epoch = 2
    leader.write(b"a")
    fetchers.follow(partition)
    await leader.asked(3)
    assert partition.log.end_offset == 0
    leader.epoch = 2
    await has(partition, leader)


async def test_another_leader_is_followed_and_the_parted_history_cut(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader, tmp_path: Path
) -> None:
    partition = follower.partition()
    leader.write(b"a")
    fetchers.follow(partition)
    await has(partition, leader)
    other = follower.leaders[3] = Leader(tmp_path / "three")
    other.log().append_replicated(memoryview(contents(leader.log())[0]), now_ms=NOW_MS)
    other.write(b"other b", epoch=2)
    leader.high.clear()  # from here on the old leader commits nothing
    leader.log().append(batch_of(b"b"), leader_epoch=1, now_ms=NOW_MS)
    leader.log().append(batch_of(b"c"), leader_epoch=1, now_ms=NOW_MS)
    leader._news.set()
    await until(lambda: partition.log.end_offset == 3)
    other.epoch = partition.leader_epoch = 2
    partition.leader_id = 3
    fetchers.follow(partition)
    await has(partition, other)
    assert (fetchers.truncations, fetchers.records_lost) == (1, 0)
    assert follower.heard_of_truncation == [partition]


async def test_a_former_leader_syncs_before_it_asks(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partition = follower.partition(flush="ack")
    partition.log.append(batch_of(b"a"), leader_epoch=1, now_ms=NOW_MS)
    leader.log().append_replicated(memoryview(contents(partition.log)[0]), now_ms=NOW_MS)
    leader.high[TOPIC_ID.bytes, 0] = 1
    fetchers.follow(partition)
    await partition.sync_wanted()
    assert leader.requests == []
    partition.sync_now()
    request = await leader.asked(1)
    assert request.topics[0][1][0].offset == 1


async def test_rounds_wait_for_syncs_of_all_partitions_together(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    partitions = [follower.partition(index, flush="ack") for index in range(3)]
    for partition in partitions:
        leader.write(b"a", index=partition.index)
        fetchers.follow(partition)
    for partition in partitions:
        await partition.sync_wanted()
    assert len(leader.requests) == 1
    for partition in partitions:
        partition.sync_now()
    await leader.asked(2)
    for partition in partitions:
        await has(partition, leader)


async def test_closing_stops_everything(follower: Follower, leader: Leader) -> None:
    fetchers = follower.fetchers()
    partition = follower.partition()
    leader.log()
    fetchers.follow(partition)
    await leader.asked(1)
    await fetchers.close()
    await until(lambda: not follower.environment.tasks)
    leader.write(b"a")
    assert partition.log.end_offset == 0


# -- bandwidth ---------------------------------------------------------------------------------------


def test_the_bucket_fills_at_its_rate_and_debts_are_waited_off() -> None:
    now, limit = [0.0], [1000]
    bucket = ReplicationQuota(lambda: limit[0], lambda: now[0])
    assert bucket.is_limited
    assert bucket.left()[0] == 1000
    bucket.take(1500)
    left, wait_seconds = bucket.left()
    assert (left, wait_seconds) == (-500, pytest.approx(0.501))
    now[0] += 0.6
    assert bucket.left()[0] == 100
    now[0] += 60
    assert bucket.left()[0] == 1000
    limit[0] = -1
    assert not bucket.is_limited


def test_a_limit_of_nothing_moves_nothing() -> None:
    bucket = ReplicationQuota(lambda: 0, lambda: 0.0)
    assert bucket.is_limited
    assert bucket.left() == (0, 1.0)


async def test_only_what_is_being_moved_here_is_held_back(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers, "_limit", lambda: 0)
    fetchers.bandwidth = ReplicationQuota(lambda: 0, asyncio.get_running_loop().time)
    moving, steady = follower.partition(0), follower.partition(1)
    moving.is_being_moved_here = True
    await only_second_is_fetched(fetchers, leader, moving, steady)
    fetchers.bandwidth = ReplicationQuota(lambda: 1 << 20, asyncio.get_running_loop().time)
    fetchers.brokers_changed([1])
    leader.write(b"c", index=1)
    await has(moving, leader)
    assert fetchers.bytes_moved == leader.log(0).size_bytes


async def test_a_throttle_holds_back_what_it_names_until_it_is_in_sync(
    fetchers: ReplicaFetcherManager, follower: Follower, leader: Leader
) -> None:
    follower.configure("follower.replication.throttled.rate", 0)
    throttled, in_sync, free = (follower.partition(index) for index in range(3))
    throttled.is_follower_throttled = in_sync.is_follower_throttled = in_sync.is_in_sync = True
    for index, partition in enumerate((throttled, in_sync, free)):
        leader.write(b"a", index=index)
        fetchers.follow(partition)
    await has(in_sync, leader)
    await has(free, leader)
    assert throttled.log.end_offset == 0
    follower.configure("follower.replication.throttled.rate", 1 << 20)
    fetchers.brokers_changed([1])
    await has(throttled, leader)
    assert fetchers.bytes_moved == 0, "none of them is being moved"


async def test_the_limit_is_read_from_the_image(fetchers: ReplicaFetcherManager, follower: Follower) -> None:
    assert fetchers._limit() == -1
    follower.configure("penstock.reassignment.bytes.per.second", 5000)
    assert fetchers._limit() == 5000
