"""Reading the log for a share group: whole batches, told apart by their headers only.

Where each record counts, batches that compaction has left incomplete are looked into, off the loop.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.groups.share_partition.messages import Acquired, Found
from penstock.log.aborted import AbortedOnTheWay
from penstock.protocol.compression import BytesLike
from penstock.protocol.records import (
    CONTROL,
    HEADER_BYTES,
    LENGTH_OVERHEAD_BYTES,
    decode_records,
)

if TYPE_CHECKING:
    from penstock.log.positions import Slice

#: base offset, length, attributes, last offset delta, producer id, record count
_HEADER: Final = struct.Struct(">qi9xhi16xq6xi")
#: Looks for the offsets of a batch's records, as runs. Raises BlockingIOError where this is not the place for it.
Look = Callable[[memoryview], list[tuple[int, int]]]


class Read(NamedTuple):
    """`starts` are the places of the batches in the data, and the end of the data."""

    data: BytesLike
    found: Found
    starts: Sequence[int]


def examine(
    offset: int, piece: Slice, aborted: Sequence[tuple[int, int]] = (), look_inside: Look | None = None
) -> Read:
    """What has been read from an offset on; batches of `aborted` transactions have nothing to hand out.

    With `look_inside`, holes in batches are found too.
    """
    data, position, size = piece.data, 0, len(piece.data)
    spans: list[tuple[int, int]] = []
    ends: list[int] = []
    starts: list[int] = []
    skips = AbortedOnTheWay(aborted) if aborted else None
    while position + HEADER_BYTES <= size:
        base, length, attributes, delta, producer_id, count = _HEADER.unpack_from(data, position)
        starts.append(position)
        after = base + delta + 1
        ends.append(after)
        is_left_out = not count or attributes & CONTROL
        if skips is not None and skips.has(base, attributes, producer_id):
            is_left_out = True
        behind = position + length + LENGTH_OVERHEAD_BYTES
        if not is_left_out:
            if count <= delta and look_inside is not None:
                spans += look_inside(memoryview(data)[position:behind])
            elif spans and spans[-1][1] == base:
                spans[-1] = (spans[-1][0], after)
            else:
                spans.append((base, after))
        position = behind
    starts.append(position)
    next_offset = ends[-1] if ends else offset
    return Read(data, Found(offset, next_offset, spans, ends), starts)


def look_elsewhere(batch: memoryview) -> list[tuple[int, int]]:
    raise BlockingIOError


def runs_of_records(batch: memoryview, max_bytes: int) -> list[tuple[int, int]]:
    """Blocking."""
    runs: list[tuple[int, int]] = []
    for record in decode_records(batch, max_bytes):
        if runs and runs[-1][1] == record.offset:
            runs[-1] = (runs[-1][0], record.offset + 1)
        else:
            runs.append((record.offset, record.offset + 1))
    return runs


def pieces_for(read: Read, acquired: Sequence[Acquired]) -> list[BytesLike]:
    """The batches that hold acquired records, and no others."""
    ends, starts = read.found.ends, read.starts
    pieces: list[tuple[int, int]] = []
    for first_offset, last_offset, _ in acquired:
        first = bisect_left(ends, first_offset + 1)
        after = bisect_left(ends, last_offset + 1, first) + 1
        if pieces and first <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(after, pieces[-1][1]))
        else:
            pieces.append((first, after))
    if pieces == [(0, len(ends))] and starts[-1] == len(read.data):
        return [read.data]
    view = memoryview(read.data)
    return [view[starts[first] : starts[after]] for first, after in pieces]
