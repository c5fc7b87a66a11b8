"""Incremental fetch sessions (KIP-227): the node remembers what a reader asks for, requests carry only changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchPartition, FetchRequest

#: A request outside any session, which also ends the session it names.
FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
NO_SESSION: Final = 0
_EPOCH_MAX: Final = 2**31 - 1
#: A session idle for this long may make room for another (Apache Kafka's min.incremental.fetch.session.eviction.ms).
_EVICTABLE_AFTER_MS: Final = 120_000

Key = tuple[bytes, int]


class Wanted:
    """One partition of a session, and what its reader was last told."""

    __slots__ = (
        "high_watermark", "last_fetched_epoch", "last_stable_offset", "leader_epoch", "log_start_offset",
        "max_bytes", "offset", "told_error",
    )  # fmt: skip

    def __init__(self, asked: FetchPartition) -> None:
        self.ask(asked)
        self.high_watermark = self.last_stable_offset = self.log_start_offset = -1
        self.told_error = False

    def ask(self, asked: FetchPartition) -> None:
        self.offset = asked.offset
        self.max_bytes = asked.max_bytes
        self.leader_epoch = asked.leader_epoch
        self.last_fetched_epoch = asked.last_fetched_epoch


class Session:
    __slots__ = ("by_id", "epoch", "id", "last_used_ms", "wanted")

    def __init__(self, session_id: int, *, by_id: bool, now_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.by_id = by_id
        self.last_used_ms = now_ms
        self.wanted: dict[Key, Wanted] = {}

    def update(self, request: FetchRequest) -> None:
        for name, partitions in request.topics:
            for asked in partitions:
                known = self.wanted.get((name, asked.partition))
                if known is None:
                    self.wanted[name, asked.partition] = Wanted(asked)
                else:
                    known.ask(asked)
        for name, indexes in request.forgotten:
            for index in indexes:
                self.wanted.pop((name, index), None)


class Opened(NamedTuple):
    """What a request turned out to be: `session` is None when it stands alone."""

    session: Session | None
    wanted: dict[Key, Wanted]
    is_incremental: bool
    error: ErrorCode = ErrorCode.none
    epoch: int = 0  # of the session while this is its latest request


class FetchSessions:
    def __init__(self, slots_max: int, new_id: Callable[[], int]) -> None:
        self._slots_max = slots_max
        self._new_id = new_id
        self._sessions: dict[int, Session] = {}
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> Opened:
        if request.session_epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            return self._open_full(request, by_id=by_id, now_ms=now_ms)
        session = self._sessions.get(request.session_id)
        if session is None:
            return Opened(None, {}, True, ErrorCode.fetch_session_id_not_found)
        if session.epoch != request.session_epoch:
            return Opened(None, {}, True, ErrorCode.invalid_fetch_session_epoch)
        if session.by_id != by_id:
            # The client moved between names and ids, for instance across an upgrade: it starts a new session.
            return Opened(None, {}, True, ErrorCode.fetch_session_topic_id_error)
        session.update(request)
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        session.last_used_ms = now_ms
        if not session.wanted:
            del self._sessions[session.id]
            return Opened(None, {}, True)
        return Opened(session, session.wanted, True, epoch=session.epoch)

    def _open_full(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> Opened:
        self._sessions.pop(request.session_id, None)
        wanted = {
            (name, asked.partition): Wanted(asked)
            for name, partitions in request.topics
            for asked in partitions
        }
        if request.session_epoch == FINAL_EPOCH or not wanted or not self._make_room(now_ms):
            return Opened(None, wanted, False)
        session = Session(self._fresh_id(), by_id=by_id, now_ms=now_ms)
        session.wanted = wanted
        self._sessions[session.id] = session
        return Opened(session, wanted, False, epoch=session.epoch)

    def _make_room(self, now_ms: int) -> bool:
        if len(self._sessions) < self._slots_max:
            return True
        if not self._sessions:
            return False
        oldest = min(self._sessions.values(), key=lambda session: session.last_used_ms)
        if now_ms - oldest.last_used_ms < _EVICTABLE_AFTER_MS:
            return False
        del self._sessions[oldest.id]
        self.evictions += 1
        return True

    def _fresh_id(self) -> int:
        while True:
            session_id = self._new_id()
            if session_id != NO_SESSION and session_id not in self._sessions:
                return session_id
