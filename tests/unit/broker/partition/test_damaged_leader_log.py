"""Damage in a leader's log that only followers notice: they fetch again, and the leader checks its log."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.unit.broker.partition.one_broker import ME, OTHER, PEER, Broker, broker_of_three, turn
from tests.unit.broker.raw_client import until

from penstock.broker.partition.partition import ReplicaRole
from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import DEBUGGING_REPLICA_ID
from penstock.protocol.record_batch import ATTRIBUTES_OFFSET, BATCH_HEADER_BYTES, iter_batches

BATCHES = 6
CRC_AT = ATTRIBUTES_OFFSET - 4


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_of_three(tmp_path) as broker:
        yield broker


async def _written(broker: Broker, **state: object) -> None:
    """Records that everyone who is in sync has."""
    await broker.create(**state)
    for _ in range(BATCHES):
        broker.produce(bytes(100), acks=1)
    for replica in (PEER, OTHER):
        broker.fetch({0: BATCHES}, replica=replica)


def _flip(broker: Broker, batch: int, place: int) -> None:
    """One byte of a batch, counted from its start."""
    (segment,) = broker.partition().log.segments
    at = segment.size // BATCHES * batch + place
    with open(segment.path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


async def _fetch(broker: Broker, offset: int, *, times: int = 1, replica: int = PEER) -> None:
    for _ in range(times):
        await broker.fetch({0: offset}, replica=replica).done()
    while broker.environment.tasks:
        await asyncio.wait(broker.environment.tasks)


@pytest.mark.parametrize(
    "place", [BATCH_HEADER_BYTES + 50, CRC_AT, ATTRIBUTES_OFFSET], ids=["value", "checksum", "attributes"]
)
async def test_a_leader_with_a_damaged_log_resigns_and_fetches_it_again(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    await _written(broker)
    _flip(broker, 3, place)
    await _fetch(broker, 3, times=2)
    assert broker.controller.lost == [], "an answer may get lost"
    await _fetch(broker, 3)
    await until(lambda: broker.controller.lost)
    assert broker.controller.lost == [{("t", 0)}]
    (told,) = [record for record in caplog.records if record.message == "replica lost"]
    assert "offset 3" in told.reason  # type: ignore[attr-defined]
    assert (broker.partition().role, broker.partition().log.end_offset) == (ReplicaRole.LEADER, BATCHES)
    await broker.change(leader=PEER, isr=(PEER, OTHER))
    assert (broker.partition().role, broker.partition().log.end_offset) == (ReplicaRole.FOLLOWER, 0)
    assert len(list((tmp_path / "data").glob("t-0.*-stray"))) == 1, "an operator may look at it"


@pytest.mark.parametrize(
    ("isr", "elr", "leads"),
    [((ME, OTHER), (), False), ((ME,), (PEER,), False), ((ME,), (), True)],
    ids=["in sync", "eligible", "only copy"],
)
async def test_a_log_with_a_later_leader_epoch_does_not_lead_if_there_is_another_copy(
    broker: Broker, isr: tuple[int, ...], elr: tuple[int, ...], leads: bool
) -> None:
    """As recovery leaves it if a bit of the leader epoch in the very last batch has flipped."""
    await _written(broker)
    await broker.change(leader=PEER)
    broker.partition().log.epochs.assign(1 << 27, BATCHES - 1)
    await broker.change(leader=ME, isr=isr, eligible_leader_replicas=elr)
    assert broker.partition().is_leader is leads
    await turn()
    assert broker.controller.lost == ([] if leads else [{("t", 0)}])
    assert broker.partition().log.end_offset == BATCHES


async def test_the_count_outlives_the_followers_session(broker: Broker) -> None:
    """One that rests after a refusal takes the partition out of its session, and asks for others meanwhile."""
    await _written(broker, partitions=2)
    (segment,) = broker.partition().log.segments
    _flip(broker, 0, segment.size // BATCHES - 1)
    for round_ in range(3):
        answer = (await broker.fetch({0: 0, 1: 0}, replica=PEER).done()).answer
        assert answer.session_id, round_
        await broker.fetch({1: 0}, replica=PEER).done()
    await until(lambda: broker.controller.lost)


@pytest.mark.parametrize(
    ("reader", "offsets"),
    [
        (PEER, [3, 3, 4, 3, 3]),  # one that gets on in between
        (PEER, [0] * 9),  # of a sound log
        (-1, [3] * 9),  # a consumer may read as often as it likes
        (PEER, [BATCHES] * 9),  # nothing to serve
    ],
    ids=["gets on", "sound", "consumer", "nothing served"],
)
async def test_who_asks_twice_is_not_suspected(broker: Broker, reader: int, offsets: list[int]) -> None:
    await _written(broker)
    if offsets != [0] * 9:
        _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    for offset in offsets:
        await _fetch(broker, offset, replica=reader)
    assert (broker.controller.lost, len(broker.partitions.lost)) == ([], 0)


async def test_followers_are_counted_each_for_itself(broker: Broker) -> None:
    await _written(broker)
    _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    for replica in (PEER, OTHER, PEER, OTHER):
        await _fetch(broker, 3, replica=replica)
    assert broker.controller.lost == []
    await _fetch(broker, 3, replica=OTHER)
    await until(lambda: broker.controller.lost)


async def test_the_last_copy_in_sync_stays_and_its_damage_is_told_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await _written(broker, isr=(ME,))
    _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    await _fetch(broker, 3, times=9)
    assert (broker.controller.lost, len(broker.partitions.lost)) == ([], 0)
    (told,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert told.damage.startswith("offsets 3 to 3,")  # type: ignore[attr-defined]
    assert [damage.start_offset for damage in broker.partition().log.damages] == [3]
    await broker.change(isr=(ME, OTHER))
    await _fetch(broker, 3, times=3)
    await until(lambda: broker.controller.lost)


async def test_a_node_that_reads_for_itself_gets_only_what_is_verified(broker: Broker) -> None:
    await _written(broker)
    _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    reader = DEBUGGING_REPLICA_ID
    consumed = (await broker.fetch({0: 3}).done()).fetched[0]
    assert (consumed.error_code, broker.controller.lost) == (ErrorCode.none, [])
    got = (await broker.fetch({0: 1}, replica=reader).done()).fetched[0]
    assert [header.base_offset for header, _ in iter_batches(got.records)] == [1, 2]
    refused = (await broker.fetch({0: 3}, replica=reader).done()).fetched[0]
    assert refused.error_code is ErrorCode.kafka_storage_error, "another replica has the records"
    await until(lambda: broker.controller.lost)
    assert broker.partition().log.damages == ()


async def test_a_node_that_reads_for_itself_learns_what_the_only_copy_lacks(broker: Broker) -> None:
    await _written(broker, isr=(ME,))
    _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    _flip(broker, 3, 8)  # the length, so that nothing behind it can be reached before the survey

    async def refused_with(offset: int) -> ErrorCode:
        answer = await broker.fetch({0: offset}, replica=DEBUGGING_REPLICA_ID).done()
        code: ErrorCode = answer.fetched[0].error_code
        return code

    assert await refused_with(4) is ErrorCode.kafka_storage_error, "it may be intact, and it is"
    await until(lambda: broker.partition().log.damages)
    assert [await refused_with(offset) for offset in (2, 3, 4)] == [
        ErrorCode.none,
        ErrorCode.corrupt_message,
        ErrorCode.none,
    ]
    assert (broker.controller.lost, len(broker.partitions.lost)) == ([], 0)
    await broker.change(eligible_leader_replicas=(OTHER,))
    assert await refused_with(3) is ErrorCode.kafka_storage_error, "when it comes back, it has the records"
    await broker.change(isr=(ME, OTHER), eligible_leader_replicas=())
    assert await refused_with(3) is ErrorCode.kafka_storage_error
    await until(lambda: broker.controller.lost)


async def test_a_log_that_is_closed_while_it_is_read_is_not_called_damaged(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _written(broker)
    _flip(broker, 3, BATCH_HEADER_BYTES + 50)
    in_thread: Callable[..., asyncio.Future[None]] = broker.environment.in_thread

    async def overtaken(*args: object) -> None:
        await broker.change(leader=PEER)
        await in_thread(*args)

    monkeypatch.setattr(broker.environment, "in_thread", overtaken)
    await _fetch(broker, 3, times=3)
    assert broker.partition().role is ReplicaRole.FOLLOWER
    assert (broker.controller.lost, len(broker.partitions.lost)) == ([], 0)
