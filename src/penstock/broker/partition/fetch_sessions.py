"""Incremental fetch sessions (KIP-227): the node remembers a reader's partitions, so requests carry only changes.

A session stays registered with its partitions between requests, and they notify it of changes. A poll therefore looks
only at partitions that changed, not at a thousand that did not. A partition leaves the list of changed ones only when
its reader has received everything and there is nothing left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchPartition, FetchRequest

if TYPE_CHECKING:
    from penstock.broker.partition.leader_replica import FollowerFetchState
    from penstock.broker.partition.partition import Partition

#: A request outside any session, which also ends the session it names.
FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
INVALID_SESSION_ID: Final = 0
#: The replica id in the requests of consumers.
CONSUMER_REPLICA_ID: Final = -1
_EPOCH_MAX: Final = 2**31 - 1
_CLOSED_EPOCH: Final = -1
#: A session idle for this long may make room for another (Apache Kafka's min.incremental.fetch.session.eviction.ms).
_EVICTABLE_AFTER_MS: Final = 120_000
#: Limit of partitions in all consumer sessions together, and in all sessions of followers: a request may name any
#: number, even ones that do not exist.
SESSION_PARTITIONS_MAX: Final = 250_000

PartitionKey = tuple[bytes, int]
T = TypeVar("T")
#: Work that may pause at each `yield`.
_Steps = Generator[None, None, T]
#: How many partitions are looked at before the work may pause.
_STEP: Final = 50


class DelayedFetch(Protocol):
    """A long poll that waits for changes in the partitions of its session."""

    def bytes_arrived(self, count: int) -> None: ...
    def high_watermark_moved(self) -> None: ...
    def superseded(self) -> None: ...


class RequestedPartition:
    """One partition of a request or a session, and what the last response reported about it."""

    __slots__ = (
        "counted_epoch",
        "has_reported_error",
        "high_watermark",
        "is_uncounted",
        "key",
        "last_fetched_epoch",
        "last_stable_offset",
        "leader_epoch",
        "log_start_offset",
        "max_bytes",
        "offset",
        "partition",
        "session",
        "start_offset",
    )  # fmt: skip

    def __init__(self, key: PartitionKey, asked: FetchPartition, session: FetchSession | None = None) -> None:
        self.key = key
        self.session = session
        self.partition: Partition | None = None
        self.high_watermark = self.last_stable_offset = self.log_start_offset = -1
        self.has_reported_error = False
        self.ask(asked)

    def ask(self, asked: FetchPartition) -> None:
        self.offset = asked.offset
        self.start_offset = asked.log_start_offset  # of a follower's log
        self.max_bytes = asked.max_bytes
        self.leader_epoch = asked.leader_epoch
        self.last_fetched_epoch = asked.last_fetched_epoch
        self.counted_epoch = -1  # the leader epoch in which this counts as a follower's position
        self.is_uncounted = True

    def update_request(self, asked: FetchPartition) -> None:
        """Update the partition within a session.

        A reader that repeats its offset may not have received the last response, so the next one repeats everything.
        """
        if asked.offset == self.offset:
            self.high_watermark = self.last_stable_offset = self.log_start_offset = -1
        self.ask(asked)

    def attach(self, partition: Partition) -> None:
        """Register with the partition, so that it notifies the session of changes from now on."""
        self.detach()
        self.partition = partition
        if self.session is None:
            return
        if self.session.is_replica:
            partition.add_follower(self)
        else:
            partition.watch(self)

    def detach(self) -> None:
        partition, self.partition = self.partition, None
        if partition is not None and self.session is not None:
            partition.remove_follower(self) if self.session.is_replica else partition.unwatch(self)

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

    def fetch_state(self, leader_epoch: int) -> FollowerFetchState | None:
        session = self.session
        if session is None or self.counted_epoch != leader_epoch:
            return None
        from penstock.broker.partition.leader_replica import FollowerFetchState

        return FollowerFetchState(
            session.replica_id, self.offset, session.replica_epoch, session.heard_ms, self.start_offset
        )


class FetchSession:
    __slots__ = (
        "by_id", "dirty", "epoch", "heard_ms", "id", "isolation", "last_used_ms", "replica_epoch",
        "replica_id", "waiting", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        session_id: int,
        request: FetchRequest,
        wanted: dict[PartitionKey, RequestedPartition],
        *,
        by_id: bool,
        now_ms: int,
    ) -> None:
        self.id = session_id
        self.epoch = 1
        self.by_id = by_id
        self.last_used_ms = now_ms
        self.replica_id, self.replica_epoch = request.replica_id, request.replica_epoch
        self.heard_ms = 0  # when the last request came, by the monotonic clock that measures lag
        self.isolation = request.isolation_level
        self.waiting: DelayedFetch | None = None
        self.wanted = wanted
        for each in wanted.values():
            each.session = self
        #: Partitions to look at, in order; the reader has received everything of all others.
        self.dirty = dict(self.wanted)

    @property
    def is_replica(self) -> bool:
        return self.replica_id > CONSUMER_REPLICA_ID

    def update(self, request: FetchRequest) -> _Steps[None]:
        self.replica_epoch = request.replica_epoch
        until_pause = _STEP
        for name, partitions in request.topics:
            for asked in partitions:
                key = (name, asked.partition)
                known = self.wanted.get(key)
                if known is None:
                    known = self.wanted[key] = RequestedPartition(key, asked, self)
                else:
                    known.update_request(asked)
                self.dirty[key] = known
                until_pause -= 1
                if not until_pause:
                    until_pause = _STEP
                    yield
        for name, indexes in request.forgotten:
            for index in indexes:
                self._forget((name, index))
                until_pause -= 1
                if not until_pause:
                    until_pause = _STEP
                    yield
        if self.isolation != request.isolation_level:
            self.isolation = request.isolation_level
            self.dirty = dict(self.wanted)

    def _forget(self, key: PartitionKey) -> None:
        wanted = self.wanted.pop(key, None)
        if wanted is not None:
            wanted.detach()
            self.dirty.pop(key, None)

    def supersede(self) -> None:
        """End the request that still waits, because another one replaces it."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting.superseded()

    def close(self) -> None:
        self.epoch = _CLOSED_EPOCH
        self.supersede()
        for wanted in self.wanted.values():
            wanted.detach()


