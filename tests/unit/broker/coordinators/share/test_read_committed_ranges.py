"""Reads of any range return all committed records and no others."""

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.coordinators.share.fetch import scan_batches
from penstock.log.segment import LogSlice
from penstock.protocol.record_batch import TRANSACTIONAL, EndMarker, Record, encode_batch, encode_end_marker


class Batch(NamedTuple):
    first: int
    end: int
    data: bytes


class Log:
    """Batches of a few producers, whose transactions run side by side, until all of them have ended."""

    def __init__(self, rng: random.Random) -> None:
        self.batches: list[Batch] = []
        self.committed: set[int] = set()
        self.aborted: list[tuple[int, int, int]] = []  # producer, first offset, offset of the marker
        self._open: dict[int, list[int]] = {}
        for _ in range(rng.randint(3, 25)):
            producer_id = rng.randint(0, 3)
            if producer_id in self._open and rng.random() < 0.4:
                self._finish(producer_id, committed=rng.random() < 0.5)
            else:
                self._write(producer_id, rng.randint(1, 3))
        for producer_id in list(self._open):
            self._finish(producer_id, committed=rng.random() < 0.5)

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def _append(self, data: bytearray, count: int) -> list[int]:
        first = self.end
        data[:8] = first.to_bytes(8, "big")
        self.batches.append(Batch(first, first + count, bytes(data)))
        return list(range(first, first + count))

    def _write(self, producer_id: int, count: int) -> None:
        """Producer 0 has no transactions."""
        records = [Record(at, 0, None, b"v") for at in range(count)]
        if producer_id == 0:
            self.committed.update(self._append(encode_batch(records), count))
            return
        producer = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0}
        data = encode_batch(records, attributes=TRANSACTIONAL, **producer)
        self._open.setdefault(producer_id, []).extend(self._append(data, count))

    def _finish(self, producer_id: int, *, committed: bool) -> None:
        offsets = self._open.pop(producer_id)
        (marker,) = self._append(encode_end_marker(EndMarker(producer_id, 0, 0, committed), 0), 1)
        if committed:
            self.committed.update(offsets)
        else:
            self.aborted.append((producer_id, offsets[0], marker))

    def aborted_in(self, first: int, upto: int) -> list[tuple[int, int]]:
        return [(who, start) for who, start, marker in self.aborted if marker >= first and start < upto]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_reads_of_any_size_find_what_is_committed(seed: int) -> None:
    rng = random.Random(seed)
    log, found, offset = Log(rng), set(), 0
    while offset < log.end:
        batches = [batch for batch in log.batches if batch.end > offset][: rng.randint(1, 4)]
        piece = LogSlice(b"".join(batch.data for batch in batches), batches[-1].end)
        read = scan_batches(
            offset, piece, log.aborted_in(offset, piece.next_offset), end_offset=piece.next_offset
        )
        found.update(at for first, end in read.found.spans for at in range(first, end))
        assert read.found.next_offset == piece.next_offset
        offset = piece.next_offset
    assert found == log.committed
