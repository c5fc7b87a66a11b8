"""Share sessions (KIP-932): the partitions that a member reads on this broker, and the order of its requests.

A session belongs to the connection that opened it: when the connection is lost, the records that the member holds
are released. It belongs to the principal that opened it, too: member ids are no secret, and a user who may read the
group must not act for the member of another user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.broker.coordinators.requests import exceeds_utf8_bytes
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share import ShareFetchRequest
from penstock.security.principal import ANONYMOUS, Principal

if TYPE_CHECKING:
    from penstock.broker.network.connection import Connection

#: The epoch that ends a session.
FINAL_EPOCH: Final = -1
#: The epoch that opens a session.
INITIAL_EPOCH: Final = 0
_EPOCH_MAX: Final = 2**31 - 1
_MEMBER_CHARACTERS_MAX: Final = 36
#: Partitions in all sessions. Requests may list any number of partitions, even ones that do not exist.
SESSION_PARTITIONS_MAX: Final = 250_000

#: raw topic id, partition
RawTopicIdPartition = tuple[bytes, int]


class ShareSession:
    __slots__ = ("connection", "epoch", "group", "is_open", "member", "partitions", "principal")

    def __init__(self, group: str, member: str, connection: Connection | None) -> None:
        self.group, self.member = group, member
        self.connection = connection
        self.principal = _principal(connection)
        self.is_open = True
        self.epoch = 1
        self.partitions: dict[RawTopicIdPartition, None] = {}

    def next_epoch(self) -> None:
        self.epoch = 1 if self.epoch == _EPOCH_MAX else self.epoch + 1

    def update(self, request: ShareFetchRequest) -> None:
        for topic_id, partitions in request.topics:
            for index, _ in partitions:
                self.partitions[topic_id, index] = None
        for topic_id, indexes in request.forgotten:
            for index in indexes:
                self.partitions.pop((topic_id, index), None)

    def rotated(self) -> Sequence[RawTopicIdPartition]:
        """Start each request with a different partition, so that full responses do not starve any."""
        partitions = list(self.partitions)
        turn = self.epoch % len(partitions) if partitions else 0
        return partitions[turn:] + partitions[:turn]


def check_group_and_member(group: str | None, member: str | None, *, group_bytes_max: int) -> tuple[str, str]:
    """Raises ApiError."""
    if group is None or exceeds_utf8_bytes(group, group_bytes_max):
        raise ApiError(ErrorCode.invalid_request, "Invalid group id in the request.")
    if not member or len(member) > _MEMBER_CHARACTERS_MAX:
        raise ApiError(ErrorCode.invalid_request, "Invalid member id in the request.")
    return group, member


def _principal(connection: Connection | None) -> Principal:
    return ANONYMOUS if connection is None else connection.principal


class ShareSessions:
    def __init__(
        self,
        sessions_max: int,
        on_lost: Callable[[ShareSession], None],
        partitions_max: int = SESSION_PARTITIONS_MAX,
    ) -> None:
        self._sessions_max = sessions_max
        self._partitions_max = partitions_max
        self._partition_count = 0
        self._on_lost = on_lost
        self._sessions: dict[tuple[str, str], ShareSession] = {}
        self._by_connection: dict[Connection, dict[tuple[str, str], ShareSession]] = {}
        self._by_group: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def has_group(self, group: str) -> bool:
        return group in self._by_group

    def is_of(self, group: str, member: str, principal: Principal) -> bool:
        """Whether the member has a session, which this principal has opened."""
        session = self._sessions.get((group, member))
        return session is not None and session.principal == principal

    def fetch(
        self, request: ShareFetchRequest, group: str, member: str, connection: Connection | None
    ) -> ShareSession:
        """Return the session of a request and advance it. Raises ApiError."""
        if request.session_epoch == FINAL_EPOCH:
            return self._found(group, member, connection)
        if request.session_epoch != INITIAL_EPOCH:
            session = self._expected(group, member, request.session_epoch, connection)
            self._update(session, request)
            session.next_epoch()
            return session
        if any(batches for _, partitions in request.topics for _, batches in partitions):
            # They refer to records of an earlier session, whose locks may be lost.
            raise ApiError(ErrorCode.invalid_request, "acknowledgements on a new session")
        session = self._open(group, member, connection)
        try:
            self._update(session, request)
        except ApiError:
            self.close(session)
            raise
        return session

    def _update(self, session: ShareSession, request: ShareFetchRequest) -> None:
        """Raises SHARE_SESSION_LIMIT_REACHED."""
        requested = {(topic_id, index) for topic_id, partitions in request.topics for index, _ in partitions}
        if self._partition_count + len(requested - session.partitions.keys()) > self._partitions_max:
            raise ApiError(ErrorCode.share_session_limit_reached)
        before = len(session.partitions)
        session.update(request)
        self._partition_count += len(session.partitions) - before

    def acknowledge(self, group: str, member: str, epoch: int, connection: Connection | None) -> ShareSession:
        """Raises ApiError."""
        if epoch == INITIAL_EPOCH:
            raise ApiError(ErrorCode.invalid_share_session_epoch)
        if epoch == FINAL_EPOCH:
            return self._found(group, member, connection)
        session = self._expected(group, member, epoch, connection)
        session.next_epoch()
        return session

    def close(self, session: ShareSession) -> None:
        key = (session.group, session.member)
        if self._sessions.get(key) is not session:
            return
        del self._sessions[key]
        self._partition_count -= len(session.partitions)
        session.is_open = False
        self._by_group[session.group] -= 1
        if not self._by_group[session.group]:
            del self._by_group[session.group]
        if session.connection is not None:
            self._by_connection.get(session.connection, {}).pop(key, None)

    def _found(self, group: str, member: str, connection: Connection | None) -> ShareSession:
        session = self._sessions.get((group, member))
        if session is None or session.principal != _principal(connection):
            raise ApiError(ErrorCode.share_session_not_found)
        return session

    def _expected(self, group: str, member: str, epoch: int, connection: Connection | None) -> ShareSession:
        session = self._found(group, member, connection)
        if session.epoch != epoch:
            raise ApiError(ErrorCode.invalid_share_session_epoch)
        return session

    def _open(self, group: str, member: str, connection: Connection | None) -> ShareSession:
        """Replace an existing session of this member; its locks stay as they are."""
        if (group, member) in self._sessions:
            self.close(self._found(group, member, connection))
        if len(self._sessions) >= self._sessions_max:
            raise ApiError(ErrorCode.share_session_limit_reached)
        session = self._sessions[group, member] = ShareSession(group, member, connection)
        self._by_group[group] = self._by_group.get(group, 0) + 1
        if connection is not None:
            self._watch(connection)[group, member] = session
        return session

    def _watch(self, connection: Connection) -> dict[tuple[str, str], ShareSession]:
        sessions = self._by_connection.get(connection)
        if sessions is None:
            sessions = self._by_connection[connection] = {}
            before = connection.on_lost

            def lost() -> None:
                if before is not None:
                    before()
                self._lost(connection)

            connection.on_lost = lost
        return sessions

    def _lost(self, connection: Connection) -> None:
        for session in list(self._by_connection.pop(connection, {}).values()):
            self.close(session)
            self._on_lost(session)