class FetchContext(NamedTuple):
    """How to serve a request; `session` is None for a request outside any session."""

    session: FetchSession | None
    wanted: dict[PartitionKey, RequestedPartition]
    is_incremental: bool
    error: ErrorCode = ErrorCode.none
    epoch: int = 0  # the session's epoch as long as this is its latest request


class FetchSessions:
    def __init__(
        self, slots_max: int, new_id: Callable[[], int], partitions_max: int = SESSION_PARTITIONS_MAX
    ) -> None:
        self._slots_max = slots_max
        self._partitions_max = partitions_max
        self._partitions = {False: 0, True: 0}  # in the sessions of consumers, and in those of followers
        self._new_id = new_id
        self._sessions: dict[int, FetchSession] = {}
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> FetchContext:
        steps = self.open_in_steps(request, by_id=by_id, now_ms=now_ms)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def open_in_steps(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> _Steps[FetchContext]:
        if request.session_epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            return (yield from self._open_full(request, by_id=by_id, now_ms=now_ms))
        session = self._sessions.get(request.session_id)
        if session is None or session.replica_id != request.replica_id:
            return FetchContext(None, {}, True, ErrorCode.fetch_session_id_not_found)
        if session.epoch != request.session_epoch:
            return FetchContext(None, {}, True, ErrorCode.invalid_fetch_session_epoch)
        if session.by_id != by_id:
            # The client switched between names and ids, for instance in an upgrade: it must start a new session.
            return FetchContext(None, {}, True, ErrorCode.fetch_session_topic_id_error)
        before = len(session.wanted)
        session.epoch = epoch = 1 if session.epoch == _EPOCH_MAX else session.epoch + 1
        session.last_used_ms = now_ms
        session.supersede()
        counted = before
        for _ in session.update(request):
            self._count(session, len(session.wanted) - counted)
            counted = len(session.wanted)
            yield
            if session.epoch != epoch:
                # Another request has ended the session or moved it on.
                return FetchContext(None, {}, True, ErrorCode.invalid_fetch_session_epoch)
        self._count(session, len(session.wanted) - counted)
        if self._partitions[session.is_replica] > self._partitions_max and len(session.wanted) > before:
            # The reader then sends a full request, which is served without a session.
            self._close(session)
            return FetchContext(None, {}, True, ErrorCode.fetch_session_id_not_found)
        if not session.wanted:
            self._close(session)
            return FetchContext(None, {}, True)
        return FetchContext(session, session.wanted, True, epoch=epoch)

    def _open_full(self, request: FetchRequest, *, by_id: bool, now_ms: int) -> _Steps[FetchContext]:
        wanted = yield from _requested(request)
        for before in self._replaced_by(request):
            self._close(before)
        if request.session_epoch == FINAL_EPOCH or not wanted or not self._make_room(request, now_ms):
            return FetchContext(None, wanted, False)
        session = FetchSession(self._fresh_id(), request, wanted, by_id=by_id, now_ms=now_ms)
        self._sessions[session.id] = session
        self._count(session, len(session.wanted))
        return FetchContext(session, session.wanted, False, epoch=session.epoch)

    def _replaced_by(self, request: FetchRequest) -> list[FetchSession]:
        """Return the sessions that a full request replaces: the one that it names, or all sessions of a follower.

        A follower has only one session per leader, and an older one holds an outdated position.
        """
        if request.replica_id > CONSUMER_REPLICA_ID:
            return [
                session for session in self._sessions.values() if session.replica_id == request.replica_id
            ]
        named = self._sessions.get(request.session_id)
        return [named] if named is not None and named.replica_id == request.replica_id else []

    def discard(self, session: FetchSession) -> None:
        """End a session of which the client will not learn."""
        if self._sessions.get(session.id) is session:
            self._close(session)

    def _close(self, session: FetchSession) -> None:
        del self._sessions[session.id]
        self._count(session, -len(session.wanted))
        session.close()

    def _count(self, session: FetchSession, partitions: int) -> None:
        self._partitions[session.is_replica] += partitions

    def _make_room(self, request: FetchRequest, now_ms: int) -> bool:
        """Make room for a session if possible, by closing the consumer session that has been idle for longest.

        A follower may replace any consumer session; a consumer only one that has been idle for long.
        """
        is_consumer = request.replica_id <= CONSUMER_REPLICA_ID
        asked = sum(len(partitions) for _, partitions in request.topics)
        if self._partitions[not is_consumer] + asked > self._partitions_max:
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
            if session_id != INVALID_SESSION_ID and session_id not in self._sessions:
                return session_id


def _requested(request: FetchRequest) -> _Steps[dict[PartitionKey, RequestedPartition]]:
    wanted = {}
    until_pause = _STEP
    for name, partitions in request.topics:
        for asked in partitions:
            key = (name, asked.partition)
            wanted[key] = RequestedPartition(key, asked)
            until_pause -= 1
            if not until_pause:
                until_pause = _STEP
                yield
    return wanted
