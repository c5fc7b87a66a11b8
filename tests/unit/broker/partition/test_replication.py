"""Three brokers with real logs, leaders and fetchers, without sockets: no acknowledged record is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.partition.one_broker import (
    BROKER_EPOCH,
    LISTENER,
    ME,
    OTHER,
    PEER,
    TOPIC_ID,
    Broker,
    Controller,
    Pending,
    alter_partition_answer,
    registration,
)
from tests.unit.broker.partition.process_stubs import FetchedPeers
from tests.unit.broker.raw_client import until

from penstock.broker.handlers import delete_records, fetch
from penstock.broker.network.peers import PeerUnreachable
from penstock.broker.network.requests import RequestContext
from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager
from penstock.cluster.metadata_records import MetadataRecord, PartitionChangeRecord
from penstock.protocol.errors import ErrorCode


class Trio:
    """The controller that knows all three, and the wires between them."""

    def __init__(self, tmp_path: Path) -> None:
        self.cut_off: set[int] = set()
        self.missed: dict[int, list[MetadataRecord]] = {ME: [], PEER: [], OTHER: []}
        self.brokers = {broker: self._broker(tmp_path / str(broker), broker) for broker in (ME, PEER, OTHER)}
        self._turn = asyncio.Lock()

    def _broker(self, path: Path, broker_id: int) -> Broker:
        path.mkdir()
        broker = Broker(
            path,
            node_id=broker_id,
            controller=_SharedController(self),
            replica_fetch_wait_max_ms="50",
            replica_fetch_backoff_ms="5",
        )
        broker.fetchers = ReplicaFetcherManager(
            broker.environment,
            broker.settings,
            broker.dynamic,
            metadata=broker.metadata,
            peers=_Wires(self, broker_id),
            new_follower=broker.new_follower,
            broker_epoch=lambda: BROKER_EPOCH + broker_id,
        )
        broker.isr.start()
        return broker

    async def apply(self, *records: MetadataRecord) -> None:
        """Decided: those who can be reached follow at once, the others when they are back."""
        async with self._turn:
            for broker_id, broker in self.brokers.items():
                if broker_id in self.cut_off:
                    self.missed[broker_id] += records
                else:
                    await broker.apply(*records)

    async def decide(self, request: Any) -> Any:
        state = self.image_of_all.partition("t", 0)
        assert state is not None
        (asked,) = request.topics[0].partitions
        if request.broker_id in self.cut_off or asked.partition_epoch != state.partition_epoch:
            return alter_partition_answer(request, ErrorCode.invalid_update_version)
        isr = tuple(member.broker_id for member in asked.new_isr_with_epochs)
        await self.change(isr=isr)
        return alter_partition_answer(request)

    @property
    def image_of_all(self) -> Any:
        return next(
            broker.image for broker_id, broker in self.brokers.items() if broker_id not in self.cut_off
        )

    async def change(self, **changes: Any) -> None:
        await self.apply(PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, **changes))

    async def isolate(self, broker_id: int, successor: int) -> None:
        self.cut_off.add(broker_id)
        isr = tuple(set(self.brokers) - {broker_id})
        await self.change(leader=successor, isr=isr)

    async def heal(self, broker_id: int) -> None:
        async with self._turn:
            self.cut_off.discard(broker_id)
            records, self.missed[broker_id] = self.missed[broker_id], []
            await self.brokers[broker_id].apply(*records)

    def bytes_of(self, broker_id: int) -> bytes:
        log = self.brokers[broker_id].partition().log
        return log.read(0, 1 << 20, log.end).data

    async def in_sync(self) -> None:
        await until(lambda: len(self.image_of_all.partition("t", 0).isr) == 3)

    async def close(self) -> None:
        for broker in self.brokers.values():
            await broker.fetchers.close()
        for broker in self.brokers.values():
            await broker.close()


class _SharedController(Controller):
    def __init__(self, trio: Trio) -> None:
        super().__init__()
        self._trio = trio

    async def call(self, api_key: int, request: Any, timeout_s: float = 15.0) -> Any:
        return await self._trio.decide(request)


class _Wires(FetchedPeers):
    def __init__(self, trio: Trio, broker_id: int) -> None:
        self._trio = trio
        self._broker_id = broker_id

    async def fetch(
        self, where: int | tuple[str, int], body: Any, *, version: int, timeout_s: float, purpose: str = ""
    ) -> memoryview:
        assert isinstance(where, int)
        if {where, self._broker_id} & self._trio.cut_off:
            raise PeerUnreachable("cut off", refused=True)
        pending = Pending(1, version)
        ctx = RequestContext(self._trio.brokers[where], 1, version, "r", "h", LISTENER)  # type: ignore[arg-type]
        reply = fetch.handle(ctx, pending, memoryview(bytearray(body)), 0, 1)  # type: ignore[arg-type]
        if reply is not pending:
            pending.fulfil(pending, reply)
        await until(lambda: pending.is_done)
        if {where, self._broker_id} & self._trio.cut_off:
            raise PeerUnreachable("cut off", refused=True)
        return memoryview(pending.raw)[9:]


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    trio = Trio(tmp_path)
    for broker in trio.brokers.values():
        await broker.register(ME, PEER, OTHER)
        await broker.create(min_isr=2, configs={"penstock.flush": "ack"})
    yield trio
    await trio.close()


async def test_what_was_acknowledged_is_everywhere_and_what_was_not_gives_way(trio: Trio) -> None:
    acknowledged = [trio.brokers[ME].produce(b"first %d" % number) for number in range(20)]
    for write in acknowledged:
        assert (await write.done()).produced.error_code is ErrorCode.none
    await trio.isolate(ME, successor=PEER)
    lonely = trio.brokers[ME].produce(b"nobody else has this")
    later = [trio.brokers[PEER].produce(b"then %d" % number) for number in range(20)]
    for write in later:
        assert (await write.done()).produced.error_code is ErrorCode.none
    assert not lonely.is_done
    await trio.heal(ME)
    assert lonely.produced.error_code is ErrorCode.not_leader_or_follower
    await trio.in_sync()
    await until(lambda: trio.bytes_of(ME) == trio.bytes_of(PEER) == trio.bytes_of(OTHER))
    log = trio.bytes_of(ME)
    assert all(b"first %d" % number in log and b"then %d" % number in log for number in range(20))
    assert (b"nobody else has this" in log, trio.brokers[ME].partition().log.end_offset) == (False, 40)
    assert trio.brokers[ME].fetchers.truncations == 1


async def test_leadership_goes_around_under_load(trio: Trio) -> None:
    kept: list[bytes] = []
    for turn, (leader, successor) in enumerate(((ME, PEER), (PEER, OTHER), (OTHER, ME))):
        values = [b"turn %d record %d" % (turn, number) for number in range(10)]
        writes = [trio.brokers[leader].produce(value) for value in values]
        await writes[0].done()
        await trio.change(leader=successor)
        for value, write in zip(values, writes, strict=True):
            if (await write.done()).produced.error_code is ErrorCode.none:
                kept.append(value)
    last = trio.brokers[ME].produce(b"last")
    assert (await last.done()).produced.error_code is ErrorCode.none
    await until(lambda: trio.bytes_of(ME) == trio.bytes_of(PEER) == trio.bytes_of(OTHER))
    log = trio.bytes_of(ME)
    assert len(kept) >= 3
    assert all(value in log for value in kept)


async def test_followers_learn_the_high_watermark_and_start_from_it(trio: Trio) -> None:
    await trio.brokers[ME].produce().done()
    await until(lambda: all(broker.partition().high_watermark == 1 for broker in trio.brokers.values()))
    await trio.change(leader=OTHER)
    assert trio.brokers[OTHER].fetch({0: 0}).fetched[0].high_watermark == 1


async def test_below_min_insync_nothing_is_acknowledged_until_a_follower_is_back(trio: Trio) -> None:
    trio.cut_off |= {PEER, OTHER}
    await trio.apply(*(registration(broker, BROKER_EPOCH + broker, fenced=True) for broker in (PEER, OTHER)))
    await trio.change(isr=(ME,))
    assert trio.brokers[ME].produce().produced.error_code is ErrorCode.not_enough_replicas
    written = trio.brokers[ME].produce(b"kept", acks=1)
    assert written.produced.error_code is ErrorCode.none
    await trio.heal(PEER)
    await trio.apply(registration(PEER, BROKER_EPOCH + PEER))
    await until(lambda: trio.brokers[ME].partition().high_watermark == 1)
    assert (await trio.brokers[ME].produce().done()).produced.base_offset == 1


async def test_what_was_written_before_the_set_shrank_is_acknowledged_when_it_has_grown(trio: Trio) -> None:
    trio.cut_off |= {PEER, OTHER}
    written = trio.brokers[ME].produce(b"waits")
    await trio.apply(*(registration(broker, BROKER_EPOCH + broker, fenced=True) for broker in (PEER, OTHER)))
    await trio.change(isr=(ME,))
    partition = trio.brokers[ME].partition()
    await until(lambda: partition.durable_offset == 1)
    assert (written.is_done, partition.high_watermark) == (False, 0)
    await trio.heal(PEER)
    await trio.apply(registration(PEER, BROKER_EPOCH + PEER))
    assert (await written.done()).produced.error_code is ErrorCode.none


async def _delete_before(broker: Broker, offset: int, timeout_s: float = 60) -> Any:
    part = SimpleNamespace(partition_index=0, offset=offset)
    topics = (SimpleNamespace(name="t", partitions=(part,)),)
    request = SimpleNamespace(topics=topics, timeout=timedelta(seconds=timeout_s))
    ctx = RequestContext(broker, 21, 2, "c", "h", LISTENER)  # type: ignore[arg-type]
    return (await delete_records.handle(ctx, request)).topics[0].partitions[0]


async def test_deleted_records_stay_deleted_on_every_leader(trio: Trio) -> None:
    for _ in range(3):
        await trio.brokers[ME].produce().done()
    deleted = await _delete_before(trio.brokers[ME], 2)
    assert (deleted.error_code, deleted.low_watermark) == (ErrorCode.none, 2)
    assert [broker.partition().log.start_offset for broker in trio.brokers.values()] == [2, 2, 2]


async def test_a_follower_that_has_deleted_more_already_is_not_waited_for(trio: Trio) -> None:
    for _ in range(3):
        await trio.brokers[ME].produce().done()
    await until(lambda: all(broker.partition().high_watermark == 3 for broker in trio.brokers.values()))
    trio.brokers[PEER].partition().log.delete_records_before(2)
    assert (await _delete_before(trio.brokers[ME], 1)).error_code is ErrorCode.none


async def test_who_deletes_is_told_that_a_replica_does_not_follow(trio: Trio) -> None:
    await trio.brokers[ME].produce().done()
    await until(lambda: all(broker.partition().high_watermark == 1 for broker in trio.brokers.values()))
    trio.cut_off.add(OTHER)
    late = await _delete_before(trio.brokers[ME], 1, timeout_s=0.2)
    assert late.error_code is ErrorCode.request_timed_out
    await trio.apply(registration(OTHER, BROKER_EPOCH + OTHER, fenced=True))
    assert (await _delete_before(trio.brokers[ME], 1)).error_code is ErrorCode.none
