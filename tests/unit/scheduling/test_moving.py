"""Where a mover goes on: what was taken in part is not taken again, and nothing else is passed over."""

from penstock.protocol.compression import Codec
from penstock.scheduling.held import HeldRecord, open_block, pack_block
from penstock.scheduling.intake import Held
from penstock.scheduling.moving import Found, chunks_of, continued
from penstock.scheduling.records import Position


def found(epoch: int, offset: int, count: int = 3) -> Found:
    records = [HeldRecord(place, b"\x02%d\x01" % place, 0, b"") for place in range(count)]
    held = Held(Codec.NONE, -1, -1, -1, count - 1, 0, open_block(pack_block(records)))
    return Found(Position(epoch, offset), Position(epoch, offset + 1 + count), held)


def left(position: Position, *pieces: Found) -> int:
    return sum(chunk.record_count for chunk in chunks_of(continued(position, pieces)))


def test_what_was_taken_is_not_left() -> None:
    assert left(Position(4, 10, 2), found(4, 10), found(4, 14)) == 1 + 3
    assert left(Position(4, 10), found(4, 10)) == 3
    assert left(Position(3, 10), found(4, 10)) == 3
    assert left(Position(4, 10, 2), found(4, 14)) == 3


def test_another_batch_in_its_place_is_left_whole() -> None:
    """An unclean election has taken away the one of which some were taken."""
    assert left(Position(4, 10, 2), found(5, 10)) == 3
