"""Which transactions of one partition hold its last stable offset back, and who may begin one.

A transaction holds it back from its first record on until its marker is committed: while it is open, and after it
has ended for as long as the marker lies at or above the high watermark. What has ended is not remembered through a
clean restart: should such a marker be lost with its leader, the coordinator, whose decision was safe before there was
any marker, repeats the same one.
"""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary


class Ended(NamedTuple):
    """A transaction with data in this partition, and the marker that ended it."""

    producer_id: int
    first_offset: int
    marker_offset: int
    last_stable_offset: int  # of this log once the marker is committed
    committed: bool


class VerificationGuard:
    """Held by who asks the coordinator whether a producer's transaction is open: void once that may have changed."""

    __slots__ = ("__weakref__", "producer_id")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id

    def __repr__(self) -> str:
        return f"<VerificationGuard of producer {self.producer_id}>"


class Transactions:
    __slots__ = ("_ended", "_guards", "_open")

    def __init__(self) -> None:
        #: First offset by producer id. Begun in the order of the log, so the oldest comes first.
        self._open: dict[int, int] = {}
        #: First offset by the marker's offset, for those whose marker may not be committed.
        self._ended: dict[int, int] = {}
        self._guards: WeakValueDictionary[int, VerificationGuard] | None = None

    def __repr__(self) -> str:
        return f"<Transactions open={self._open} ended={self._ended}>"

    @property
    def is_unstable(self) -> bool:
        """Something may hold the last stable offset below the high watermark."""
        return bool(self._open or self._ended)

    @property
    def first_open_offset(self) -> int | None:
        return next(iter(self._open.values()), None)

    def first_unstable_offset(self, high_watermark: int) -> int | None:
        """The oldest offset of a transaction that is open, or whose marker is not committed."""
        if not self._ended:
            return self.first_open_offset
        self.settle(high_watermark)
        return min((*self._ended.values(), *islice(self._open.values(), 1)), default=None)

    def begin(self, producer_id: int, first_offset: int) -> None:
        self._open[producer_id] = first_offset
        self._drop_guard(producer_id)

    def end(self, producer_id: int, marker_offset: int, *, committed: bool) -> Ended | None:
        """A marker is in the log. None when its producer has no transaction open here."""
        self._drop_guard(producer_id)
        first_offset = self._open.pop(producer_id, None)
        if first_offset is None:
            return None
        self._ended[marker_offset] = first_offset
        stable = self.first_open_offset
        last_stable_offset = marker_offset + 1 if stable is None else stable
        return Ended(producer_id, first_offset, marker_offset, last_stable_offset, committed)

    def settle(self, high_watermark: int) -> None:
        """Markers below the high watermark hold nothing back any more."""
        ended = self._ended
        while ended and (marker_offset := next(iter(ended))) < high_watermark:
            del ended[marker_offset]

    def restore(self, open_offsets: Iterable[tuple[int, int]]) -> None:
        """Start over with these (first offset, producer id)."""
        self._open = {producer_id: first_offset for first_offset, producer_id in sorted(open_offsets)}
        self._guards = None

    def truncate(self, end_offset: int) -> None:
        """Once the log up to here was read again: markers beyond have never been written."""
        self._ended = {marker: first for marker, first in sorted(self._ended.items()) if marker < end_offset}

    # -- verification ------------------------------------------------------------------------------

    def begin_verification(self, producer_id: int) -> VerificationGuard:
        """The guard that everybody who verifies this producer now shares; it goes with the last of them."""
        if self._guards is None:
            self._guards = WeakValueDictionary()
        guard = self._guards.get(producer_id)
        if guard is None:
            guard = self._guards[producer_id] = VerificationGuard(producer_id)
        return guard

    def is_valid(self, guard: VerificationGuard) -> bool:
        return self._guards is not None and self._guards.get(guard.producer_id) is guard

    def _drop_guard(self, producer_id: int) -> None:
        if self._guards is not None:
            self._guards.pop(producer_id, None)
