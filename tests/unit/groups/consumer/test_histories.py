"""Invariants of consumer groups with members of both protocols, lost replies, crashes and other coordinators.

A partition never has two owners, a fenced member cannot commit, and an undisturbed group becomes stable.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.groups.consumer.world import (
    SESSION_MS,
    Client,
    FakeTopics,
    NewClient,
    OldClient,
    World,
    compact,
    settle,
)

from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode

LOST = st.sampled_from(("", "", "", "reply", "decision"))
TOPICS = st.sampled_from((("t",), ("t", "u"), ("u",)))
PARTITIONS = st.integers(0, 5)
NUMBER = st.integers(0, 1 << 16)


class Histories(RuleBasedStateMachine):
    clients_max = 5

    @initialize(
        t=PARTITIONS,
        u=PARTITIONS,
        assignor=st.sampled_from((("uniform",), ("range",))),
        interval_ms=st.sampled_from((0, 1_500)),
    )
    def begin(self, t: int, u: int, assignor: tuple[str, ...], interval_ms: int) -> None:
        self.topics = FakeTopics()
        self.topics.set("t", t)
        self.topics.set("u", u)
        rules = GroupCoordinatorConfig(
            initial_rebalance_delay_ms=0, consumer_session_timeout_ms=SESSION_MS, consumer_assignors=assignor
        )
        self.world = World(rules, self.topics)
        self.world.assignment_interval_ms = interval_ms

    # Members

    def alive(self, kind: type[Client] = Client) -> list[Any]:
        return [client for client in self.world.clients if client.is_alive and isinstance(client, kind)]

    def free_instance(self, number: int) -> str | None:
        """A static client is replaced only when the one before it has gone."""
        name = f"i{number % 2}"
        taken = {client.instance_id for client in self.alive()}
        return name if number % 3 == 0 and name not in taken else None

    @precondition(lambda self: len(self.alive()) < self.clients_max)
    @rule(topics=TOPICS, number=NUMBER, lost=LOST)
    def comes(self, topics: tuple[str, ...], number: int, lost: str) -> None:
        client = NewClient(self.world, "N", topics, self.free_instance(number))
        client.beat(lost=lost)

    @precondition(lambda self: len(self.alive()) < self.clients_max)
    @rule(number=NUMBER)
    def comes_for_a_pattern(self, number: int) -> None:
        NewClient(self.world, "R", (), regex=".*", rack_id=f"r{number % 2}").beat()

    @precondition(lambda self: len(self.alive()) < self.clients_max)
    @rule(topics=TOPICS, number=NUMBER, cooperative=st.booleans(), lost=LOST)
    def old_one_comes(self, topics: tuple[str, ...], number: int, cooperative: bool, lost: str) -> None:
        instance_id = self.free_instance(number)
        if instance_id is not None:
            # A classic group lets a static member have what it had before, whatever it subscribes to now.
            topics = ("t", "u")
        OldClient(self.world, "O", topics, instance_id, cooperative=cooperative).move(lost=lost)

    @precondition(lambda self: self.alive(NewClient))
    @rule(number=NUMBER, lost=LOST, full=st.booleans(), adopts=st.booleans())
    def beats(self, number: int, lost: str, full: bool, adopts: bool) -> None:
        clients = self.alive(NewClient)
        client = clients[number % len(clients)]
        client.beat(lost=lost, full=full)
        if adopts:
            client.adopt()

    @precondition(lambda self: self.alive(OldClient))
    @rule(number=NUMBER, lost=LOST)
    def moves(self, number: int, lost: str) -> None:
        clients = self.alive(OldClient)
        clients[number % len(clients)].move(lost=lost)

    @precondition(lambda self: self.alive())
    @rule()
    def all_go_on(self) -> None:
        for client in self.alive():
            if isinstance(client, NewClient):
                client.beat()
                client.adopt()
            else:
                client.move()

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER, away=st.booleans())
    def leaves(self, number: int, away: bool) -> None:
        clients = self.alive()
        client = clients[number % len(clients)]
        if isinstance(client, NewClient):
            client.leave(away=away and client.instance_id is not None)
        else:
            client.leave()

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER)
    def crashes(self, number: int) -> None:
        clients = self.alive()
        clients[number % len(clients)].crash()

    # The world around them

    @rule(name=st.sampled_from(("t", "u")), partitions=PARTITIONS)
    def topic_changes(self, name: str, partitions: int) -> None:
        self.topics.set(name, partitions)

    @rule(by_ms=st.sampled_from((1, 1_000, 4_000, 9_000, 40_000)))
    def time_passes(self, by_ms: int) -> None:
        self.world.advance(by_ms)

    @rule(compacted=st.booleans())
    def coordinator_moves(self, compacted: bool) -> None:
        self.world.reload(compacted)

    # What must hold

    @precondition(lambda self: self.alive())
    @rule(number=NUMBER)
    def commits(self, number: int) -> None:
        clients = self.alive()
        client = clients[number % len(clients)]
        is_member = self.world.has_member(client)
        if client.epoch > 0 and not is_member:
            assert client.commit() is not ErrorCode.none
        elif isinstance(self.world.group, ConsumerGroup) and is_member:
            topic = self.topics.get("t")
            may = self.world.may_commit(client, (UUID(int=0) if topic is None else topic.id, 0))
            assert (client.commit() is ErrorCode.none) == may

    @rule(number=NUMBER)
    def any_part_of_the_log_can_be_loaded(self, number: int) -> None:
        ends = self.world.ends
        log = self.world.log[: ends[number % len(ends)]]
        whole, short = (GroupCoordinatorShard(self.world.settings, self.topics) for _ in range(2))
        for key, value in log:
            whole.replay(key, value)
        for key, value in compact(log):
            short.replay(key, value)
        assert whole.stored() == short.stored()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.advance(1)
            settle(self.world)


def test_a_member_that_missed_a_revocation_keeps_what_it_may_still_take() -> None:
    """It was assigned both partitions, took neither, and misses two replies: the first one revokes one of them."""
    history = Histories()
    history.begin(t=0, u=2, assignor=("uniform",), interval_ms=0)
    history.comes(("t", "u"), 0, "")
    history.commits(0)
    history.comes(("t", "u"), 0, "")
    history.beats(0, "reply", full=False, adopts=False)
    history.old_one_comes(("t",), 0, cooperative=False, lost="")
    history.beats(0, "reply", full=False, adopts=False)
    history.all_go_on()
    history.teardown()


def test_a_fenced_classic_member_does_not_come_back_with_what_it_owned() -> None:
    """Its session has ended, which it has not heard of, when it joins again because its topics have changed."""
    history = Histories()
    history.begin(t=0, u=1, assignor=("uniform",), interval_ms=0)
    history.old_one_comes(("t", "u"), 1, cooperative=True, lost="")
    history.all_go_on()
    history.time_passes(1)
    history.all_go_on()
    history.time_passes(40_000)
    history.comes(("u",), 1, "")
    history.topic_changes("t", 3)
    history.all_go_on()
    history.teardown()


def test_a_static_leader_that_returns_assigns_a_topic_that_was_created_meanwhile() -> None:
    history = Histories()
    history.begin(t=0, u=0, assignor=("uniform",), interval_ms=0)
    history.comes(("t",), 0, "")
    history.crashes(0)
    history.old_one_comes(("t",), 0, cooperative=False, lost="")
    history.crashes(0)
    history.topic_changes("t", 1)
    history.old_one_comes(("t",), 0, cooperative=False, lost="")
    history.teardown()


def test_a_revocation_that_is_not_confirmed_survives_two_conversions() -> None:
    """The group becomes a classic group and a consumer group again before the member lets go of the partition."""
    topics = FakeTopics()
    topics.set("t", 2)
    world = World(GroupCoordinatorConfig(initial_rebalance_delay_ms=0), topics)
    old = OldClient(world, "old", ("t",), cooperative=True)
    settle(world)
    assert len(old.owned) == 2
    first = NewClient(world, "first", ("t",))
    first.beat()
    old.move()  # its heartbeat is told to join again
    old.move(lost="reply")
    assert isinstance(world.group, ConsumerGroup)
    assert world.group.members[old.member_id].current.revoking
    first.leave()
    assert isinstance(world.group, ClassicGroup)
    second = NewClient(world, "second", ("t",))
    second.beat()
    assert (len(old.owned), second.told) == (2, set())
    settle(world)
    assert (len(old.owned), len(second.owned)) == (1, 1)


def test_a_cooperative_member_still_holds_what_its_last_assignment_takes_away() -> None:
    """The group becomes a consumer group before the member has heard of the assignment."""
    topics = FakeTopics()
    topics.set("t", 4)
    world = World(GroupCoordinatorConfig(initial_rebalance_delay_ms=0), topics)
    leader, old = (OldClient(world, name, ("t",), cooperative=True) for name in ("leader", "old"))
    settle(world)
    third = OldClient(world, "third", ("t",), cooperative=True)
    for client in (third, leader, old):
        client.move()  # it gets an id, or its heartbeat is told to join again
        client.move()
    old.move(lost="reply")
    held = set(old.owned)
    assert isinstance(world.group, ClassicGroup)
    assert len(held) == 2
    new = NewClient(world, "new", ("t",))
    new.beat()
    assert old.owned == held
    assert not new.told & held
    settle(world)
    assert len(leader.owned | old.owned | third.owned | new.owned) == 4


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
