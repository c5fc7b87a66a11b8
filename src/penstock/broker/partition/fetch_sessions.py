"""Incremental fetch sessions (KIP-227): the node remembers what a reader asks for, requests carry only changes.

A session stays with its partitions between requests, and they tell it when there is something new. So a poll looks
at what has news, and not at the thousand partitions that have none. A partition leaves the list of news only when
its reader has been told everything and there is nothing more to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchPartition, FetchRequest

if TYPE_CHECKING:
    from penstock.broker.leading import Standing
    from penstock.broker.partition import Partition

#: A request outside any session, which also ends the session it names.
FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
NO_SESSION: Final = 0
#: Of the requests of consumers.
NO_REPLICA: Final = -1
_EPOCH_MAX: Final = 2**31 - 1
_CLOSED: Final = -1
#: A session idle for this long may make room for another (Apache Kafka's min.incremental.fetch.session.eviction.ms).
_EVICTABLE_AFTER_MS: Final = 120_000
#: Partitions in all sessions of consumers: a request may name any number, whether there are such partitions or not.
PARTITIONS_MAX: Final = 250_000

Key = tuple[bytes, int]


class WaitingFetch(Protocol):
    """A long poll that waits for news of its session."""

    def bytes_arrived(self, count: int) -> None: ...
    def high_watermark_moved(self) -> None: ...
    def overtaken(self) -> None: ...


class Wanted:
    """One partition of a request or a session, and what its reader was last told."""

    __slots__ = (
        "counted_epoch", "high_watermark", "is_uncounted", "key", "last_fetched_epoch", "last_stable_offset",
        "leader_epoch", "log_start_offset", "max_bytes", "offset", "partition", "session", "start_offset",
        "told_error",
    )  # fmt: skip

    def __init__(self, key: Key, asked: FetchPartition, session: Session | None = None) -> None:
        self.key = key
        self.session = session
        self.partition: Partition | None = None
        self.high_watermark = self.last_stable_offset = self.log_start_offset = -1
        self.told_error = False
        self.ask(asked)

    def ask(self, asked: FetchPartition) -> None:
        self.offset = asked.offset
        self.start_offset = asked.log_start_offset  # of a follower's log
        self.max_bytes = asked.max_bytes
        self.leader_epoch = asked.leader_epoch
        self.last_fetched_epoch = asked.last_fetched_epoch
        self.counted_epoch = -1  # the leader epoch in which this counts as a follower's position
        self.is_uncounted = True

    def ask_again(self, asked: FetchPartition) -> None:
        """Within a session. Who repeats a position may not have seen the last answer, and is told all of it again."""
        if asked.offset == self.offset:
            self.high_watermark = self.last_stable_offset = self.log_start_offset = -1
        self.ask(asked)

    def attach(self, partition: Partition) -> None:
        """Hear of its news from now on."""
        self.detach()
        self.partition = partition
        if self.session is None:
            return
        if self.session.is_replica:
            partition.watch_end(self)
        else:
            partition.watch(self)

    def detach(self) -> None:
        partition, self.partition = self.partition, None
        if partition is not None and self.session is not None:
            partition.unwatch_end(self) if self.session.is_replica else partition.unwatch(self)

    def bytes_arrived(self, count: int) -> None:
        assert self.session is not None
        self.session.dirty[self.key] = self
        if self.session.waiting is not None:
            self.session.waiting.bytes_arrived(count)

    def high_watermark_moved(self) -> None:
        assert self.session is not None
        self.session.dirty[self.key] = self
        if self.session.waiting is not None:
            self.session.waiting.high_watermark_moved()

    def standing(self, leader_epoch: int) -> Standing | None:
        session = self.session
        if session is None or self.counted_epoch != leader_epoch:
            return None
        from penstock.broker.leading import Standing

        return Standing(
            session.replica_id, self.offset, session.replica_epoch, session.heard_ms, self.start_offset
        )


class Session:
    __slots__ = (
        "by_id", "dirty", "epoch", "heard_ms", "id", "isolation", "last_used_ms", "replica_epoch",
        "replica_id", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, session_id: int, request: FetchRequest, *, by_id: bool, now_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.by_id = by_id
        self.last_used_ms = now_ms
        self.replica_id, self.replica_epoch = request.replica_id, request.replica_epoch
        self.heard_ms = 0  # by the clock that measures lag
        self.isolation = request.isolation_level
        self.waiting: WaitingFetch | None = None
        self.wanted = {
            (name, asked.partition): Wanted((name, asked.partition), asked, self)
            for name, partitions in request.topics
            for asked in partitions
        }
        #: What to look at, in order; everything else has been told and read.
        self.dirty = dict(self.wanted)

    @property
    def is_replica(self) -> bool:
        return self.replica_id > NO_REPLICA

    def update(self, request: FetchRequest) -> None:
        self.replica_epoch = request.replica_epoch
        for name, partitions in request.topics:
            for asked in partitions:
                key = (name, asked.partition)
                known = self.wanted.get(key)
                if known is None:
                    known = self.wanted[key] = Wanted(key, asked, self)
                else:
                    known.ask_again(asked)
                self.dirty[key] = known
        for name, indexes in request.forgotten:
            for index in indexes:
                self._forget((name, index))
        if self.isolation != request.isolation_level:
            self.isolation = request.isolation_level
            self.dirty = dict(self.wanted)

    def _forget(self, key: Key) -> None:
        wanted = self.wanted.pop(key, None)
        if wanted is not None:
            wanted.detach()
            self.dirty.pop(key, None)

    def overtake(self) -> None:
        """Another request takes the place of one that still waits."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.overtaken()

    def close(self) -> None:
        self.epoch = _CLOSED
        self.overtake()
        for wanted in self.wanted.values():
            wanted.detach()


