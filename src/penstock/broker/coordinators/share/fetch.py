"""One ShareFetch: takes what it can have, or waits until there is something or its time is over.

Others releasing records, delays that are over, locks that run out, appends and writes that have arrived all wake it.
Under at-most-once it first has records written as final, and takes them when that is done. When its session ends, it
takes no more: nobody would give back what it takes then.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.share.led import LedSharePartition, monotonic_ms
from penstock.broker.share.reading import (
    Look,
    Read,
    examine,
    look_elsewhere,
    pieces_for,
    runs_of_records,
)
from penstock.groups.share_partition.messages import Acquired, Appetite
from penstock.log.positions import LogPosition, Slice
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.broker.share.sessions import Place, ShareSession
    from penstock.broker.share.table import SharePartitions
    from penstock.protocol.share import ShareFetchRequest

_RECORD_LIMIT: Final = 1
#: More than records are said to take, so that one read usually suffices.
_READ_SPARE: Final = 1.25
#: Times as many offsets as records are asked for: what has come back is topped up with what is new, not at any price.
_REACH_MAX: Final = 5
_READ_BYTES_MIN: Final = 16 * 1024
_BYTES_ALWAYS_ALLOWED: Final = 64 * 1024
#: For now there is nothing to have. Clients do not expect to be told so (the one in Java gives up).
_PASSING: Final = frozenset({ErrorCode.coordinator_not_available, ErrorCode.offset_out_of_range})


class Portion(NamedTuple):
    """What a request gets of one partition; nothing with an error."""

    records: list[BytesLike]
    acquired: Sequence[Acquired]
    error: ApiError | None = None
    led: LedSharePartition | None = None

    @property
    def bytes_count(self) -> int:
        return sum(map(len, self.records))

    @property
    def records_count(self) -> int:
        return sum(last - first + 1 for first, last, _ in self.acquired)


class Cold(Exception):
    """The bytes wanted next would have to be waited for."""

    def __init__(self, led: LedSharePartition, offset: int, read: Callable[[], Read]) -> None:
        super().__init__(led, offset)
        self.place = (led, offset)
        self.read = read


class ShareFetching:
    def __init__(self, shares: SharePartitions, session: ShareSession, request: ShareFetchRequest) -> None:
        self._shares = shares
        self._node = shares.node
        self._session = session
        self._group, self._member = session.group, session.member
        self._request = request
        self._places = session.rotated()
        self.portions: dict[Place, Portion] = {}
        self._leds: dict[Place, LedSharePartition] = {}
        self._cold: dict[tuple[LedSharePartition, int], Read | ApiError] = {}
        self._peeked: dict[tuple[LedSharePartition, int], Read] = {}
        self._paying: list[asyncio.Future[None]] = []
        self._reserved = 0  # records that are being paid for, of those asked for
        self._goes_on = False  # there is more to read
        self._watched: list[LedSharePartition] = []
        self._woken: asyncio.Future[None] | None = None
        self._is_late = False

    # -- taking --------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Whether the request can be answered. Raises Cold."""
        if not self._session.is_open:
            return True
        bytes_left, records_left = self._left()
        self._peeked.clear()
        self._reserved = 0
        self._goes_on = False
        if not self._has_enough(bytes_left):
            return False
        for place in self._places:
            if records_left <= self._reserved or bytes_left <= 0:
                break
            if place in self.portions:
                continue
            try:
                portion = self._take(place, records_left - self._reserved, bytes_left)
            except ApiError as error:
                self._node.metrics.count_error("share_fetch", error.code.name)
                portion = None if error.code in _PASSING else Portion([], (), error)
            if portion is not None:
                self.portions[place] = portion
                bytes_left -= portion.bytes_count
                records_left -= portion.records_count
        return bool(self.portions)

    def _left(self) -> tuple[int, int]:
        """Bytes and records that may still be taken."""
        allowed = min(self._request.max_bytes, self._node.fetch_bytes_max)
        allowed = min(allowed, max(self._node.server.response_bytes_left(), _BYTES_ALWAYS_ALLOWED))
        taken = self.portions.values()
        return (
            allowed - sum(portion.bytes_count for portion in taken),
            self._request.max_records - sum(portion.records_count for portion in taken),
        )

    def _take(self, place: Place, records_max: int, bytes_max: int) -> Portion | None:
        """None where there is nothing to have for now. Raises ApiError."""
        led = self._led(place)
        if led is None:
            return None
        rules = led.current()
        read = self._read(led, records_max, bytes_max)
        if read is None:
            return None
        is_exact = led.config.share_is_exact or self._request.acquire_mode == _RECORD_LIMIT
        appetite = Appetite(records_max, max(self._request.batch_records, 1), is_exact)
        acquired = rules.acquire(self._member, read.found, appetite, now_ms=monotonic_ms())
        if not acquired and rules.policy.is_at_most_once:
            reserved = rules.reserve(read.found, appetite)
            if reserved:
                self._reserved += reserved
                self._paying.append(led.stored())
        led.changed()
        if not acquired:
            # What has been read holds nothing (any more) for this member, but what follows may.
            self._goes_on |= rules.next_offset not in (None, read.found.first_offset)
            return None
        self._learn(led, read)
        portion = Portion(pieces_for(read, acquired), acquired, None, led)
        self._count(led, portion)
        return portion

    def _led(self, place: Place) -> LedSharePartition | None:
        """None while it is being loaded. Raises ApiError, also when what was waited for could not be loaded."""
        led = self._leds.get(place)
        if led is None or not led.is_closed:
            led = self._leds[place] = self._shares.find(self._group, place)
        return None if led.rules is None and not led.is_closed else led

    def _learn(self, led: LedSharePartition, read: Read) -> None:
        offsets = read.found.next_offset - read.found.first_offset
        led.bytes_per_record = (led.bytes_per_record + len(read.data) / max(offsets, 1)) / 2

    def _count(self, led: LedSharePartition, portion: Portion) -> None:
        traffic = led.partition.traffic
        traffic.bytes_out += portion.bytes_count
        traffic.messages_out += portion.records_count
        traffic.fetches += 1

    # -- reading -------------------------------------------------------------------------------------

    def _read(self, led: LedSharePartition, records_max: int, bytes_max: int) -> Read | None:
        """None where nothing new can be read. Raises ApiError and Cold."""
        rules, log = led.current(), led.partition.log
        if rules.start_offset < log.start_offset:
            rules.log_start_moved(log.start_offset)
        offset = rules.next_offset
        if offset is None or offset < log.start_offset:
            # What has been deleted is passed over once all that is being written of it is stored.
            return None
        committed, upto = led.config.share_reads_committed, _readable(led)
        if offset >= upto.offset:
            return None
        cold = self._cold.pop((led, offset), None) or self._peeked.get((led, offset))
        if isinstance(cold, ApiError):
            raise cold
        if cold is not None:
            return cold
        # What is handed out is counted, so holes in batches have to be known.
        is_exact = rules.policy.is_at_most_once
        offsets = min(rules.reach(records_max), _REACH_MAX * records_max)
        size = max(int(offsets * led.bytes_per_record * _READ_SPARE), _READ_BYTES_MIN)

        def read(*, nowait: bool) -> Read:
            piece: Slice = log.read(offset, min(size, bytes_max), upto, at_least_one=True, nowait=nowait)
            aborted: Sequence[tuple[int, int]] = ()
            if committed and log.has_aborted:
                aborted = log.aborted_in(offset, piece.next_offset, nowait=nowait)
            return examine(offset, piece, aborted, self._look(nowait=nowait) if is_exact else None)

        try:
            return read(nowait=True)
        except BlockingIOError:
            raise Cold(led, offset, partial(read, nowait=False)) from None

    def _look(self, *, nowait: bool) -> Look:
        if nowait:
            return look_elsewhere
        max_bytes = self._node.settings.integer("penstock.decompress.max.bytes")
        return partial(runs_of_records, max_bytes=max_bytes)

    def _has_enough(self, bytes_max: int) -> bool:
        """As many bytes as asked for, or more than an answer holds.

        In any case once the time is over, or records have come back.
        """
        wanted = min(self._request.min_bytes, bytes_max)
        if wanted <= 1 or self._is_late or self.portions:
            return True
        there = 0
        for place in self._places:
            try:
                led = self._led(place)
                if led is None:
                    continue
                rules = led.current()
                read = self._read(led, self._request.max_records, bytes_max)
            except ApiError:
                return True
            if read is not None:
                self._peeked[led, read.found.first_offset] = read
                there += len(read.data)
                is_full = read.found.next_offset < _readable(led).offset
                if there >= wanted or is_full or read.found.first_offset < rules.end_offset:
                    return True
        return False

    # -- waiting -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until there is something to answer, or the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._request.max_wait_ms / 1000
        try:
            while True:
                if self._paying:
                    # What is paid for is waited for, before more is: nobody else may ever get it.
                    paying, self._paying = self._paying, []
                    await asyncio.wait(paying)
                if await self._collected():
                    return
                if self._paying:
                    continue
                if self._goes_on and loop.time() < deadline:
                    await asyncio.sleep(0)  # others have their turns
                    continue
                if self._is_late:
                    return
                await self._news(deadline)
        finally:
            self._unwatch()

    async def _collected(self) -> bool:
        while True:
            try:
                return self.collect()
            except Cold as cold:
                # What was read before it came to that is not read again.
                self._cold |= self._peeked
                try:
                    self._cold[cold.place] = await self._node.in_thread(cold.read)
                except ApiError as error:
                    self._cold[cold.place] = error

    async def _news(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        self._cold.clear()  # there may be more by then
        self._watch()
        self._woken = loop.create_future()
        timer = loop.call_at(deadline, self._time_over)
        try:
            await self._woken
        finally:
            timer.cancel()

    def _watch(self) -> None:
        self._unwatch()
        for place in self._places:
            try:
                led = self._shares.find(self._group, place)
            except ApiError:
                continue
            led.watch(self)
            self._watched.append(led)

    def _unwatch(self) -> None:
        for led in self._watched:
            led.unwatch(self)
        self._watched = []

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _time_over(self) -> None:
        self._is_late = True
        self.wake()

    def checked(self) -> dict[Place, Portion]:
        """What is still true when the answer leaves: a leader that was fenced meanwhile has nothing to give."""
        for place, portion in self.portions.items():
            if portion.led is not None and portion.led.is_closed:
                error = portion.led.error or ApiError(ErrorCode.not_leader_or_follower)
                self.portions[place] = Portion([], (), error)
        return self.portions


def _readable(led: LedSharePartition) -> LogPosition:
    return led.partition.last_stable if led.config.share_reads_committed else led.partition.high
