"""Looking for held records in a stretch of a source's log. Blocking, for a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.log.aborted import AbortedOnTheWay
from penstock.protocol.records import BatchHeader, iter_batches
from penstock.scheduling.intake import Held, is_held, read_held
from penstock.scheduling.moving import Found
from penstock.scheduling.records import Position

if TYPE_CHECKING:
    from penstock.log.log import Log
    from penstock.log.positions import LogPosition

_READ_BYTES: Final = 256 << 10

_Batch = tuple[BatchHeader, memoryview]


class Scanned(NamedTuple):
    found: list[Found]
    next_offset: int


def scan(log: Log, offset: int, upto: LogPosition) -> Scanned:
    """`upto` is the last stable offset. Held records count when the batch that they were taken from follows them."""
    batches, next_offset = _read(log, offset, upto)
    aborts = AbortedOnTheWay(log.aborted_in(offset, next_offset))
    found: list[Found] = []
    pending: tuple[BatchHeader, Held] | None = None
    for header, batch in batches:
        is_aborted = aborts.has(header.base_offset, header.attributes, header.producer_id)
        if pending is not None and pending[1].belongs_to(pending[0], header) and not is_aborted:
            at = Position(pending[0].leader_epoch, pending[0].base_offset)
            found.append(Found(at, Position(header.leader_epoch, header.last_offset + 1), pending[1]))
        pending = None
        if is_held(header, batch):
            pending = header, read_held(batch, log.config.decoded_bytes_max)
    return Scanned(found, next_offset if pending is None else pending[0].base_offset)


def _read(log: Log, offset: int, upto: LogPosition) -> tuple[list[_Batch], int]:
    piece = log.read(offset, _READ_BYTES, upto)
    batches, next_offset = list(iter_batches(piece.data)), piece.next_offset
    if batches and is_held(*batches[-1]) and next_offset < upto.offset:
        # The batch that decides on it is beyond the piece.
        following = log.read(next_offset, 1, upto)
        batches += iter_batches(following.data)
        next_offset = following.next_offset
    return batches, next_offset
