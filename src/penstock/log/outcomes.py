"""How each transaction in a log ended, found by reading ahead to its marker.

A data batch comes before the marker that decides it. Logs without transactions are never read ahead of.
"""

from collections import deque
from collections.abc import Callable, Generator
from enum import Enum
from typing import NamedTuple

from penstock.protocol.compression import BytesLike
from penstock.protocol.records import BatchHeader, parse_end_marker

#: The control batches from an offset on, in order.
ReadFrom = Callable[[int], Generator[tuple[BatchHeader, bytes], None, None]]


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"


class _Ended(NamedTuple):
    marker_offset: int
    outcome: Outcome


class TransactionOutcomes:
    """Asked in the order of the log; `close` it in the end."""

    __slots__ = ("_ahead", "_ended", "_read_from")

    def __init__(self, read_from: ReadFrom) -> None:
        self._read_from = read_from
        self._ahead: Generator[tuple[BatchHeader, bytes], None, None] | None = None
        self._ended: dict[int, deque[_Ended]] = {}

    def outcome(self, header: BatchHeader) -> Outcome:
        """Of the transaction that this data batch belongs to."""
        assert header.is_transactional
        assert not header.is_control
        self._forget(header.producer_id, header.base_offset)
        while not (ended := self._ended.get(header.producer_id)):
            if not self._read_on(header.base_offset):
                return Outcome.OPEN
            self._forget(header.producer_id, header.base_offset)  # of a transaction that wrote nothing here
        return ended[0].outcome

    def passed(self, marker: BatchHeader) -> None:
        """The asker has read this marker: nothing before it will be asked for again."""
        self._forget(marker.producer_id, marker.base_offset + 1)

    def close(self) -> None:
        """Let go of the files that are being read ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _forget(self, producer_id: int, before_offset: int) -> None:
        ended = self._ended.get(producer_id)
        while ended and ended[0].marker_offset < before_offset:
            ended.popleft()
        if ended is not None and not ended:
            del self._ended[producer_id]

    def _read_on(self, start_offset: int) -> bool:
        """One control batch further; False at the end."""
        if self._ahead is None:
            self._ahead = self._read_from(start_offset)
        for header, batch in self._ahead:
            if (outcome := marker_outcome(header, batch)) is not None:
                ended = self._ended.setdefault(header.producer_id, deque())
                ended.append(_Ended(header.base_offset, outcome))
            return True
        return False


def marker_outcome(header: BatchHeader, batch: BytesLike) -> Outcome | None:
    """What this batch says about its producer's transaction; None unless it is a marker."""
    marker = parse_end_marker(batch) if header.is_control else None
    if marker is None:
        return None
    return Outcome.COMMITTED if marker.committed else Outcome.ABORTED
