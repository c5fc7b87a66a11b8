"""Invariants of classic groups under any sequence of requests, with crashes in between."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.groups.classic.script import subscription

from penstock.groups.classic.classic_group_data import ClassicGroupData, ClassicGroupState
from penstock.groups.group import (
    CommitRequest,
    GroupResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    OffsetToCommit,
    SyncRequest,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode

SETTINGS = GroupCoordinatorConfig(
    initial_rebalance_delay_ms=100,
    size_max=4,
    offsets_retention_ms=200_000,
    offsets_retention_check_interval_ms=50_000,
)
GROUPS = ("g", "h")
PROTOCOLS = (("range",), ("range", "sticky"), ("sticky", "range"), ("sticky",))
#: Longer than any timeout that a request below can ask for, one after the other.
LONG_ENOUGH_MS = 1_000_000


class World:
    """A shard with a log, and clients that remember what they were told, right or wrong."""

    def __init__(self) -> None:
        self.shard = GroupCoordinatorShard(SETTINGS)
        self.log: list[tuple[bytes, bytes | None]] = []
        self.now_ms = 0
        self.waiting: set[object] = set()
        self.life = 0
        self.ids_given = 0
        self.memory: dict[tuple[str, int], tuple[str, int]] = {}
        self.generations: dict[str, int] = {}
        self.owners: dict[tuple[int, str, int, str], int] = {}
        self.apply(self.shard.loaded(0))

    def apply(self, work: GroupResult) -> None:
        for key, value in work.records:
            self.log.append((key, value))
            self.shard.replay(key, value)
        for token, reply in work.replies:
            assert token in self.waiting, "answered twice, or never asked"
            self.waiting.discard(token)
            if isinstance(reply, JoinReply):
                self._joined(token, reply)
        self._check()

    def token(self, group: str, client: int, verb: str) -> tuple[Any, ...]:
        self.ids_given += 1
        token = (group, client, verb, self.ids_given)
        self.waiting.add(token)
        return token

    def advance(self, by_ms: int) -> None:
        target_ms = self.now_ms + by_ms
        for _ in range(10_000):
            deadline_ms = self.shard.next_deadline_ms()
            if deadline_ms is None or deadline_ms > target_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            self.apply(self.shard.tick(self.now_ms))
        else:
            raise AssertionError("time stands still")
        self.now_ms = target_ms

    def crash(self) -> None:
        """The shard is lost with everyone that waits in it; its log is not."""
        self.shard = self._reloaded()
        self.waiting.clear()
        self.generations.clear()
        self.life += 1
        self.apply(self.shard.loaded(self.now_ms))

    def _reloaded(self) -> GroupCoordinatorShard:
        shard = GroupCoordinatorShard(SETTINGS)
        for key, value in self.log:
            shard.replay(key, value)
        return shard

    def _joined(self, token: Any, reply: JoinReply) -> None:
        group, client = token[:2]
        if reply.error in (ErrorCode.none, ErrorCode.member_id_required):
            self.memory[group, client] = (reply.member_id, reply.generation)
        if reply.error is ErrorCode.none:
            owner = self.owners.setdefault((self.life, group, reply.generation, reply.member_id), client)
            assert owner == client, "two members of one generation have the same id"

    def _check(self) -> None:
        tokens = set()
        for group in self.shard.groups.values():
            check_consistent(group)
            tokens |= tokens_in(group)
            assert group.generation >= self.generations.get(group.group_id, 0), "generations never go back"
        assert tokens == self.waiting, "exactly the waiting requests are known"
        self.generations = {name: group.generation for name, group in self.shard.groups.items()}
        self._check_reload()

    def _check_reload(self) -> None:
        reloaded = self._reloaded()
        assert reloaded.stored() == self.shard.stored()
        for name, group in self.shard.groups.items():
            if group.state is ClassicGroupState.STABLE or (
                group.state is ClassicGroupState.EMPTY and group.stored is not None
            ):
                assert view(reloaded.groups[name]) == view(group)


def tokens_in(group: ClassicGroupData) -> set[object]:
    waiting = (token for member in group.members.values() for token in (member.join_token, member.sync_token))
    return {token for token in waiting if token is not None}


def check_consistent(group: ClassicGroupData) -> None:
    members = group.members
    assert all(name == member.member_id for name, member in members.items())
    assert group.joining_count == sum(member.is_joining for member in members.values())
    assert (group.leader in members) if members else group.leader is None
    assert not group.pending & set(members)
    assert group.unsynced <= set(members)
    instances = [member.instance_id for member in members.values() if member.instance_id is not None]
    assert len(instances) == len(set(instances))
    assert all(group.static_id(m.instance_id) == m.member_id for m in members.values() if m.is_static)
    assert (group.state is ClassicGroupState.EMPTY) <= (not members)
    if group.state is ClassicGroupState.STABLE:
        assert group.protocol is not None
        assert all(not member.is_joining and member.sync_token is None for member in members.values())


def view(group: ClassicGroupData) -> object:
    """What members can see of a group that no rebalance is changing."""
    assert group.stored is not None
    members = [
        (m.member_id, m.instance_id, m.assignment, m.session_timeout_ms) for m in group.members.values()
    ]
    return group.state, group.generation, group.protocol_type, group.protocol, group.leader, members


group_names = st.sampled_from(GROUPS)
clients = st.integers(0, 5)

operations = st.one_of(
    st.tuples(
        st.just("join"),
        group_names,
        clients,
        st.sampled_from(("same", "same", "new", "stale")),
        st.sampled_from(PROTOCOLS),
        st.sampled_from((3, 5, 9)),
    ),
    st.tuples(st.just("sync"), group_names, clients),
    st.tuples(st.just("gather"), group_names, st.sets(clients, min_size=1, max_size=4)),
    st.tuples(st.just("heartbeat"), group_names, clients),
    st.tuples(st.just("leave"), group_names, clients, st.booleans()),
    st.tuples(st.just("commit"), group_names, clients, st.booleans()),
    st.tuples(st.just("advance"), st.sampled_from((1, 100, 3_000, 10_000, 60_000, 300_000))),
    st.tuples(st.just("crash")),
    st.tuples(st.just("delete"), group_names),
    st.tuples(st.just("forget")),
)


def instance_of(client: int) -> str | None:
    """Clients 4 and 5 are two processes that fight for one instance; 3 has one of its own."""
    return {3: "own", 4: "shared", 5: "shared"}.get(client)


def join(
    world: World, group: str, client: int, whose_id: str, protocols: tuple[str, ...], version: int
) -> None:
    member_id = world.memory.get((group, client), ("", -1))[0]
    if whose_id != "same":
        member_id = "" if whose_id == "new" else "never-given"
    request = JoinRequest(
        group_id=group,
        member_id=member_id,
        instance_id=instance_of(client),
        client_id=f"c{client}",
        client_host="/host",
        session_timeout_ms=10_000 + 1_000 * client,
        rebalance_timeout_ms=60_000,
        protocol_type="consumer",
        protocols=tuple((name, subscription(("t",), name.encode())) for name in protocols),
        member_id_required=version >= 4,
        can_skip_assignment=version >= 9,
    )
    token = world.token(group, client, "join")
    world.apply(world.shard.join(request, token, now_ms=world.now_ms, new_member_id=f"m{world.ids_given}"))


def sync(world: World, group: str, client: int) -> None:
    member_id, generation = world.memory.get((group, client), ("", -1))
    members = world.shard.groups[group].members if group in world.shard.groups else {}
    request = SyncRequest(
        group_id=group,
        generation=generation,
        member_id=member_id,
        instance_id=instance_of(client),
        assignments=tuple((name, f"{generation}:{name}".encode()) for name in members),
    )
    token = world.token(group, client, "sync")
    world.apply(world.shard.sync(request, token, now_ms=world.now_ms))


def gather(world: World, group: str, who: set[int]) -> None:
    """These clients do all the right things: most of what can go wrong starts from a stable group."""
    for client in sorted(who):
        for _ in range(2):
            join(world, group, client, "same", PROTOCOLS[1], 9)
    world.advance(100)
    for client in sorted(who):
        sync(world, group, client)


def heartbeat(world: World, group: str, client: int) -> None:
    member_id, generation = world.memory.get((group, client), ("", -1))
    request = HeartbeatRequest(
        group_id=group, generation=generation, member_id=member_id, instance_id=instance_of(client)
    )
    token = world.token(group, client, "heartbeat")
    world.apply(world.shard.heartbeat(request, token, now_ms=world.now_ms))


def leave(world: World, group: str, client: int, by_instance: bool) -> None:
    member_id = world.memory.get((group, client), ("", -1))[0]
    leaving = LeavingMember(member_id="" if by_instance else member_id, instance_id=instance_of(client))
    token = world.token(group, client, "leave")
    request = LeaveRequest(group_id=group, members=(leaving,))
    world.apply(world.shard.leave(request, token, now_ms=world.now_ms))


def commit(world: World, group: str, client: int, from_outside: bool) -> None:
    member_id, generation = ("", -1) if from_outside else world.memory.get((group, client), ("", -1))
    request = CommitRequest(
        group_id=group,
        member_id=member_id,
        generation=generation,
        instance_id=None if from_outside else instance_of(client),
        offsets=(OffsetToCommit(topic="tuv"[client % 3], partition=client, offset=world.now_ms),),
    )
    token = world.token(group, client, "commit")
    world.apply(world.shard.commit(request, token, now_ms=world.now_ms))


def delete(world: World, group: str) -> None:
    token = world.token(group, -1, "delete")
    world.apply(world.shard.delete_groups((group,), token, now_ms=world.now_ms))
    if group not in world.shard.groups:
        world.generations.pop(group, None)


def forget(world: World) -> None:
    token = world.token("", -1, "forget")
    world.apply(world.shard.forget_topics(("t",), token, now_ms=world.now_ms))


ACTIONS = {
    "join": join,
    "sync": sync,
    "gather": gather,
    "heartbeat": heartbeat,
    "leave": leave,
    "commit": commit,
    "delete": delete,
    "forget": forget,
    "advance": World.advance,
    "crash": World.crash,
}


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=60))
def test_groups_stay_sound(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for name, *arguments in steps:
        ACTIONS[name](world, *arguments)
    world.advance(LONG_ENOUGH_MS)
    assert not world.waiting, "everyone is answered in the end"
    assert all(group.state is ClassicGroupState.EMPTY for group in world.shard.groups.values())
