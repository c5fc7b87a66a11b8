"""What a shard is asked by other nodes: what would make it unreadable for every leader to come gets no further."""

from uuid import UUID

import pytest

from penstock.broker.schedule.wire import Ask, What, pack_ask, read_ask
from penstock.protocol.compression import Codec
from penstock.protocol.errors import MalformedFrame
from penstock.scheduling.held import HeldRecord, pack_block
from penstock.scheduling.moving import Chunk
from penstock.scheduling.records import Position, Source

SOURCE = Source(UUID(int=7), 3)
BLOCK = pack_block([HeldRecord(5, b"\x02k\x01", 0, b""), HeldRecord(9, b"\x02l\x01", 0, b"")])


def asked(*blocks: bytes, records: int = 2) -> Ask:
    return Ask(What.MOVE, SOURCE, Position(1, 2), [Chunk(Codec.NONE, blocks, records, Position(1, 4))])


def read(frame: bytes) -> Ask:
    return read_ask(memoryview(frame), 0)


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
    frame = pack_ask(asked(BLOCK))
    for size in range(len(frame)):
        with pytest.raises(MalformedFrame):
            read(frame[:size])


def test_counts_beyond_the_frame_are_refused() -> None:
    frame = bytearray(pack_ask(Ask(What.MOVE, SOURCE)))
    frame[-4:] = b"\xff" * 4
    with pytest.raises(MalformedFrame):
        read(bytes(frame))
