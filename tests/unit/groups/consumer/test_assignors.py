"""Assignors: every partition is assigned, evenly, with few moves, near its replicas, and deterministically."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.consumer.assignors import (
    ConsumerAssignorMember,
    ConsumerAssignorMembers,
    TargetAssignments,
    consumer_assignor,
)
from penstock.groups.topics import Topic

RACKS = ("a", "b", "c")
Topics = dict[UUID, Topic]


def make_topics(*counts: int, spread: bool = False) -> Topics:
    made = {}
    for number, count in enumerate(counts):
        id = UUID(int=number + 1)
        racks = tuple(frozenset({RACKS[each % 3]}) if spread else frozenset() for each in range(count))
        made[id] = Topic(f"t{number}", id, racks)
    return made


def make_members(count: int, topics: Topics, racks: bool = False) -> ConsumerAssignorMembers:
    return {
        f"m{number:03}": ConsumerAssignorMember(frozenset(topics), RACKS[number % 3] if racks else None, {})
        for number in range(count)
    }


def settled(
    members: ConsumerAssignorMembers, targets: TargetAssignments
) -> dict[str, ConsumerAssignorMember]:
    return {name: member._replace(target=targets[name]) for name, member in members.items()}


def loads(targets: TargetAssignments) -> list[int]:
    return [sum(map(len, target.values())) for target in targets.values()]


def moved(before: TargetAssignments, after: TargetAssignments) -> int:
    return sum(
        len(partitions - before.get(name, {}).get(id, frozenset()))
        for name, target in after.items()
        for id, partitions in target.items()
    )


def near(members: ConsumerAssignorMembers, topics: Topics, targets: TargetAssignments) -> int:
    return sum(
        members[name].rack in topics[id].racks[partition]
        for name, target in targets.items()
        for id, partitions in target.items()
        for partition in partitions
    )


@pytest.mark.parametrize("name", ["uniform", "range"])
@given(data=st.data())
def test_every_partition_goes_to_one_subscriber_and_nothing_moves_without_a_reason(
    name: str, data: st.DataObject
) -> None:
    topics = make_topics(*data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)), spread=True)
    subscriptions = st.frozensets(st.sampled_from(sorted(topics)), min_size=1)
    members = {
        f"m{number}": ConsumerAssignorMember(
            data.draw(subscriptions), data.draw(st.sampled_from((None, *RACKS))), {}
        )
        for number in range(data.draw(st.integers(1, 7)))
    }
    targets = consumer_assignor(name)(members, topics)
    given_out = [(id, n) for target in targets.values() for id, numbers in target.items() for n in numbers]
    subscribed = {id for member in members.values() for id in member.topics}
    assert sorted(given_out) == [
        (id, n) for id in sorted(subscribed) for n in range(topics[id].partition_count)
    ]
    assert all(set(target) <= members[member_id].topics for member_id, target in targets.items())
    assert consumer_assignor(name)(settled(members, targets), topics) == targets


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 8), st.booleans()
)
def test_uniform_is_even_and_moves_no_more_than_it_must(
    counts: list[int], before: int, after: int, racks: bool
) -> None:
    topics = make_topics(*counts, spread=racks)
    total = sum(counts)
    first = consumer_assignor("uniform")(make_members(before, topics, racks), topics)
    assert max(loads(first)) - min(loads(first)) <= 1
    members = {
        name: member._replace(target=first.get(name, {}))
        for name, member in make_members(after, topics, racks).items()
    }
    second = consumer_assignor("uniform")(members, topics)
    assert max(loads(second)) - min(loads(second)) <= 1
    # What those hold that are still there, up to their new share, stays with them.
    kept = sorted((sum(map(len, first.get(name, {}).values())) for name in members), reverse=True)
    shares = sorted(loads(second), reverse=True)
    assert moved(first, second) == total - sum(map(min, kept, shares))


def test_uniform_evens_out_what_different_subscriptions_allow() -> None:
    topics = make_topics(6, 6)
    one, two = topics
    members = {
        "both": ConsumerAssignorMember(frozenset(topics), None, {}),
        "one": ConsumerAssignorMember(frozenset({one}), None, {}),
        "two": ConsumerAssignorMember(frozenset({two}), None, {}),
    }
    assert loads(consumer_assignor("uniform")(members, topics)) == [4, 4, 4]


def test_uniform_prefers_members_in_the_racks_of_the_replicas() -> None:
    topics = make_topics(9, spread=True)
    members = make_members(3, topics, racks=True)
    targets = consumer_assignor("uniform")(members, topics)
    assert near(members, topics, targets) == 9
    fewer = {name: member for name, member in settled(members, targets).items() if name != "m000"}
    after = consumer_assignor("uniform")(fewer, topics)
    assert near(fewer, topics, after) == 6, "those near their replicas stay where they are"


def test_range_gives_the_same_numbers_of_alike_topics_to_one_member() -> None:
    topics = make_topics(4, 4, 5)
    one, two, _ = topics
    targets = consumer_assignor("range")(make_members(2, topics), topics)
    assert all(target[one] == target[two] for target in targets.values())
    assert [sorted(target[one]) for target in targets.values()] == [[0, 1], [2, 3]]


def test_range_keeps_the_order_of_those_that_stay_and_prefers_their_racks() -> None:
    topics = make_topics(4)
    (one,) = topics
    members = settled(make_members(2, topics), consumer_assignor("range")(make_members(2, topics), topics))
    newcomer = {"a-first-by-name": ConsumerAssignorMember(frozenset(topics), None, {}), **members}
    targets = consumer_assignor("range")(newcomer, topics)
    assert [sorted(targets[name][one]) for name in ("m000", "m001", "a-first-by-name")] == [[0, 1], [2], [3]]
    spread = {one: topics[one]._replace(racks=(*[frozenset({"b"})] * 2, *[frozenset({"a"})] * 2))}
    racked = make_members(2, topics, racks=True)
    assert [sorted(target[one]) for target in consumer_assignor("range")(racked, spread).values()] == [
        [2, 3],
        [0, 1],
    ]
