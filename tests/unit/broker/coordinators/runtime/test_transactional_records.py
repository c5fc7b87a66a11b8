"""Transactional records on the coordinator runtime: pending records, markers, and the same state after a reload."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.unit.broker.coordinators.runtime.test_runtime import Bench, Ledger, code_of, settle
from tests.unit.log.helpers import open_log

from penstock.broker.coordinators.runtime.runtime import Token
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.producer_state import VerificationGuard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker, decode_records, iter_batches


class Producer(NamedTuple):
    id: int
    epoch: int


class Work(NamedTuple):
    records: tuple[tuple[bytes, bytes | None], ...]
    replies: tuple[tuple[Any, object], ...]
    producer: Producer | None = None


class TransactionalLedger(Ledger):
    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[int, dict[bytes, bytes | None]] = {}
        self.transactional = self

    def replay_pending(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        self.pending.setdefault(producer_id, {})[key] = value

    def transaction_ended(self, producer_id: int, committed: bool) -> None:
        for key, value in self.pending.pop(producer_id, {}).items():
            if committed:
                self.replay(key, value)

    def put_pending(self, token: Token, producer: Producer, entries: dict[str, str]) -> Work:
        records = tuple((name.encode(), value.encode()) for name, value in entries.items())
        return Work(records, ((token, "pending"),), producer)


class TransactionBench(Bench):
    def _new_shard(self) -> TransactionalLedger:
        shard = TransactionalLedger()
        self.shards.append(shard)
        return shard

    @property
    def pending(self) -> dict[int, dict[bytes, bytes | None]]:
        assert isinstance(self.shard, TransactionalLedger)
        return self.shard.pending

    async def put_pending(
        self, producer: Producer, guard: VerificationGuard | None = None, **entries: str
    ) -> Any:
        return await self.runtime.write(
            0,
            lambda shard, token: shard.put_pending(token, producer, entries),  # type: ignore[attr-defined]
            guard,
        )

    async def end(
        self, producer: Producer, *, committed: bool, coordinator_epoch: int = 0, transaction_version: int = 0
    ) -> None:
        marker = EndMarker(producer.id, producer.epoch, coordinator_epoch, committed)
        await self.runtime.write_marker(0, marker, transaction_version)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "ledger-0", LogConfig(segment_bytes=4096))


@pytest.fixture
async def bench(log: Log) -> AsyncIterator[TransactionBench]:
    bench = TransactionBench(log)
    await bench.entries()
    yield bench
    bench.runtime.close()


ANNA, BERT = Producer(7, 2), Producer(8, 0)


async def through(bench: TransactionBench, work: Any) -> Any:
    task = bench.begin(work)
    await settle()
    bench.disk.commit()
    return await task


async def test_pending_records_are_one_transactional_batch_without_sequence(
    bench: TransactionBench, log: Log
) -> None:
    assert await through(bench, bench.put_pending(ANNA, a="1", b="2")) == "pending"
    ((header, batch),) = iter_batches(log.read(0, 1 << 20, log.end).data)
    assert header.is_transactional
    assert not header.is_control
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 2, -1)
    assert [record.key for record in decode_records(batch, 1 << 20)] == [b"a", b"b"]
    assert bench.pending == {7: {b"a": b"1", b"b": b"2"}}
    assert await bench.entries() == {}


@pytest.mark.parametrize("committed", [True, False])
async def test_a_marker_ends_a_transaction_once_it_is_committed(
    bench: TransactionBench, committed: bool
) -> None:
    await through(bench, bench.put_pending(ANNA, a="1"))
    end = bench.begin(bench.end(ANNA, committed=committed))
    read = bench.begin(bench.entries())
    await settle()
    assert not end.done()
    assert not read.done(), "it would reveal what is not committed"
    bench.disk.commit()
    await end
    assert await read == ({b"a": b"1"} if committed else {})
    assert bench.pending == {}


async def test_a_shard_loaded_from_the_log_is_the_same(bench: TransactionBench, log: Log) -> None:
    await through(bench, bench.put(a="0", c="0"))
    await through(bench, bench.put_pending(ANNA, a="1"))
    await through(bench, bench.put_pending(BERT, b="2"))
    await through(bench, bench.put(c="3"))
    await through(bench, bench.end(ANNA, committed=True))
    await through(bench, bench.put_pending(ANNA, a="4"))
    again = TransactionBench(log)
    assert await again.entries() == await bench.entries() == {b"a": b"1", b"c": b"3"}
    assert again.pending == bench.pending == {7: {b"a": b"4"}, 8: {b"b": b"2"}}


async def test_a_marker_that_cannot_be_written_leaves_the_transaction_open(bench: TransactionBench) -> None:
    await through(bench, bench.put_pending(ANNA, a="1"))
    bench.disk.refuses = ErrorCode.not_enough_replicas
    end = bench.begin(bench.end(ANNA, committed=True))
    await settle()
    assert code_of(end) is ErrorCode.coordinator_not_available
    bench.disk.refuses = None
    assert await bench.entries() == {}
    assert bench.pending == {7: {b"a": b"1"}}
    assert len(bench.shards) == 2


async def test_a_fenced_producer_is_refused_and_the_shard_lives_on(bench: TransactionBench) -> None:
    await through(bench, bench.put_pending(ANNA, a="1"))
    await through(bench, bench.end(ANNA._replace(epoch=3), committed=False))
    late = bench.begin(bench.put_pending(ANNA, a="2"))
    await settle()
    assert code_of(late) is ErrorCode.invalid_producer_epoch
    assert bench.pending == {}
    assert len(bench.shards) == 1, "nothing was appended, so nothing has to be loaded again"
    with pytest.raises(ApiError) as caught:
        await bench.end(ANNA, committed=True)
    assert caught.value.code is ErrorCode.invalid_producer_epoch


async def test_a_coordinator_of_an_older_epoch_ends_nothing(bench: TransactionBench) -> None:
    await through(bench, bench.put_pending(ANNA, a="1"))
    await through(bench, bench.end(ANNA, committed=False, coordinator_epoch=5))
    await through(bench, bench.put_pending(ANNA, a="2"))
    with pytest.raises(ApiError) as caught:
        await bench.end(ANNA, committed=True, coordinator_epoch=4)
    assert caught.value.code is ErrorCode.transaction_coordinator_fenced
    assert bench.pending == {7: {b"a": b"2"}}


async def test_a_repeated_marker_of_the_newer_protocol_is_not_written_again(
    bench: TransactionBench, log: Log
) -> None:
    await through(bench, bench.put_pending(ANNA, a="1"))
    bumped = ANNA._replace(epoch=3)
    await through(bench, bench.end(bumped, committed=True, transaction_version=2))
    end_offset = log.end_offset
    await bench.end(bumped, committed=True, transaction_version=2)
    assert log.end_offset == end_offset
    assert await bench.entries() == {b"a": b"1"}


async def test_what_was_verified_before_a_marker_came_is_not_appended(
    bench: TransactionBench, log: Log
) -> None:
    """Otherwise it would begin a hanging transaction."""
    guard = log.producers.begin_verification(*ANNA)
    await through(bench, bench.end(ANNA, committed=False))
    late = bench.begin(bench.put_pending(ANNA, guard, a="1"))
    await settle()
    assert code_of(late) is ErrorCode.invalid_txn_state
    assert bench.pending == {}
    assert len(bench.shards) == 1
    guard = log.producers.begin_verification(*ANNA)
    assert await through(bench, bench.put_pending(ANNA, guard, a="1")) == "pending"


async def test_work_of_a_producer_without_records_only_answers(bench: TransactionBench, log: Log) -> None:
    assert await bench.put_pending(ANNA) == "pending"
    assert log.end_offset == 0


async def test_a_shard_without_transactions_does_not_swallow_them(log: Log) -> None:
    writer = TransactionBench(log)
    await through(writer, writer.put_pending(ANNA, a="1"))
    plain = Bench(log)
    with pytest.raises(ApiError) as caught:
        await plain.entries()
    assert caught.value.code is ErrorCode.coordinator_not_available
