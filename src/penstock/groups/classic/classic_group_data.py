"""A classic group: who is in it, in which state and generation, and what of that is stored.

Stored is what `install` was given: the last record replayed. A rebalance runs ahead of it in memory only,
until the leader's assignment (or the departure of the last member) is written. A group that is loaded again
comes back as it was stored, and its members find out by their generation.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.groups.member import Member
from penstock.groups.messages import JoinRequest, Protocols
from penstock.groups.records import GroupRecord, StoredGroup
from penstock.groups.states import TRANSITIONS, State
from penstock.groups.subscription import CONSUMER_PROTOCOL_TYPE, subscribed_topics
from penstock.groups.work import Token
from penstock.protocol.errors import ErrorCode


class ClassicGroup:
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
        self.state = State.EMPTY
        self.stored: StoredGroup | None = None
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        self._static_ids: dict[str, str] = {}
        self._protocol_support: Counter[str] = Counter()
        #: Ids given out, whose owners have yet to join with them.
        self.pending: set[str] = set()
        #: Members that were told of this generation and have not asked for their assignment.
        self.unsynced: set[str] = set()
        self.joining_count = 0
        #: The topics that members consume; None when that cannot be known.
        self.subscribed: frozenset[str] | None = None
        #: The first rebalance of an empty group waits for more members, for so long at most.
        self.is_initial = False
        self.initial_remaining_ms = 0
        self.new_member_arrived = False

    def __repr__(self) -> str:
        return (
            f"<ClassicGroup {self.group_id} {self.state.value} generation={self.generation}"
            f" members={list(self.members.values())} pending={sorted(self.pending)}>"
        )

    # What it is

    @property
    def is_consumer_group(self) -> bool:
        return self.protocol_type == CONSUMER_PROTOCOL_TYPE

    @property
    def can_rebalance(self) -> bool:
        return State.PREPARING_REBALANCE in TRANSITIONS[self.state]

    @property
    def is_rebalancing(self) -> bool:
        """A rebalance is under way, which nothing stored tells of."""
        return self.state in (State.PREPARING_REBALANCE, State.COMPLETING_REBALANCE)

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
        # One that is named twice would count as supported by two members.
        if len({name for name, _ in protocols}) != len(protocols):
            return False
        if self.state is State.EMPTY:
            return bool(protocol_type) and bool(protocols)
        return self.protocol_type == protocol_type and any(
            self._protocol_support[name] == len(self.members) for name, _ in protocols
        )

    def choose_protocol(self) -> str:
        """The one that most members prefer of those that all support; among equals, the first voted for."""
        candidates = {name for name, count in self._protocol_support.items() if count == len(self.members)}
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return max(votes, key=votes.__getitem__)

    # Members

    def add(self, member: Member, protocol_type: str) -> None:
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

    def remove(self, member_id: str) -> Member | None:
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

    def replace_static(self, old_id: str, new_id: str) -> Member:
        """The same place in the group, with its assignment, under a new id."""
        member = self.members[old_id]
        assert member.instance_id is not None
        assert member.join_token is None
        assert member.sync_token is None
        # Rebuilt in order, so that who comes first (and would lead next) does not change.
        self.members = {
            (new_id if member_id == old_id else member_id): other for member_id, other in self.members.items()
        }
        member.member_id = new_id
        self._static_ids[member.instance_id] = new_id
        self.unsynced.discard(old_id)
        if self.leader == old_id:
            self.leader = new_id
        return member

    def update(self, member: Member, request: JoinRequest) -> None:
        self._protocol_support.subtract(name for name, _ in member.protocols)
        member.protocols = request.protocols
        self._protocol_support.update(name for name, _ in member.protocols)
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.session_timeout_ms = request.session_timeout_ms
        member.client_id, member.client_host = request.client_id, request.client_host

    def park_join(self, member: Member, token: Token) -> None:
        assert member.join_token is None
        member.join_token = token
        self.joining_count += 1

    def take_join(self, member: Member) -> Token | None:
        """The token of its parked join, which the caller now owes a reply."""
        token, member.join_token = member.join_token, None
        if token is not None:
            self.joining_count -= 1
        return token

    def elect_joined_leader(self) -> bool:
        """A leader that did not come back loses its office. False when nobody came back."""
        if self.leader is not None and self.members[self.leader].is_joining:
            return True
        self.leader = next((m.member_id for m in self.members.values() if m.is_joining), self.leader)
        return self.leader is not None and self.members[self.leader].is_joining

    # States

    def move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state

    def begin_generation(self) -> None:
        self.generation += 1
        self.protocol = self.choose_protocol()
        self.subscribed = self._subscribed_topics()
        self.unsynced = set(self.members)
        self.is_initial = False
        self.move(State.COMPLETING_REBALANCE)

    # What is stored

    def emptied(self, now_ms: int) -> GroupRecord:
        assert not self.members
        return self._record(generation=self.generation + 1, protocol=None, now_ms=now_ms, assignments={})

    def assigned(self, assignments: Mapping[str, bytes], now_ms: int) -> GroupRecord:
        """Members that the leader left out get nothing."""
        assert self.members
        assert self.protocol is not None
        return self._record(
            generation=self.generation, protocol=self.protocol, now_ms=now_ms, assignments=assignments
        )

    def renamed(self, old_id: str, new_id: str) -> GroupRecord | None:
        """What is stored, with a static member's new id in it; None if its instance is not stored yet."""
        if self.stored is None or all(each.member_id != old_id for each in self.stored.members):
            return None
        members = tuple(
            replace(each, member_id=new_id) if each.member_id == old_id else each
            for each in self.stored.members
        )
        leader = new_id if self.stored.leader == old_id else self.stored.leader
        return GroupRecord(group=self.group_id, value=replace(self.stored, leader=leader, members=members))

    def install(self, stored: StoredGroup) -> None:
        """Become what the record says. Members that live here already keep what they are waiting for."""
        known = self.stored
        if known is not None and self.is_rebalancing and stored.generation <= known.generation:
            # A name changed in what is stored, while the rebalance goes on.
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
                member = Member.restored(each, protocol)
            member.assignment = each.assignment
            self.add(member, stored.protocol_type)
        if stored.leader in self.members:
            self.leader = stored.leader
        self.state = State.STABLE if stored.members else State.EMPTY
        self.is_initial = False
        self.joining_count = sum(member.is_joining for member in self.members.values())
        self.subscribed = self._subscribed_topics()

    def _record(
        self, *, generation: int, protocol: str | None, now_ms: int, assignments: Mapping[str, bytes]
    ) -> GroupRecord:
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
        return GroupRecord(group=self.group_id, value=stored)

    def _subscribed_topics(self) -> frozenset[str] | None:
        if not self.is_consumer_group:
            return None
        topics: set[str] = set()
        for subscription in self._subscriptions():
            parsed = subscribed_topics(subscription)
            if parsed is None:
                return None
            topics |= parsed
        return frozenset(topics)

    def _subscriptions(self) -> Iterator[bytes]:
        for member in self.members.values():
            assert self.protocol is not None
            yield member.metadata(self.protocol)
