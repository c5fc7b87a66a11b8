"""The simple assignor: all partitions are assigned, to as many members as possible, with few moves."""

from collections import Counter
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.modern_group import NO_PARTITIONS, Assignment
from penstock.groups.share.share_heartbeat import ShareAssignorMember, assign_simply

TOPICS = [UUID(int=number) for number in range(1, 5)]

_partitions = st.dictionaries(
    st.sampled_from(TOPICS), st.integers(1, 6).map(lambda count: frozenset(range(count))), max_size=4
)
_names = [f"m{number}" for number in range(8)]
_before = st.dictionaries(
    st.sampled_from(TOPICS), st.frozensets(st.integers(0, 7), min_size=1, max_size=4), max_size=3
)


def places(assigned: Assignment) -> set[tuple[UUID, int]]:
    return {(topic_id, index) for topic_id, indexes in assigned.items() for index in indexes}


@st.composite
def candidates(draw: st.DrawFn, *, are_alike: bool) -> dict[str, ShareAssignorMember]:
    topics = st.frozensets(st.sampled_from(TOPICS), min_size=1)
    common = draw(topics)
    members = draw(st.lists(st.sampled_from(_names), unique=True, min_size=1))
    return {
        name: ShareAssignorMember(common if are_alike else draw(topics), draw(_before))
        for name in sorted(members)
    }


@given(candidates(are_alike=False), _partitions)
def test_everything_subscribed_is_read_by_subscribers_only(
    members: dict[str, ShareAssignorMember], partitions: Assignment
) -> None:
    targets = assign_simply(members, partitions)
    assert list(targets) == list(members)
    for name, target in targets.items():
        assert places(target) <= places(partitions)
        assert set(target) <= members[name].topics
    for topic_id, indexes in partitions.items():
        readers = [name for name, member in members.items() if topic_id in member.topics]
        if not readers:
            continue
        by_partition = Counter(index for target in targets.values() for index in target.get(topic_id, ()))
        assert set(by_partition) == indexes
        if len({member.topics for member in members.values()}) > 1:
            by_member = [len(targets[name].get(topic_id, ())) for name in readers]
            assert min(by_member) >= 1 or len(readers) > len(indexes) or max(by_member) <= 1
            assert max(by_member) - min(by_member) <= 1
            assert max(by_partition.values()) - min(by_partition.values()) <= 1


@given(candidates(are_alike=True), _partitions)
def test_members_and_partitions_are_spread_evenly(
    members: dict[str, ShareAssignorMember], partitions: Assignment
) -> None:
    topics = next(iter(members.values())).topics
    wanted = {place for place in places(partitions) if place[0] in topics}
    targets = assign_simply(members, partitions)
    sizes = [len(places(target)) for target in targets.values()]
    assert sum(sizes) == (max(len(wanted), len(members)) if wanted else 0)
    assert max(sizes) - min(sizes) <= 1
    sharing = Counter(place for target in targets.values() for place in places(target))
    assert set(sharing) == wanted
    assert not sharing or max(sharing.values()) - min(sharing.values()) <= 1


@given(st.booleans().flatmap(lambda alike: candidates(are_alike=alike)), _partitions)
def test_what_is_well_spread_stays_as_it_is(
    members: dict[str, ShareAssignorMember], partitions: Assignment
) -> None:
    first = assign_simply(members, partitions)
    again = {name: member._replace(target=first[name]) for name, member in members.items()}
    assert assign_simply(again, partitions) == first


@given(candidates(are_alike=True), _partitions)
def test_only_what_a_member_leaves_moves(
    members: dict[str, ShareAssignorMember], partitions: Assignment
) -> None:
    """As long as each partition has one reader: what others read stays theirs."""
    if len(members) < 2:
        return
    first = assign_simply(members, partitions)
    topics = next(iter(members.values())).topics
    if sum(len(indexes) for id, indexes in partitions.items() if id in topics) < len(members):
        return
    stay = dict(list(members.items())[1:])
    after = assign_simply(
        {name: ShareAssignorMember(m.topics, first[name]) for name, m in stay.items()}, partitions
    )
    for name in stay:
        assert places(first[name]) <= places(after[name])


def test_a_new_member_takes_from_those_with_most() -> None:
    topic = TOPICS[0]
    six = {topic: frozenset(range(6))}
    old = {"a": {topic: frozenset({0, 1, 2})}, "b": {topic: frozenset({3, 4, 5})}}
    members = {name: ShareAssignorMember(frozenset({topic}), target) for name, target in old.items()}
    members["c"] = ShareAssignorMember(frozenset({topic}), NO_PARTITIONS)
    targets = assign_simply(members, six)
    assert targets == {
        "a": {topic: frozenset({0, 1})},
        "b": {topic: frozenset({3, 4})},
        "c": {topic: frozenset({2, 5})},
    }
