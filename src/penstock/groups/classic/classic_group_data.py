"""The data of a classic group: members, state and generation, and the part of it that is stored.

A member knows which of its requests wait for a reply. The states form one table; a transition that is absent from it
cannot happen. The stored part is the last record that was replayed, which `install` receives. A rebalance runs ahead
of it, in memory only, until the leader's assignment is written or the last member has left. A group that is loaded
again has its stored state, and its members notice that by their generation.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum
from typing import Final

from penstock.groups.coordinator_records import GroupMetadataRecord, StoredGroup, StoredMember
from penstock.groups.embedded_protocol import CONSUMER_PROTOCOL_TYPE, subscribed_topics
from penstock.groups.group import JoinRequest, Protocols, ReplyToken
from penstock.protocol.errors import ErrorCode


class ClassicGroupState(Enum):
    """The values are the names that Kafka prints."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


CLASSIC_GROUP_TRANSITIONS: Final[dict[ClassicGroupState, frozenset[ClassicGroupState]]] = {
    ClassicGroupState.EMPTY: frozenset({ClassicGroupState.PREPARING_REBALANCE, ClassicGroupState.DEAD}),
    ClassicGroupState.PREPARING_REBALANCE: frozenset(
        {ClassicGroupState.COMPLETING_REBALANCE, ClassicGroupState.EMPTY, ClassicGroupState.DEAD}
    ),
    ClassicGroupState.COMPLETING_REBALANCE: frozenset(
        {ClassicGroupState.STABLE, ClassicGroupState.PREPARING_REBALANCE, ClassicGroupState.DEAD}
    ),
    ClassicGroupState.STABLE: frozenset({ClassicGroupState.PREPARING_REBALANCE, ClassicGroupState.DEAD}),
    ClassicGroupState.DEAD: frozenset(),
}


