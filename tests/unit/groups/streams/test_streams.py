"""Streams groups (KIP-1071): tasks, topologies and epochs, also with lost replies and failovers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.groups.streams.world import COUNTING, GROUP, Client, FakeTopics, World

from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.streams import topology as topology_module
from penstock.groups.streams.streams_group import StreamsAssignorMember, assign_sticky
from penstock.groups.streams.topology import (
    NO_TASK_SETS,
    TASKS_MAX,
    CopartitionGroup,
    Endpoint,
    InternalTopic,
    StreamsStatusCode,
    Subtopology,
    TaskSets,
    Topology,
    configure_topology,
)
from penstock.protocol.errors import ApiError, ErrorCode

EVERY_TASK = {(name, partition) for name in ("0", "1") for partition in range(4)}


def codes(client: Client) -> list[StreamsStatusCode]:
    assert client.last is not None
    return [status.code for status in client.last.statuses]


def active(world: World) -> list[tuple[str, int]]:
    return sorted(task for client in world.clients.values() for task in TaskSets(client.owned.active).every())


def test_a_group_waits_for_its_internal_topics_and_then_assigns_every_task_once() -> None:
    world = World()
    a, b = world.client("a"), world.client("b")
    reply = world.beat(a)
    assert codes(a) == [StreamsStatusCode.MISSING_INTERNAL_TOPICS]
    assert [(topic.name, topic.partitions) for topic in reply.topics_to_create] == [
        ("g-changelog", 4),
        ("g-repartition", 4),
    ]
    assert world.group.state_name == "NotReady"
    world.beat(b)
    world.converge()
    assert codes(a) == codes(b) == []
    assert active(world) == sorted(EVERY_TASK)
    assert len(list(a.owned.every())) == len(list(b.owned.every())) == 4
    assert world.group.state_name == "Stable"
    world.reload()
    assert world.group.state_name == "Stable"


def test_missing_sources_are_named_and_assigned_once_they_are_there() -> None:
    world = World(topics=FakeTopics(clicks=2))
    a = world.client("a")
    reply = world.beat(a)
    assert codes(a) == [StreamsStatusCode.MISSING_SOURCE_TOPICS]
    assert "views" in reply.statuses[0].detail
    assert reply.topics_to_create == ()
    world.topics.put("views", 3)
    world.converge()
    assert len(active(world)) == 6


def test_the_first_assignment_waits_for_more_members() -> None:
    world = World(initial_delay_ms=3_000, topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    reply = world.beat(a)
    assert codes(a) == [StreamsStatusCode.ASSIGNMENT_DELAYED]
    assert reply.member_epoch > JOIN_GROUP_MEMBER_EPOCH, "epoch 0 would be another join"
    assert not a.owned
    world.beat(b)
    world.pass_time(3_000)
    world.beat(a)
    world.beat(b)
    assert codes(a) == codes(b) == []
    assert active(world) == sorted(EVERY_TASK), "no member had to revoke a task"


def test_a_member_that_falls_silent_loses_its_tasks_to_the_others() -> None:
    world = World(topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    world.beat(a)
    world.beat(b)
    world.converge()
    world.pass_time(44_000)
    world.beat(a)
    world.pass_time(2_000)
    assert list(world.group.members) == ["a"]
    world.beat(a)
    assert set(TaskSets(a.owned.active).every()) == EVERY_TASK
    world.beat(b)
    assert b.last is not None
    assert b.last.error is ErrorCode.unknown_member_id


def test_a_member_that_does_not_revoke_is_removed_after_its_rebalance_timeout() -> None:
    world = World(topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    world.beat(a)
    world.beat(a)
    world.beat(b)
    stuck = a.owned
    for _ in range(62):
        world.pass_time(5_000)
        if "a" not in world.group.members:
            break
        world.beat(a, take=False)
        a.owned = stuck
        world.beat(b)
        world.check()
    assert "a" not in world.group.members
    a.owned = NO_TASK_SETS
    world.beat(b)
    assert set(TaskSets(b.owned.active).every()) == EVERY_TASK


def test_a_member_that_missed_its_revocation_does_not_confirm_it() -> None:
    """It reports that it owns nothing, because it has not taken its first tasks yet, and may be about to."""
    world = World(topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    world.beat(a, take=False)
    world.beat(b)
    world.beat(a, reply_lost=True)  # it is told to revoke half of its tasks
    world.beat(a, reply_lost=True)
    world.beat(b)
    a.owned = a.assigned
    world.check()


def test_a_member_that_owns_just_what_it_keeps_confirms_without_a_report() -> None:
    """It has not taken its tasks when they are revoked again, and misses that: there is nothing to revoke or report."""
    world = World(topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    world.beat(a)
    world.beat(b)
    world.converge()
    kept = a.owned
    world.leave(b)
    world.beat(a, take=False)  # it is assigned all tasks again, and is slow to take them
    assert a.owned == kept
    world.beat(b)
    world.beat(a, take=False, reply_lost=True)
    world.converge()
    assert set(TaskSets(a.owned.active).every()) | set(TaskSets(b.owned.active).every()) == EVERY_TASK
    assert a.is_member


def test_standby_tasks_are_for_tasks_with_state_and_in_other_processes() -> None:
    world = World(topics=ready_topics(), standby_replicas=1)
    for member_id, process_id in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        world.beat(world.client(member_id, process_id))
    world.converge()
    standby = sorted(
        task for client in world.clients.values() for task in TaskSets(client.owned.standby).every()
    )
    assert standby == [("1", partition) for partition in range(4)]
    assert active(world) == sorted(EVERY_TASK)


def test_other_standby_settings_rebalance_the_group() -> None:
    world = World(topics=ready_topics())
    for member_id in "ab":
        world.beat(world.client(member_id))
    world.converge()
    world.standby_replicas = 1
    world.converge()
    assert any(client.owned.standby for client in world.clients.values())


def test_a_member_must_bring_the_topology_of_the_group() -> None:
    world = World(topics=ready_topics())
    world.beat(world.client("a"))
    other = world.client("b", topology=Topology(0, COUNTING.subtopologies[:1]))
    assert world.beat(other).error is ErrorCode.invalid_request
    assert list(world.group.members) == ["a"]
    world.leave(world.clients["a"])
    assert world.beat(other).error is ErrorCode.none, "a group without members takes a new topology"
    assert world.group.topology == other.topology


def test_a_shutdown_reaches_every_member() -> None:
    world = World(topics=ready_topics())
    a, b = world.client("a"), world.client("b")
    world.beat(a)
    world.beat(b)
    world.beat(a, shutdown_application=True)
    world.beat(b)
    assert StreamsStatusCode.SHUTDOWN_APPLICATION in codes(b)


def test_endpoints_say_where_partitions_can_be_queried() -> None:
    world = World(topics=ready_topics())
    a = world.client("a", endpoint=Endpoint("host-a", 8080))
    b = world.client("b")
    world.beat(a)
    world.beat(b)
    world.converge()
    reply = world.beat(b) if b.last is None or b.last.endpoints is None else b.last
    known = reply.endpoints or world.beat(world.client("c")).endpoints
    assert known is not None
    (at,) = known
    assert at.endpoint == Endpoint("host-a", 8080)
    reads = {topic: set(partitions) for topic, partitions in at.active.items()}
    assert reads["clicks"] == set(a.owned.active.get("0", ()))
    assert all(partition < 2 for partition in reads["views"])


@pytest.mark.parametrize(
    ("epoch_of", "error"),
    [
        (lambda epoch: epoch, ErrorCode.none),
        (lambda epoch: epoch + 1, ErrorCode.stale_member_epoch),
        (lambda epoch: epoch - 1, ErrorCode.none),  # it has had the task since its first epoch
        (lambda epoch: -1, ErrorCode.unknown_member_id),
    ],
)
def test_commits_are_checked_against_the_epochs_of_tasks(epoch_of, error) -> None:  # type: ignore[no-untyped-def]
    world = World(topics=ready_topics())
    a = world.client("a")
    world.beat(a)
    world.beat(world.client("b"))
    world.converge()
    (partition, *_) = sorted(a.owned.active.get("0", ()) or a.owned.active["1"])
    topic = "clicks" if a.owned.active.get("0") else "g-repartition"
    request = CommitRequest(
        group_id=GROUP,
        member_id="" if epoch_of(1) < 0 else "a",
        generation=epoch_of(a.epoch),
        offsets=(OffsetToCommit(topic=topic, partition=partition, offset=7),),
    )
    (reply,) = world.perform(world.shard.commit(request, "token", now_ms=world.now_ms))
    assert isinstance(reply, PartitionsReply)
    found = reply.error if reply.error is not ErrorCode.none else reply.partitions[0].error
    assert found is error


# Topologies


def ready_topics() -> FakeTopics:
    return FakeTopics(clicks=4, views=2, **{"g-repartition": 4, "g-changelog": 4})


def joined(*counts: int, fixed: int = 0) -> tuple[Topology, FakeTopics]:
    """Joins source topics with a repartition topic."""
    names = tuple(f"t{number}" for number in range(len(counts)))
    topology = Topology(
        0,
        (
            Subtopology("0", source_topics=("in",), repartition_sink_topics=("r",)),
            Subtopology(
                "1",
                source_topics=names,
                repartition_source_topics=(InternalTopic("r", fixed),),
                copartition_groups=(CopartitionGroup(tuple(range(len(names))), (), (0,)),),
            ),
        ),
    )
    return topology, FakeTopics(**{"in": 7}, **dict(zip(names, counts, strict=True)))


def test_repartition_topics_get_the_partitions_of_what_they_are_joined_with() -> None:
    configured = configure_topology(*joined(3, 3))
    assert configured.internal_topics["r"].partitions == 3
    assert configured.task_counts == {"0": 7, "1": 3}


@pytest.mark.parametrize(("counts", "fixed"), [((3, 4), 0), ((3, 3), 5)])
def test_topics_that_cannot_be_copartitioned_are_named(counts: tuple[int, ...], fixed: int) -> None:
    status = configure_topology(*joined(*counts, fixed=fixed)).status
    assert status is not None
    assert status.code is StreamsStatusCode.INCORRECTLY_PARTITIONED_TOPICS


def test_an_internal_topic_with_other_partitions_is_named() -> None:
    topics = ready_topics()
    topics.put("g-changelog", 3)
    status = configure_topology(COUNTING, topics).status
    assert status is not None
    assert status.code is StreamsStatusCode.INCORRECTLY_PARTITIONED_TOPICS


def test_a_long_chain_of_repartition_topics_costs_each_subtopology_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A megabyte of them, the last one first, would otherwise take minutes of the event loop."""
    length, asked = 500, 0
    largest_input = topology_module._largest_input

    def counted(*arguments: Any) -> int | None:
        nonlocal asked
        asked += 1
        return largest_input(*arguments)

    monkeypatch.setattr(topology_module, "_largest_input", counted)
    links = [
        Subtopology(
            f"{length - link:03d}",
            source_topics=() if link else ("clicks",),
            repartition_source_topics=(InternalTopic(f"r{link}"),) if link else (),
            repartition_sink_topics=(f"r{link + 1}",) if link + 1 < length else (),
        )
        for link in reversed(range(length))
    ]
    found = configure_topology(Topology(0, tuple(links)), FakeTopics(clicks=3))
    assert {topic.partitions for topic in found.internal_topics.values()} == {3}
    assert len(found.missing_topics) == length - 1
    assert asked <= 2 * length


