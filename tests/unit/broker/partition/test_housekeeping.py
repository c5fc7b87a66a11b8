"""Expiration of sessions and state on a node, also when the clock is set."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.partition.one_broker import ME, PEER, Broker, broker_of_three

from penstock.broker.partition.housekeeping import Housekeeping, ProducerExpiryClock
from penstock.protocol.record_batch import Record, encode_batch

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Clocks:
    """One that tells the time and may be set, and one that only runs."""

    def __init__(self, wall_ms: int) -> None:
        self.wall_ms, self.monotonic_ms = wall_ms, 5000

    def passes(self, ms: int) -> None:
        self.wall_ms += ms
        self.monotonic_ms += ms

    def idle_clock(self) -> ProducerExpiryClock:
        return ProducerExpiryClock(lambda: self.wall_ms, lambda: self.monotonic_ms)


def _append(broker: Broker, producer_id: int) -> None:
    batch = encode_batch(
        [Record(0, 1, None, b"x")], producer_id=producer_id, producer_epoch=0, base_sequence=0
    )
    broker.partition().append(memoryview(batch), broker.now_ms())


def _keeping(broker: Broker, clocks: Clocks) -> Housekeeping:
    broker.housekeeping._idle_clock = clocks.idle_clock()
    return broker.housekeeping


def _known(broker: Broker) -> list[int]:
    return sorted(broker.partition().log.producers.states)


async def test_a_clock_set_forward_does_not_make_producers_forgotten(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create()
        clocks = Clocks(broker.environment.clock_ms)
        keeping = _keeping(broker, clocks)
        _append(broker, 1)
        clocks.passes(HOUR_MS)
        clocks.wall_ms += 2 * DAY_MS
        broker.environment.clock_ms = clocks.wall_ms
        await keeping._expire()
        _append(broker, 2)
        assert _known(broker) == [1, 2]
        clocks.passes(DAY_MS)
        await keeping._expire()
        assert _known(broker) == [2], "those who have really been idle for that long"


async def test_a_log_that_is_being_cut_back_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create()
        clocks = Clocks(broker.environment.clock_ms)
        keeping = _keeping(broker, clocks)
        _append(broker, 1)
        await broker.change(leader=PEER)
        cut: list[Any] = [broker.partition()]
        monkeypatch.setattr(broker.fetchers, "is_truncating", lambda partition: partition in cut)
        clocks.passes(2 * DAY_MS)
        await keeping._expire()
        assert _known(broker) == [1]
        cut.clear()
        await keeping._expire()
        assert _known(broker) == []


async def test_retention_looks_at_all_logs_in_one_call_and_a_log_that_fails_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(partitions=4, replicas=(ME,), isr=(ME,), configs={"retention.ms": "1000"})
        partitions = [broker.partition(index) for index in range(4)]
        batch = encode_batch([Record(0, broker.now_ms() - 5000, None, b"x")])
        for partition in partitions[:3]:
            partition.append(memoryview(bytearray(batch)), broker.now_ms())
            assert partition.high_watermark == 1

        def fail(*_: object) -> None:
            raise OSError("unreadable index")

        monkeypatch.setattr(partitions[0].log, "expired_segments", fail)
        calls: list[str] = []
        in_thread = broker.environment.in_thread

        def counted(call: Any, *arguments: Any, **named: Any) -> Any:
            calls.append(call.__name__)
            return in_thread(call, *arguments, **named)

        monkeypatch.setattr(broker.environment, "in_thread", counted)
        await broker.housekeeping._retain()
        assert [each.log.start_offset for each in partitions] == [0, 1, 1, 0]
        assert calls.count("_with_expired_segments") == 1
        calls.clear()
        await broker.housekeeping._retain()
        assert calls == ["_with_expired_segments", "fail"], (
            "logs with nothing to delete cost no call of their own"
        )


def test_the_clock_follows_the_wall_clock_but_is_never_hurried() -> None:
    clocks = Clocks(100 * DAY_MS)
    clock = clocks.idle_clock()
    clocks.passes(HOUR_MS)
    assert clock.now_ms() == clocks.wall_ms
    clocks.wall_ms += DAY_MS
    clocks.passes(HOUR_MS)
    assert clock.now_ms() == 100 * DAY_MS + 2 * HOUR_MS
    clocks.wall_ms -= DAY_MS
    assert clock.now_ms() == clocks.wall_ms, "set right again"
    clocks.wall_ms -= DAY_MS
    assert clock.now_ms() == clocks.wall_ms, "what is written now is written as of yesterday"
    clocks.wall_ms += DAY_MS
    clocks.passes(HOUR_MS)
    assert clock.now_ms() == clocks.wall_ms - DAY_MS, "and is not a day old for that"
