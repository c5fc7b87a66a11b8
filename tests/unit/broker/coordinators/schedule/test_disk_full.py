"""A disk that is full between the two writes of a batch with held records: none is held twice, no request hangs."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import create_topic, running, until

from penstock.broker.node import Node
from penstock.broker.partition.partition import Partition
from penstock.log.log import LogAppendInfo
from penstock.log.segment_files import Tail
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, decode_records, encode_batch, iter_batches

LATER = (("penstock-deliver-after", b"1"),)


def sent(node: Node, partition: Partition, sequence: int) -> LogAppendInfo:
    now_ms = node.environment.now_ms()
    records = [Record(0, now_ms, None, b"held", LATER), Record(1, now_ms, None, b"now")]
    batch = encode_batch(records, producer_id=5, producer_epoch=0, base_sequence=sequence)
    return partition.append(memoryview(node.preparer.prepare(partition, batch)), now_ms)


def values(partition: Partition) -> list[bytes | None]:
    data = partition.log.read(0, 1 << 20, partition.high).data
    batches = [batch for header, batch in iter_batches(data) if not header.is_control]
    return [record.value for batch in batches for record in decode_records(batch, 1 << 20)]


@pytest.mark.parametrize("flush", ["ack", "interval"])
async def test_held_records_whose_batch_did_not_fit_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", penstock_schedule_enable="true", penstock_flush=flush)
        partition = node.partitions.find("t", 0)
        await until(lambda: partition.on_held is not None)
        real, writes = Tail.write, []

        def write(tail: Tail, batch: Any) -> None:
            writes.append(len(batch))
            if len(writes) == 2:
                raise ApiError(ErrorCode.kafka_storage_error, "no space left")
            real(tail, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Tail, "write", write)
            with pytest.raises(ApiError):
                sent(node, partition, 0)
        assert partition.log.end_offset == 1
        async with asyncio.timeout(60):
            await partition.settled()
        assert partition.high_watermark == 1
        assert not sent(node, partition, 0).duplicate
        assert sent(node, partition, 0).duplicate
        await until(lambda: len(values(partition)) == 2)
        assert not sent(node, partition, 2).duplicate
        await until(lambda: len(values(partition)) == 4)
        assert sorted(filter(None, values(partition))) == [b"held", b"held", b"now", b"now"]