class ClassicGroupMember:
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
        #: A new member has no generation yet, so its waiting join does not prove that it is alive.
        self.is_new = False
        self.join_token: ReplyToken | None = None
        self.sync_token: ReplyToken | None = None

    @classmethod
    def joining(cls, request: JoinRequest, member_id: str) -> "ClassicGroupMember":
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
    def restored(cls, stored: StoredMember, protocol: str) -> "ClassicGroupMember":
        """Only the chosen protocol's metadata is stored; the others come back when the member rejoins."""
        return cls(
            member_id=stored.member_id,
            instance_id=stored.instance_id,
            client_id=stored.client_id,
            client_host=stored.client_host,
            rebalance_timeout_ms=_stored_rebalance_timeout_ms(stored),
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
        """A member that waits for a reply of the coordinator cannot send heartbeats."""
        return not self.is_new and (self.is_joining or self.sync_token is not None)

    def metadata(self, protocol: str) -> bytes:
        return next(metadata for name, metadata in self.protocols if name == protocol)

    def vote(self, candidates: Collection[str]) -> str:
        """The first candidate in the member's list, which is in order of preference."""
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


def _stored_rebalance_timeout_ms(stored: StoredMember) -> int:
    timeout_ms = stored.rebalance_timeout_ms
    return stored.session_timeout_ms if timeout_ms == -1 else timeout_ms


class ClassicGroupData:
    __slots__ = (
        "_protocol_support",
        "_static_ids",
        "generation",
        "group_id",
        "initial_remaining_ms",
        "is_initial",
        "joining_count",
        "leader",
        "members",
        "new_member_arrived",
        "pending",
        "protocol",
        "protocol_type",
        "state",
        "stored",
        "subscribed",
        "unsynced",
    )

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.state = ClassicGroupState.EMPTY
        self.stored: StoredGroup | None = None
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, ClassicGroupMember] = {}
        self._static_ids: dict[str, str] = {}
        self._protocol_support: Counter[str] = Counter()
        #: Ids that the coordinator has assigned, and with which no member has joined yet.
        self.pending: set[str] = set()
        #: Members that received this generation and have not sent SyncGroup yet.
        self.unsynced: set[str] = set()
        self.joining_count = 0
        #: The topics that members consume; None if that cannot be known.
        self.subscribed: frozenset[str] | None = None
        #: The first rebalance of an empty group waits for more members, at most `initial_remaining_ms` longer.
        self.is_initial = False
        self.initial_remaining_ms = 0
        self.new_member_arrived = False

    def __repr__(self) -> str:
        return (
            f"<ClassicGroup {self.group_id} {self.state.value} generation={self.generation}"
            f" members={list(self.members.values())} pending={sorted(self.pending)}>"
        )

    # Properties

    @property
    def is_consumer_group(self) -> bool:
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    @property
    def can_rebalance(self) -> bool:
        return ClassicGroupState.PREPARING_REBALANCE in CLASSIC_GROUP_TRANSITIONS[self.state]

    @property
    def is_rebalancing(self) -> bool:
        """A rebalance is in progress, of which nothing is stored."""
        return self.state in (ClassicGroupState.PREPARING_REBALANCE, ClassicGroupState.COMPLETING_REBALANCE)

    @property
    def all_joined(self) -> bool:
        return self.joining_count == len(self.members) and not self.pending

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def static_id(self, instance_id: str | None) -> str | None:
        return None if instance_id is None else self._static_ids.get(instance_id)

    def check_member(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if instance_id is not None:
            current_id = self.static_id(instance_id)
            if current_id is None:
                return ErrorCode.unknown_member_id
            if current_id != member_id:
                return ErrorCode.fenced_instance_id
        return ErrorCode.none if member_id in self.members else ErrorCode.unknown_member_id

    # Protocols

    def supports(self, protocol_type: str, protocols: Protocols) -> bool:
        # A protocol that is listed twice would count as supported by two members.
        if len({name for name, _ in protocols}) != len(protocols):
            return False
        if self.state is ClassicGroupState.EMPTY:
            return bool(protocol_type) and bool(protocols)
        return self.protocol_type == protocol_type and any(
            self._protocol_support[name] == len(self.members) for name, _ in protocols
        )

    def choose_protocol(self) -> str:
        """Of the protocols that all members support, the one that most members prefer; in a tie the first one."""
        candidates = {name for name, count in self._protocol_support.items() if count == len(self.members)}
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return max(votes, key=votes.__getitem__)

    # Members

    def add(self, member: ClassicGroupMember, protocol_type: str) -> None:
        assert member.member_id not in self.members, member
        if member.instance_id is not None:
            assert member.instance_id not in self._static_ids, member
            self._static_ids[member.instance_id] = member.member_id
        if not self.members:
            self.protocol_type = protocol_type
        if self.leader is None:
            self.leader = member.member_id
        self.members[member.member_id] = member
        self._protocol_support.update(name for name, _ in member.protocols)
        self.pending.discard(member.member_id)

    def remove(self, member_id: str) -> ClassicGroupMember | None:
        self.pending.discard(member_id)
        self.unsynced.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return None
        self._protocol_support.subtract(name for name, _ in member.protocols)
        if member.instance_id is not None:
            del self._static_ids[member.instance_id]
        if member.is_joining:
            self.joining_count -= 1
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        return member

    def replace_static(self, old_id: str, new_id: str) -> ClassicGroupMember:
        """Give a static member a new id. It keeps its assignment and its position among the members."""
        member = self.members[old_id]
        assert member.instance_id is not None
        assert member.join_token is None
        assert member.sync_token is None
        # Rebuilt in the same order, because the first member is the next leader.
        self.members = {
            (new_id if member_id == old_id else member_id): other for member_id, other in self.members.items()
        }
        member.member_id = new_id
        self._static_ids[member.instance_id] = new_id
        self.unsynced.discard(old_id)
        if self.leader == old_id:
            self.leader = new_id
        return member

    def update(self, member: ClassicGroupMember, request: JoinRequest) -> None:
        self._protocol_support.subtract(name for name, _ in member.protocols)
        member.protocols = request.protocols
        self._protocol_support.update(name for name, _ in member.protocols)
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.session_timeout_ms = request.session_timeout_ms
        member.client_id, member.client_host = request.client_id, request.client_host

    def park_join(self, member: ClassicGroupMember, token: ReplyToken) -> None:
        assert member.join_token is None
        member.join_token = token
        self.joining_count += 1

    def take_join(self, member: ClassicGroupMember) -> ReplyToken | None:
        """Return the token of the member's waiting join. The caller now has to reply to it."""
        token, member.join_token = member.join_token, None
        if token is not None:
            self.joining_count -= 1
        return token

    def elect_joined_leader(self) -> bool:
        """Replace a leader that has not rejoined. Return False if no member has rejoined."""
        if self.leader is not None and self.members[self.leader].is_joining:
            return True
        self.leader = next((m.member_id for m in self.members.values() if m.is_joining), self.leader)
        return self.leader is not None and self.members[self.leader].is_joining

    # States

    def move(self, state: ClassicGroupState) -> None:
        assert state in CLASSIC_GROUP_TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state

    def begin_generation(self) -> None:
        self.generation += 1
        self.protocol = self.choose_protocol()
        self.subscribed = self._subscribed_topics()
        self.unsynced = set(self.members)
        self.is_initial = False
        self.move(ClassicGroupState.COMPLETING_REBALANCE)

    # Records

    def emptied(self, now_ms: int) -> GroupMetadataRecord:
        assert not self.members
        return self._record(generation=self.generation + 1, protocol=None, now_ms=now_ms, assignments={})

    def assigned(self, assignments: Mapping[str, bytes], now_ms: int) -> GroupMetadataRecord:
        """Members that the leader left out get an empty assignment."""
        assert self.members
        assert self.protocol is not None
        return self._record(
            generation=self.generation, protocol=self.protocol, now_ms=now_ms, assignments=assignments
        )

    def renamed(self, old_id: str, new_id: str) -> GroupMetadataRecord | None:
        """The stored group with a static member's new id; None if the member is not stored yet."""
        if self.stored is None or all(each.member_id != old_id for each in self.stored.members):
            return None
        members = tuple(
            replace(each, member_id=new_id) if each.member_id == old_id else each
            for each in self.stored.members
        )
        leader = new_id if self.stored.leader == old_id else self.stored.leader
        return GroupMetadataRecord(
            group=self.group_id, value=replace(self.stored, leader=leader, members=members)
        )

    def install(self, stored: StoredGroup) -> None:
        """Apply a stored record. Members that are already in memory keep their waiting requests."""
        known = self.stored
        if known is not None and self.is_rebalancing and stored.generation <= known.generation:
            # Only the id of a static member changed in the stored group; the rebalance goes on.
            self.stored = stored
            return
        protocol = stored.protocol or ""
        alive = self.members
        self.stored = stored
        self.generation = stored.generation
        self.protocol = stored.protocol
        self.protocol_type = stored.protocol_type or None
        self.leader = None
        self.members, self._static_ids, self._protocol_support = {}, {}, Counter()
        for each in stored.members:
            member = alive.get(each.member_id)
            if member is None or not member.is_stored_as(each, protocol):
                member = ClassicGroupMember.restored(each, protocol)
            member.assignment = each.assignment
            self.add(member, stored.protocol_type)
        if stored.leader in self.members:
            self.leader = stored.leader
        self.state = ClassicGroupState.STABLE if stored.members else ClassicGroupState.EMPTY
        self.is_initial = False
        self.joining_count = sum(member.is_joining for member in self.members.values())
        self.subscribed = self._subscribed_topics()

    def _record(
        self, *, generation: int, protocol: str | None, now_ms: int, assignments: Mapping[str, bytes]
    ) -> GroupMetadataRecord:
        stored = StoredGroup(
            protocol_type=self.protocol_type or "",
            generation=generation,
            protocol=protocol,
            leader=self.leader,
            state_timestamp_ms=now_ms,
            members=tuple(
                member.stored(protocol or "", assignments.get(member.member_id, b""))
                for member in self.members.values()
            ),
        )
        return GroupMetadataRecord(group=self.group_id, value=stored)

    def _subscribed_topics(self) -> frozenset[str] | None:
        if not self.is_consumer_group:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            assert self.protocol is not None
            parsed = subscribed_topics(member.metadata(self.protocol))
            if parsed is None:
                return None
            topics |= parsed
        return frozenset(topics)
