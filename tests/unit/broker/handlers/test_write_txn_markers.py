"""WriteTxnMarkers, the last stable offset, and the aborted transactions of a fetch."""

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.fetch.v17.request import FetchPartition, FetchRequest, FetchTopic
from kio.schema.list_offsets.v9 import request as list_offsets
from kio.schema.write_txn_markers.v2 import request as markers
from tests.unit.broker.raw_client import create_topic, running, turn_until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.broker.partition.partition import Partition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

READ_COMMITTED = 1
LATEST = -1
#: Near the node's own time, or each marker would begin a segment.
NOW_MS = int(time.time() * 1000)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, penstock_flush="never", inter_broker_listener_name="PLAINTEXT") as node:
        await create_topic(node, "t")
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[WireClient]:
    client = await WireClient.connect(node)
    yield client
    await client.close()


@pytest.fixture
def partition(node: Node) -> Partition:
    return node.partitions.find("t", 0)


def write(partition: Partition, producer_id: int, sequence: int = 0, *, epoch: int = 0) -> int:
    """A batch of an open transaction, as if its verification were over."""
    batch = encode_batch(
        [Record(0, NOW_MS, b"key", b"value")],
        attributes=TRANSACTIONAL,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    return partition.append(memoryview(batch), NOW_MS).base_offset


async def end(
    client: WireClient,
    producer_id: int,
    *,
    committed: bool,
    epoch: int = 0,
    coordinator_epoch: int = 0,
    version: int = 0,
    topic: str = "t",
) -> ErrorCode:
    marker = markers.WritableTxnMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=committed,
        topics=(markers.WritableTxnMarkerTopic(name=topic, partition_indexes=(0,)),),
        coordinator_epoch=coordinator_epoch,
        transaction_version=version,
    )
    response = await client.ask(markers.WriteTxnMarkersRequest(markers=(marker,)))
    (result,) = response.markers
    assert result.producer_id == producer_id
    error: ErrorCode = result.topics[0].partitions[0].error_code
    return error


async def fetch(
    client: WireClient,
    partition: Partition,
    offset: int = 0,
    *,
    isolation: int = READ_COMMITTED,
    wait_s: float = 0,
) -> Any:
    asked = FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    request = FetchRequest(
        max_wait=timedelta(seconds=wait_s),
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=isolation,
        session_id=0,
        session_epoch=-1,
        topics=(FetchTopic(topic_id=partition.topic_id, partitions=(asked,)),),
        forgotten_topics_data=(),
        rack_id="",
    )
    return (await client.ask(request)).responses[0].partitions[0]


async def latest(client: WireClient, isolation: int) -> int:
    asked = list_offsets.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=LATEST)
    response = await client.ask(
        list_offsets.ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=(list_offsets.ListOffsetsTopic(name="t", partitions=(asked,)),),
        )
    )
    offset: int = response.topics[0].partitions[0].offset
    return offset


async def test_readers_of_what_is_committed_stop_at_the_first_open_transaction(
    client: WireClient, partition: Partition
) -> None:
    write(partition, 1)
    assert await end(client, 1, committed=True) is ErrorCode.none
    write(partition, 2)
    write(partition, 3)
    got = await fetch(client, partition)
    assert (got.high_watermark, got.last_stable_offset) == (4, 2)
    all_of_it = await fetch(client, partition, isolation=0)
    assert (all_of_it.high_watermark, all_of_it.last_stable_offset) == (4, 2)
    assert len(got.records) < len(all_of_it.records)
    assert all_of_it.records.startswith(got.records)
    assert (await latest(client, READ_COMMITTED), await latest(client, 0)) == (2, 4)
    assert await end(client, 3, committed=True) is ErrorCode.none
    assert (await fetch(client, partition)).last_stable_offset == 2, "the older one is still open"
    assert await end(client, 2, committed=False) is ErrorCode.none
    assert (await fetch(client, partition)).last_stable_offset == 6


async def test_a_fetch_lists_the_aborted_transactions_of_what_it_returns(
    client: WireClient, partition: Partition
) -> None:
    for producer_id, committed in ((1, False), (2, True), (3, False)):
        write(partition, producer_id)
        await end(client, producer_id, committed=committed)
    got = await fetch(client, partition)
    assert [(a.producer_id, a.first_offset) for a in got.aborted_transactions] == [(1, 0), (3, 4)]
    assert (await fetch(client, partition, isolation=0)).aborted_transactions is None
    later = await fetch(client, partition, 2)
    assert [(a.producer_id, a.first_offset) for a in later.aborted_transactions] == [(3, 4)]