def test_a_topology_with_too_many_tasks_is_refused() -> None:
    parts = tuple(Subtopology(f"{number:03d}", source_topics=("clicks",)) for number in range(201))
    assert (
        sum(configure_topology(Topology(0, parts[:200]), FakeTopics(clicks=100)).task_counts.values())
        == TASKS_MAX
    )
    with pytest.raises(ApiError) as refused:
        configure_topology(Topology(0, parts), FakeTopics(clicks=100))
    assert refused.value.code is ErrorCode.streams_invalid_topology


def test_a_loop_of_repartition_topics_is_refused() -> None:
    loop = Topology(
        0,
        (
            Subtopology("0", repartition_source_topics=(InternalTopic("a"),), repartition_sink_topics=("b",)),
            Subtopology("1", repartition_source_topics=(InternalTopic("b"),), repartition_sink_topics=("a",)),
        ),
    )
    with pytest.raises(ApiError) as refused:
        configure_topology(loop, FakeTopics())
    assert refused.value.code is ErrorCode.streams_invalid_topology


# The assignor


@given(
    processes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    counts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1),
    replicas=st.integers(0, 2),
    gone=st.integers(0, 3),
)
@settings(deadline=None)
def test_tasks_are_spread_evenly_and_stay_where_they_can(
    processes: list[int], counts: dict[str, int], replicas: int, gone: int
) -> None:
    members = {
        f"m{n}": StreamsAssignorMember(str(process), NO_TASK_SETS) for n, process in enumerate(processes)
    }
    tasks = {(name, partition) for name, count in counts.items() for partition in range(count)}
    first = assign_sticky(members, counts, counts, replicas)
    again = {
        member_id: StreamsAssignorMember(member.process_id, first[member_id])
        for member_id, member in members.items()
    }
    assert assign_sticky(again, counts, counts, replicas) == first, "nothing changed, so nothing moves"
    left = dict(list(again.items())[gone:]) or again
    second = assign_sticky(left, counts, counts, replicas)
    for candidates, found in ((members, first), (left, second)):
        owned = [task for sets in found.values() for task in TaskSets(sets.active).every()]
        assert sorted(owned) == sorted(tasks)
        sizes = [len(list(TaskSets(sets.active).every())) for sets in found.values()]
        assert max(sizes) - min(sizes) <= 1
        places = [
            (candidates[member_id].process_id, task)
            for member_id, sets in found.items()
            for task in sets.every()
        ]
        assert len(places) == len(set(places)), "no process has a task twice"
        others = len({candidate.process_id for candidate in candidates.values()}) - 1
        assert len(places) == len(tasks) * (1 + min(replicas, others))
    kept = sum(
        len(list(TaskSets(second[m].active).shared_with(TaskSets(first[m].active)).every())) for m in left
    )
    total, size = len(tasks), len(left)
    could_stay = sum(len(list(TaskSets(first[m].active).every())) for m in left)
    assert kept >= min(could_stay, total // size * size), "a task moves only where balance asks for it"


# Histories

ACTIONS = st.tuples(
    st.sampled_from(["beat", "beat", "beat", "beat", "leave", "time", "reload", "standby", "crash"]),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)


@given(
    history=st.lists(ACTIONS, max_size=60), delay_ms=st.sampled_from([0, 3_000]), standbys=st.integers(0, 2)
)
@settings(deadline=None, max_examples=150)
def test_no_task_is_ever_active_twice(
    history: list[tuple[str, int, bool, bool]], delay_ms: int, standbys: int
) -> None:
    world = World(initial_delay_ms=delay_ms, standby_replicas=standbys, topics=ready_topics())
    world.beat(world.client("m0", "p0"))
    for action, number, reply_lost, take in history:
        client = world.client(f"m{number}", f"p{number // 2}")
        match action:
            case "beat":
                world.beat(client, reply_lost=reply_lost, take=take)
            case "leave" if client.member_id in world.group.members:
                world.leave(client)
            case "time":
                world.pass_time(1_000 if reply_lost else 20_000)
            case "reload":
                world.reload()
            case "standby":
                world.standby_replicas = number % 3
            case "crash":
                # The process ends; the next one is another member of the same name.
                client.epoch, client.owned, client.assigned = (
                    JOIN_GROUP_MEMBER_EPOCH,
                    NO_TASK_SETS,
                    NO_TASK_SETS,
                )
        world.check()
    world.standby_replicas = min(world.standby_replicas, 1)
    world.pass_time(100_000)
    for client in world.clients.values():
        client.epoch, client.owned, client.assigned, client.is_member = (
            JOIN_GROUP_MEMBER_EPOCH,
            NO_TASK_SETS,
            NO_TASK_SETS,
            True,
        )
    world.converge()
    assert active(world) == sorted(EVERY_TASK)
    assert world.group.state_name == "Stable"
