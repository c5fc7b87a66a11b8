"""Requests between nodes to a schedule shard: malformed ones are refused before they reach the log."""

import asyncio
from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import Client, create_topic, frame, running, until

from penstock.broker.coordinators.schedule.messages import (
    ScheduleOperation,
    ScheduleRequest,
    ScheduleResponse,
    decode_request,
    decode_response,
    encode_request,
)
from penstock.broker.network.apis import SCHEDULE_API
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.scheduling.schedule_log import HeldRecord, ScheduleSource, SourcePosition, pack_block
from penstock.scheduling.schedule_shard import HeldChunk

SOURCE = ScheduleSource(UUID(int=7), 3)
BLOCK = pack_block([HeldRecord(5, b"\x02k\x01", 0, b""), HeldRecord(9, b"\x02l\x01", 0, b"")])


def asked(*blocks: bytes, records: int = 2) -> ScheduleRequest:
    return ScheduleRequest(
        ScheduleOperation.MOVE,
        SOURCE,
        SourcePosition(1, 2),
        [HeldChunk(Codec.NONE, blocks, records, SourcePosition(1, 4))],
    )


def read(packed: bytes) -> ScheduleRequest:
    return decode_request(memoryview(packed), 0)


def test_what_is_packed_is_read() -> None:
    for ask in (
        ScheduleRequest(ScheduleOperation.POSITION, SOURCE),
        asked(BLOCK),
        asked(BLOCK, BLOCK, records=4),
    ):
        assert read(encode_request(ask)) == ask._replace(chunks=list(ask.chunks))


@pytest.mark.parametrize(
    "ask",
    [
        asked(b""),
        asked(BLOCK[:-1]),
        asked(BLOCK + b"."),
        asked(b"\xff" * 40),
        asked(BLOCK, records=3),
        asked(BLOCK, pack_block([])),
        asked(pack_block([HeldRecord(-1, b"\x01\x01", 0, b"")]), records=1),
    ],
)
def test_unreadable_blocks_are_refused(ask: ScheduleRequest) -> None:
    with pytest.raises(MalformedFrame):
        read(encode_request(ask))


def test_a_frame_that_is_cut_off_anywhere_is_refused() -> None:
    packed = encode_request(asked(BLOCK))
    for size in range(len(packed)):
        with pytest.raises(MalformedFrame):
            read(packed[:size])


def test_counts_beyond_the_frame_are_refused() -> None:
    packed = bytearray(encode_request(ScheduleRequest(ScheduleOperation.MOVE, SOURCE)))
    packed[-4:] = b"\xff" * 4
    with pytest.raises(MalformedFrame):
        read(bytes(packed))


async def test_schedule_requests_are_for_nodes_and_unreadable_ones_do_no_harm(tmp_path: Path) -> None:
    listeners = "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"
    async with running(tmp_path, listeners=listeners, inter_broker_listener_name="NODES") as node:
        await create_topic(node, "t", penstock_schedule_enable="true")
        partition = node.partitions.find("t", 0)
        await until(lambda: partition.on_held is not None)
        source = ScheduleSource(partition.topic_id, 0)
        where = frame(SCHEDULE_API, 0, encode_request(ScheduleRequest(ScheduleOperation.POSITION, source)))
        client = await Client.connect(node)
        client.writer.write(where)
        assert await client.is_cut_off()

        _, nodes = node.listeners
        position = await node.schedule().ask(ScheduleRequest(ScheduleOperation.POSITION, source))
        assert position is not None
        broken = HeldChunk(Codec.NONE, (BLOCK[:-1],), 2, position._replace(offset=position.offset + 2))
        peer = await _peer(nodes.port)
        assert decode_response(memoryview(await peer.ask(where)), 0) == ScheduleResponse(
            ErrorCode.none, position
        )
        peer.writer.write(
            frame(
                SCHEDULE_API,
                0,
                encode_request(ScheduleRequest(ScheduleOperation.MOVE, source, position, [broken])),
            )
        )
        assert await peer.is_cut_off()
        again = await _peer(nodes.port)
        assert decode_response(memoryview(await again.ask(where)), 0) == ScheduleResponse(
            ErrorCode.none, position
        )


async def _peer(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))