async def test_what_is_read_from_disk_lists_them_too(
    client: WireClient, partition: Partition, node: Node
) -> None:
    write(partition, 1)
    await end(client, 1, committed=False)
    partition.log.roll(NOW_MS)
    partition.flush()
    await turn_until(lambda: not partition.log.needs_flush)
    for segment in partition.log.segments[:1]:
        segment.aborted = None  # as if it had made room for others
    got = await fetch(client, partition)
    assert [(a.producer_id, a.first_offset) for a in got.aborted_transactions] == [(1, 0)]


async def test_a_waiting_reader_hears_of_the_end_and_not_of_what_is_open(
    client: WireClient, node: Node, partition: Partition
) -> None:
    write(partition, 1)
    waiting = asyncio.ensure_future(fetch(client, partition, wait_s=30))
    await turn_until(lambda: bool(partition._fetch_waiters))
    write(partition, 1, sequence=1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    other = await WireClient.connect(node)
    assert await end(other, 1, committed=True) is ErrorCode.none
    got = await waiting
    assert got.last_stable_offset == 3
    assert got.records
    await other.close()


async def test_markers_are_fenced(client: WireClient, partition: Partition) -> None:
    write(partition, 1, epoch=5)
    assert await end(client, 1, committed=True, epoch=4) is ErrorCode.invalid_producer_epoch
    no_coordinator = await end(client, 1, committed=True, epoch=5, coordinator_epoch=2**31 - 1)
    assert no_coordinator is ErrorCode.invalid_request
    assert await end(client, 1, committed=True, epoch=5, coordinator_epoch=7) is ErrorCode.none
    fenced = await end(client, 1, committed=True, epoch=5, coordinator_epoch=6)
    assert fenced is ErrorCode.transaction_coordinator_fenced
    unknown = await end(client, 1, committed=True, topic="nowhere")
    assert unknown is ErrorCode.unknown_topic_or_partition
    assert await end(client, 1, committed=True, topic="__transaction_state") is not ErrorCode.none


async def test_a_marker_that_comes_twice_is_written_once(client: WireClient, partition: Partition) -> None:
    write(partition, 1)
    assert await end(client, 1, committed=True, epoch=1, version=2) is ErrorCode.none
    assert await end(client, 1, committed=True, epoch=1, version=2) is ErrorCode.none
    assert partition.log.end_offset == 2
    write(partition, 1, epoch=1)
    late = await end(client, 1, committed=True, epoch=1, version=2)
    assert late is ErrorCode.invalid_producer_epoch
    assert (await fetch(client, partition)).last_stable_offset == 2


async def test_a_marker_waits_for_enough_replicas(
    client: WireClient, node: Node, partition: Partition
) -> None:
    write(partition, 1)
    partition.isr_needed = 2
    assert await end(client, 1, committed=True) is ErrorCode.not_enough_replicas
    assert partition.log.end_offset == 1


async def test_retention_may_take_the_beginning_of_a_transaction_that_never_ends(
    client: WireClient, partition: Partition
) -> None:
    write(partition, 1)
    write(partition, 1, sequence=1)
    partition.log.delete_records_before(1)
    got = await fetch(client, partition, 1)
    assert (got.last_stable_offset, got.log_start_offset, bytes(got.records)) == (1, 1, b"")


async def test_stability_survives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, penstock_flush="never", inter_broker_listener_name="PLAINTEXT") as node:
        await create_topic(node, "t")
        client, partition = await WireClient.connect(node), node.partitions.find("t", 0)
        write(partition, 1)
        await end(client, 1, committed=False)
        write(partition, 2)
        await client.close()
    async with running(tmp_path, penstock_flush="never", inter_broker_listener_name="PLAINTEXT") as node:
        client, partition = await WireClient.connect(node), node.partitions.find("t", 0)
        got = await fetch(client, partition)
        assert (got.high_watermark, got.last_stable_offset) == (3, 2)
        assert [(a.producer_id, a.first_offset) for a in got.aborted_transactions] == [(1, 0)]
        await client.close()
