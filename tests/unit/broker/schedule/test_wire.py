"""What a shard is asked by other nodes: what would make it unreadable for every leader to come gets no further."""

import asyncio
from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.raw_client import Client, create_topic, frame, running, until

from penstock.broker.apis import SCHEDULE
from penstock.broker.schedule.wire import Answer, Ask, What, pack_ask, read_answer, read_ask
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.scheduling.held import HeldRecord, pack_block
from penstock.scheduling.moving import Chunk
from penstock.scheduling.records import Position, Source

SOURCE = Source(UUID(int=7), 3)
BLOCK = pack_block([HeldRecord(5, b"\x02k\x01", 0, b""), HeldRecord(9, b"\x02l\x01", 0, b"")])


def asked(*blocks: bytes, records: int = 2) -> Ask:
    return Ask(What.MOVE, SOURCE, Position(1, 2), [Chunk(Codec.NONE, blocks, records, Position(1, 4))])


def read(packed: bytes) -> Ask:
    return read_ask(memoryview(packed), 0)


def test_what_is_packed_is_read() -> None:
    for ask in (Ask(What.POSITION, SOURCE), asked(BLOCK), asked(BLOCK, BLOCK, records=4)):
        assert read(pack_ask(ask)) == ask._replace(chunks=list(ask.chunks))


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
def test_blocks_that_nobody_could_read_are_refused(ask: Ask) -> None:
    with pytest.raises(MalformedFrame):
        read(pack_ask(ask))


def test_a_frame_that_is_cut_off_anywhere_is_refused() -> None:
    packed = pack_ask(asked(BLOCK))
    for size in range(len(packed)):
        with pytest.raises(MalformedFrame):
            read(packed[:size])


def test_counts_beyond_the_frame_are_refused() -> None:
    packed = bytearray(pack_ask(Ask(What.MOVE, SOURCE)))
    packed[-4:] = b"\xff" * 4
    with pytest.raises(MalformedFrame):
        read(bytes(packed))


async def test_the_schedule_is_for_nodes_and_outlives_what_nobody_can_read(tmp_path: Path) -> None:
    listeners = "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"
    async with running(tmp_path, listeners=listeners, inter_broker_listener_name="NODES") as node:
        await create_topic(node, "t", penstock_schedule_enable="true")
        partition = node.partitions.find("t", 0)
        await until(lambda: partition.on_held is not None)
        source = Source(partition.topic_id, 0)
        where = frame(SCHEDULE, 0, pack_ask(Ask(What.POSITION, source)))
        client = await Client.connect(node)
        client.writer.write(where)
        assert await client.is_cut_off()

        _, nodes = node.listeners
        position = await node.schedule.ask(Ask(What.POSITION, source))
        assert position is not None
        broken = Chunk(Codec.NONE, (BLOCK[:-1],), 2, position._replace(offset=position.offset + 2))
        peer = await _peer(nodes.port)
        assert read_answer(memoryview(await peer.ask(where)), 0) == Answer(ErrorCode.none, position)
        peer.writer.write(frame(SCHEDULE, 0, pack_ask(Ask(What.MOVE, source, position, [broken]))))
        assert await peer.is_cut_off()
        again = await _peer(nodes.port)
        assert read_answer(memoryview(await again.ask(where)), 0) == Answer(ErrorCode.none, position)


async def _peer(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port))
