"""Where a mover continues after a part of a batch."""

from penstock.protocol.compression import Codec
from penstock.scheduling.intake import HeldBatch
from penstock.scheduling.schedule_log import HeldRecord, SourcePosition, open_block, pack_block
from penstock.scheduling.schedule_shard import FoundHeldBatch, cut_chunks, resume_from


def found(epoch: int, offset: int, count: int = 3) -> FoundHeldBatch:
    records = [HeldRecord(place, b"\x02%d\x01" % place, 0, b"") for place in range(count)]
    held = HeldBatch(Codec.NONE, -1, -1, -1, count - 1, 0, open_block(pack_block(records)))
    return FoundHeldBatch(SourcePosition(epoch, offset), SourcePosition(epoch, offset + 1 + count), held)


def left(position: SourcePosition, *pieces: FoundHeldBatch) -> int:
    return sum(chunk.record_count for chunk in cut_chunks(resume_from(position, pieces)))


def test_what_was_taken_is_not_left() -> None:
    assert left(SourcePosition(4, 10, 2), found(4, 10), found(4, 14)) == 1 + 3
    assert left(SourcePosition(4, 10), found(4, 10)) == 3
    assert left(SourcePosition(3, 10), found(4, 10)) == 3
    assert left(SourcePosition(4, 10, 2), found(4, 14)) == 3


def test_another_batch_in_its_place_is_left_whole() -> None:
    """An unclean election has taken away the one of which some were taken."""
    assert left(SourcePosition(4, 10, 2), found(5, 10)) == 3
