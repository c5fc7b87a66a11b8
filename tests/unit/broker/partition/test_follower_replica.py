"""One follower replica: what each reply of the leader does to its log."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.partition.follower_world import NOW_MS, Follower, Leader, batch_of
from tests.unit.log.helpers import read_batches

from penstock.broker.partition.follower_replica import FetchOutcome
from penstock.log.log import Log
from penstock.log.segment import LogOffsetMetadata
from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import ReplicaPartitionData


@pytest.fixture
async def follower(tmp_path: Path) -> AsyncIterator[Follower]:
    node = Follower(tmp_path)
    yield node
    await node.close()


@pytest.fixture
async def leader(tmp_path: Path) -> Leader:
    return Leader(tmp_path)


def fetched(log: Log, offset: int, **changes: Any) -> ReplicaPartitionData:
    records = memoryview(bytes(log.read(offset, 1 << 20, log.end).data))
    answer = ReplicaPartitionData(b"", 0, 0, log.end_offset, log.start_offset, records)
    return answer._replace(**changes)


def contents(log: Log) -> list[bytes]:
    return [batch for _, batch in read_batches(log)]


def write(log: Log, *values: bytes, epoch: int = 1) -> None:
    log.append(batch_of(*values), leader_epoch=epoch, now_ms=NOW_MS)


async def test_batches_are_kept_byte_for_byte_and_the_high_watermark_follows(
    follower: Follower, leader: Leader
) -> None:
    leader.write(b"a", b"b")
    leader.write(b"c", epoch=3)
    partition = follower.partition()
    one = follower.replica(partition)
    assert await one.apply(one.position(), fetched(leader.log(), 0)) is FetchOutcome.MOVED
    assert contents(partition.log) == contents(leader.log())
    assert partition.log.epochs.entries() == [(1, 0), (3, 2)]
    assert (partition.high.offset, one.lag_records) == (3, 0)
    assert one.position() == (3, 1, 3, 0)


async def test_nothing_is_confirmed_before_it_is_synced(follower: Follower, leader: Leader) -> None:
    leader.write(b"a", b"b")
    partition = follower.partition(flush="ack")
    one = follower.replica(partition)
    applying = asyncio.ensure_future(one.apply(one.position(), fetched(leader.log(), 0)))
    await partition.sync_wanted()
    assert (partition.log.end_offset, partition.high.offset, one.position().offset) == (2, 0, 0)
    partition.sync_now()
    assert await applying is FetchOutcome.MOVED
    assert (partition.high.offset, one.position().offset) == (2, 2)


async def test_an_answer_to_another_question_leads_to_the_next_once_the_log_is_durable(
    follower: Follower, leader: Leader
) -> None:
    leader.write(b"a")
    partition = follower.partition(flush="ack")
    one = follower.replica(partition)
    asked = one.position()
    write(partition.log, b"own")
    applying = asyncio.ensure_future(one.apply(asked, fetched(leader.log(), 0)))
    await partition.sync_wanted()
    assert partition.log.end_offset == 1
    partition.sync_now()
    assert await applying is FetchOutcome.MOVED
    assert one.position().offset == 1


async def test_a_damaged_batch_is_never_kept(follower: Follower, leader: Leader) -> None:
    leader.write(b"good")
    leader.write(b"spoilt")
    answer = fetched(leader.log(), 0)
    spoilt = bytearray(answer.records)
    spoilt[-1] ^= 1
    partition = follower.partition()
    one = follower.replica(partition)
    assert (
        await one.apply(one.position(), answer._replace(records=memoryview(spoilt))) is FetchOutcome.BACKOFF
    )
    assert contents(partition.log) == contents(leader.log())[:1]
    assert partition.high.offset == 1
    assert await one.apply(one.position(), fetched(leader.log(), 1)) is FetchOutcome.MOVED
    assert contents(partition.log) == contents(leader.log())


async def test_bytes_that_are_no_batch_are_no_reason_to_ask_in_circles(follower: Follower) -> None:
    partition = follower.partition()
    one = follower.replica(partition)
    half = ReplicaPartitionData(b"", 0, 0, 5, 0, memoryview(bytes(batch_of(b"a")[:-3])))
    assert await one.apply(one.position(), half) is FetchOutcome.BACKOFF


async def test_a_history_that_parts_is_cut_and_fetched_again(follower: Follower, leader: Leader) -> None:
    leader.write(b"a")
    leader.write(b"b", epoch=3)
    partition = follower.partition()
    write(partition.log, b"a")
    write(partition.log, b"x", epoch=2)
    write(partition.log, b"y", epoch=2)
    partition.high = LogOffsetMetadata(1, -1, -1)
    one = follower.replica(partition)
    parted = fetched(leader.log(), 1, records=memoryview(b""), diverging_epoch=(1, 1))
    assert await one.apply(one.position(), parted) is FetchOutcome.MOVED
    assert (partition.log.end_offset, partition.high.offset, one.records_lost) == (1, 1, 0)
    assert follower.heard_of_truncation == [partition]
    assert await one.apply(one.position(), fetched(leader.log(), 1)) is FetchOutcome.MOVED
    assert contents(partition.log) == contents(leader.log())


async def test_what_is_given_up_below_the_high_watermark_is_counted(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    partition = follower.partition()
    for value in (b"a", b"b", b"c"):
        write(partition.log, value)
    partition.high = LogOffsetMetadata(3, -1, -1)
    one = follower.replica(partition)
    parted = ReplicaPartitionData(b"", 0, 0, 0, 0, memoryview(b""), diverging_epoch=(1, 1))
    assert await one.apply(one.position(), parted) is FetchOutcome.MOVED
    assert (one.records_lost, partition.high.offset) == (2, 1)
    assert "log truncated below its high watermark" in caplog.text


async def test_a_follower_that_is_too_far_behind_restarts_at_the_leaders_log_start(
    follower: Follower, leader: Leader
) -> None:
    for value in (b"a", b"b", b"c"):
        leader.write(value)
    leader.log().delete_records_before(2)
    partition = follower.partition()
    write(partition.log, b"a")
    one = follower.replica(partition)
    out = ReplicaPartitionData(b"", 0, ErrorCode.offset_out_of_range.value, 3, 2, memoryview(b""))
    assert await one.apply(one.position(), out) is FetchOutcome.MOVED
    assert (partition.log.start_offset, partition.log.end_offset) == (2, 2)
    assert await one.apply(one.position(), fetched(leader.log(), 2)) is FetchOutcome.MOVED
    assert contents(partition.log) == contents(leader.log())


async def test_a_start_in_the_middle_of_a_batch_is_followed(follower: Follower, leader: Leader) -> None:
    leader.write(b"a", b"b", b"c", b"d")
    leader.log().delete_records_before(2)
    partition = follower.partition()
    one = follower.replica(partition)
    out = ReplicaPartitionData(b"", 0, ErrorCode.offset_out_of_range.value, 4, 2, memoryview(b""))
    await one.apply(one.position(), out)
    assert await one.apply(one.position(), fetched(leader.log(), 2)) is FetchOutcome.MOVED
    assert contents(partition.log) == contents(leader.log())
    assert (partition.log.start_offset, partition.log.end_offset) == (2, 4)


async def test_the_start_follows_the_leaders(follower: Follower, leader: Leader) -> None:
    leader.write(b"a")
    leader.write(b"b")
    partition = follower.partition()
    one = follower.replica(partition)
    await one.apply(one.position(), fetched(leader.log(), 0))
    leader.log().delete_records_before(1)
    assert (
        await one.apply(one.position(), fetched(leader.log(), 2)) is FetchOutcome.MOVED
    )  # the leader is told
    assert partition.log.start_offset == 1
    assert await one.apply(one.position(), fetched(leader.log(), 2)) is FetchOutcome.UNCHANGED


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ErrorCode.fenced_leader_epoch, FetchOutcome.REFRESH),
        (ErrorCode.kafka_storage_error, FetchOutcome.BACKOFF),
        (ErrorCode.offset_out_of_range, FetchOutcome.BACKOFF),
    ],
)
async def test_errors_change_nothing(follower: Follower, error: ErrorCode, outcome: FetchOutcome) -> None:
    partition = follower.partition()
    write(partition.log, b"a")
    one = follower.replica(partition)
    assert (
        await one.apply(one.position(), ReplicaPartitionData(b"", 0, error.value, -1, -1, memoryview(b"")))
        is outcome
    )
    assert partition.log.end_offset == 1


async def test_an_error_of_the_future_is_an_error(follower: Follower) -> None:
    one = follower.replica(follower.partition())
    assert (
        await one.apply(one.position(), ReplicaPartitionData(b"", 0, 9999, -1, -1, memoryview(b"")))
        is FetchOutcome.BACKOFF
    )


async def test_who_is_stopped_appends_nothing_more(follower: Follower, leader: Leader) -> None:
    leader.write(b"a")
    partition = follower.partition()
    one = follower.replica(partition)
    assert one.stop().done()
    assert await one.apply(one.position(), fetched(leader.log(), 0)) is FetchOutcome.STOPPED
    assert partition.log.end_offset == 0


async def test_who_is_stopped_while_it_syncs_waits_no_longer(follower: Follower, leader: Leader) -> None:
    leader.write(b"a")
    partition = follower.partition(flush="ack")
    one = follower.replica(partition)
    applying = asyncio.ensure_future(one.apply(one.position(), fetched(leader.log(), 0)))
    await partition.sync_wanted()
    assert one.stop().done()
    assert await applying is FetchOutcome.STOPPED
    assert partition.high.offset == 0


async def test_a_truncation_under_way_is_waited_for(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_cut, truncate = threading.Event(), follower.store.truncate

    def slowly(*args: Any, **options: Any) -> None:
        may_cut.wait()
        truncate(*args, **options)

    monkeypatch.setattr(follower.store, "truncate", slowly)
    partition = follower.partition()
    write(partition.log, b"a")
    write(partition.log, b"b")
    one = follower.replica(partition)
    parted = ReplicaPartitionData(b"", 0, 0, 0, 0, memoryview(b""), diverging_epoch=(1, 1))
    cutting = asyncio.ensure_future(one.apply(one.position(), parted))
    await asyncio.sleep(0)
    idle = one.stop()
    assert one.is_truncating
    assert not idle.done()
    may_cut.set()
    await idle
    assert await cutting is FetchOutcome.STOPPED
    assert partition.log.end_offset == 1
