"""Share groups with read_committed: open and aborted transactions, control batches and gaps."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.share.share_client import (
    ACCEPT,
    GROUP,
    Member,
    set_group,
    share_topic,
    stored,
)
from tests.unit.broker.raw_client import running

from penstock.broker.coordinators.share.fetch import scan_batches
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, EndMarker, Record, encode_batch

_LONG_MS = 20_000
_COMMITTED = {"share_isolation_level": "read_committed"}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, share_coordinator_state_topic_num_partitions="2") as node:
        await share_topic(node)
        yield node


async def _write(node: Node, producer_id: int, count: int, *, sequence: int = 0) -> None:
    """A batch of a transaction, or of none."""
    partition = node.partitions.find("t", 0)
    records = [Record(at, node.environment.now_ms(), None, b"v") for at in range(count)]
    producer = (
        {}
        if producer_id < 0
        else {
            "producer_id": producer_id,
            "producer_epoch": 0,
            "base_sequence": sequence,
            "attributes": TRANSACTIONAL,
        }
    )
    partition.append(memoryview(encode_batch(records, **producer)), node.environment.now_ms())
    await partition.committed(partition.log.end_offset - 1)


async def _end(node: Node, producer_id: int, *, commit: bool) -> None:
    partition = node.partitions.find("t", 0)
    marker = EndMarker(producer_id, 0, 0, commit)
    await partition.committed(partition.append_marker(marker, node.environment.now_ms()))


async def test_what_is_committed_is_handed_out_and_nothing_else(node: Node) -> None:
    await set_group(node, GROUP, **_COMMITTED)
    await _write(node, 7, 2)  # 0-1, aborted
    await _write(node, 8, 2)  # 2-3, committed
    await _write(node, 7, 1, sequence=2)  # 4, aborted
    await _end(node, 7, commit=False)  # 5
    await _write(node, -1, 1)  # 6
    await _end(node, 8, commit=True)  # 7
    await _write(node, 7, 1, sequence=3)  # 8, committed
    await _end(node, 7, commit=True)  # 9
    member = await Member.join(node)
    reply = await member.fetch(wait_ms=_LONG_MS)
    assert [offset for offset, _ in reply.acquired] == [2, 3, 6, 8]
    assert sorted(reply.values) == [2, 3, 6, 8]
    said = [(first, last, [ACCEPT]) for first, last, _ in reply.ranges]
    assert await member.acknowledge(*said) is ErrorCode.none
    assert (await stored(node)).start_offset == 10, "what is not handed out is not waited for"


async def test_an_open_transaction_is_waited_for(node: Node) -> None:
    await set_group(node, GROUP, **_COMMITTED)
    await _write(node, -1, 1)
    await _write(node, 7, 1)
    await _write(node, -1, 1)
    member = await Member.join(node)
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1)]
    assert (await member.fetch()).acquired == []
    await _end(node, 7, commit=True)
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(1, 1), (2, 1)]


async def test_who_reads_uncommitted_records_gets_all_of_them_but_no_markers(node: Node) -> None:
    await _write(node, 7, 2)
    await _end(node, 7, commit=False)
    await _write(node, 8, 1)
    member = await Member.join(node)
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1), (1, 1), (3, 1)]


async def test_a_marker_at_the_end_delays_no_reader(node: Node) -> None:
    await _write(node, 7, 1)
    await _end(node, 7, commit=True)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    await member.fetch((0, 0, [ACCEPT]))
    await member.fetch()
    await _write(node, -1, 1)
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(2, 1)]


async def test_a_read_that_begins_with_an_abort_marker_takes_nothing_from_the_next_transaction(
    node: Node,
) -> None:
    """The records before it may have filled the read before, or a segment."""
    await _write(node, 7, 1)  # 0, aborted
    await _end(node, 7, commit=False)  # 1
    await _write(node, 7, 2, sequence=1)  # 2-3, committed
    await _end(node, 7, commit=True)  # 4
    partition = node.partitions.find("t", 0)
    log, upto = partition.log, partition.last_stable
    for offset in (0, 1):
        piece = log.read(offset, 1 << 20, upto)
        aborted = log.aborted_in(offset, piece.next_offset)
        assert aborted == ((7, 0),)
        assert scan_batches(offset, piece, aborted, end_offset=piece.next_offset).found.spans == [(2, 4)]


async def test_what_is_not_handed_out_does_not_keep_what_follows_waiting(node: Node) -> None:
    """However much it is: one fetch reads on until it finds something."""
    await set_group(node, GROUP, **_COMMITTED)
    for sequence in range(5):
        await _write(node, 7, 1, sequence=sequence)
    await _end(node, 7, commit=False)
    await _write(node, -1, 1)
    member = await Member.join(node)
    assert (await member.fetch(max_bytes=1, wait_ms=_LONG_MS)).acquired == [(6, 1)]