class Opened(NamedTuple):
    """What a request turned out to be: `session` is None when it stands alone."""

    session: Session | None
    wanted: dict[Key, Wanted]
    is_incremental: bool
    error: ErrorCode = ErrorCode.none
    epoch: int = 0  # of the session while this is its latest request


class FetchSessions:
    def __init__(
        self, slots_max: int, new_id: Callable[[], int], partitions_max: int = PARTITIONS_MAX
    ) -> None:
        self._slots_max = slots_max
        self._partitions_max = partitions_max
        self._partitions = 0  # of consumers
        self._new_id = new_id
        self._sessions: dict[int, Session] = {}
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> Opened:
        if request.session_epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            return self._open_full(request, by_id=by_id, now_ms=now_ms)
        session = self._sessions.get(request.session_id)
        if session is None or session.replica_id != request.replica_id:
            return Opened(None, {}, True, ErrorCode.fetch_session_id_not_found)
        if session.epoch != request.session_epoch:
            return Opened(None, {}, True, ErrorCode.invalid_fetch_session_epoch)
        if session.by_id != by_id:
            # The client moved between names and ids, for instance across an upgrade: it starts a new session.
            return Opened(None, {}, True, ErrorCode.fetch_session_topic_id_error)
        before = len(session.wanted)
        session.update(request)
        self._count(session, len(session.wanted) - before)
        if self._partitions > self._partitions_max and len(session.wanted) > before:
            # It begins again with all that it wants, and is served without a session.
            self._close(session)
            return Opened(None, {}, True, ErrorCode.fetch_session_id_not_found)
        session.epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        session.last_used_ms = now_ms
        session.overtake()
        if not session.wanted:
            self._close(session)
            return Opened(None, {}, True)
        return Opened(session, session.wanted, True, epoch=session.epoch)

    def _open_full(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> Opened:
        for before in self._replaced_by(request):
            self._close(before)
        asks = any(partitions for _, partitions in request.topics)
        if request.session_epoch == FINAL_EPOCH or not asks or not self._make_room(request, now_ms):
            wanted = {
                (name, asked.partition): Wanted((name, asked.partition), asked)
                for name, partitions in request.topics
                for asked in partitions
            }
            return Opened(None, wanted, False)
        session = Session(self._fresh_id(), request, by_id=by_id, now_ms=now_ms)
        self._sessions[session.id] = session
        self._count(session, len(session.wanted))
        return Opened(session, session.wanted, False, epoch=session.epoch)

    def _replaced_by(self, request: FetchRequest) -> list[Session]:
        """The session it names, and all of a follower's: it has one, and what an older one says of it is no news."""
        if request.replica_id > NO_REPLICA:
            return [
                session for session in self._sessions.values() if session.replica_id == request.replica_id
            ]
        named = self._sessions.get(request.session_id)
        return [named] if named is not None and named.replica_id == request.replica_id else []

    def _close(self, session: Session) -> None:
        del self._sessions[session.id]
        self._count(session, -len(session.wanted))
        session.close()

    def _count(self, session: Session, partitions: int) -> None:
        if not session.is_replica:
            self._partitions += partitions

    def _make_room(self, request: FetchRequest, now_ms: int) -> bool:
        """Consumers make room for followers at once, and for each other when they have been idle for long."""
        is_consumer = request.replica_id <= NO_REPLICA
        asked = sum(len(partitions) for _, partitions in request.topics)
        if is_consumer and self._partitions + asked > self._partitions_max:
            return False
        if len(self._sessions) < self._slots_max:
            return True
        consumers = [session for session in self._sessions.values() if not session.is_replica]
        if not consumers:
            return False
        oldest = min(consumers, key=lambda session: session.last_used_ms)
        if is_consumer and now_ms - oldest.last_used_ms < _EVICTABLE_AFTER_MS:
            return False
        self._close(oldest)
        self.evictions += 1
        return True

    def _fresh_id(self) -> int:
        while True:
            session_id = self._new_id()
            if session_id != NO_SESSION and session_id not in self._sessions:
                return session_id
