"""One member of a classic group, and what it is waiting for."""

from collections.abc import Collection

from penstock.groups.messages import JoinRequest, Protocols
from penstock.groups.records import StoredMember
from penstock.groups.work import Token


class Member:
    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "instance_id",
        "is_new",
        "join_token",
        "member_id",
        "protocols",
        "rebalance_timeout_ms",
        "session_timeout_ms",
        "sync_token",
    )

    def __init__(
        self,
        *,
        member_id: str,
        instance_id: str | None,
        client_id: str,
        client_host: str,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
        protocols: Protocols,
        assignment: bytes = b"",
    ) -> None:
        self.member_id = member_id
        self.instance_id = instance_id
        self.client_id = client_id
        self.client_host = client_host
        self.rebalance_timeout_ms = rebalance_timeout_ms
        self.session_timeout_ms = session_timeout_ms
        self.protocols = protocols
        self.assignment = assignment
        #: A new member has no generation yet, so its parked join is no sign of life.
        self.is_new = False
        self.join_token: Token | None = None
        self.sync_token: Token | None = None

    @classmethod
    def joining(cls, request: JoinRequest, member_id: str) -> "Member":
        member = cls(
            member_id=member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            session_timeout_ms=request.session_timeout_ms,
            protocols=request.protocols,
        )
        member.is_new = True
        return member

    @classmethod
    def restored(cls, stored: StoredMember, protocol: str) -> "Member":
        """Only the chosen protocol's metadata is stored; the others come back when the member rejoins."""
        return cls(
            member_id=stored.member_id,
            instance_id=stored.instance_id,
            client_id=stored.client_id,
            client_host=stored.client_host,
            rebalance_timeout_ms=_or_session(stored),
            session_timeout_ms=stored.session_timeout_ms,
            protocols=((protocol, stored.subscription),),
            assignment=stored.assignment,
        )

    def __repr__(self) -> str:
        waiting = "join" if self.is_joining else "sync" if self.sync_token is not None else "nothing"
        return f"<Member {self.member_id} instance={self.instance_id} waits for {waiting}>"

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def is_joining(self) -> bool:
        return self.join_token is not None

    @property
    def needs_no_heartbeat(self) -> bool:
        """Whoever waits for us cannot heartbeat, and is not expected to."""
        return not self.is_new and (self.is_joining or self.sync_token is not None)

    def metadata(self, protocol: str) -> bytes:
        return next(metadata for name, metadata in self.protocols if name == protocol)

    def vote(self, candidates: Collection[str]) -> str:
        """Its favourite comes first in its list."""
        return next(name for name, _ in self.protocols if name in candidates)

    def is_stored_as(self, stored: StoredMember, protocol: str) -> bool:
        return protocol in dict(self.protocols) and self.stored(protocol, stored.assignment) == stored

    def stored(self, protocol: str, assignment: bytes) -> StoredMember:
        return StoredMember(
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self.client_id,
            client_host=self.client_host,
            rebalance_timeout_ms=self.rebalance_timeout_ms,
            session_timeout_ms=self.session_timeout_ms,
            subscription=self.metadata(protocol),
            assignment=assignment,
        )


def _or_session(stored: StoredMember) -> int:
    timeout_ms = stored.rebalance_timeout_ms
    return stored.session_timeout_ms if timeout_ms == -1 else timeout_ms
