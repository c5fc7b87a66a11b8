"""Plans of reassignments: even, rack aware, minimal and deterministic."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.reassignment_plan import (
    BrokerRack,
    ImpossiblePlan,
    PartitionMove,
    PartitionReplicas,
    ReassignmentPlan,
    plan_reassignment,
)

Replicas = tuple[int, ...]


def places(*replicas: Replicas, size_bytes: int = 10) -> list[PartitionReplicas]:
    return [PartitionReplicas("t", n, each, each[0], size_bytes) for n, each in enumerate(replicas)]


def brokers(*ids: int) -> list[BrokerRack]:
    return [BrokerRack(broker, f"host {broker}") for broker in ids]


def counts(plan: ReassignmentPlan) -> dict[int, tuple[int, int]]:
    return {load.broker_id: (load.replicas, load.leaders) for load in plan.after}


def test_what_is_even_stays() -> None:
    plan = plan_reassignment(places((1, 2), (2, 3), (3, 1)), brokers(1, 2, 3))
    assert plan.moves == ()
    assert plan.before == plan.after


def test_a_new_broker_gets_its_share_and_nothing_else_moves() -> None:
    plan = plan_reassignment(places((1, 2), (2, 1), (1, 2), (2, 1), (1, 2), (2, 1)), brokers(1, 2, 3))
    assert counts(plan) == {1: (4, 2), 2: (4, 2), 3: (4, 2)}
    moved = [move for move in plan.moves if move.moved_bytes]
    assert len(moved) == 4
    assert all(set(move.after) - set(move.before) == {3} for move in moved)
    assert plan.moved_bytes == 40


def test_a_broker_that_goes_is_emptied_and_only_it() -> None:
    plan = plan_reassignment(
        places((1, 2, 3), (2, 3, 4), (3, 4, 1), (4, 1, 2)), brokers(1, 2, 3, 4, 5), remove={4}
    )
    assert counts(plan)[4] == (0, 0)
    assert plan.moved_bytes == 3 * 10
    for move in plan.moves:
        assert len(set(move.after)) == 3


def test_a_dead_broker_is_one_that_is_not_there() -> None:
    plan = plan_reassignment(places((1, 9), (2, 1)), brokers(1, 2))
    assert plan.moves == (PartitionMove("t", 0, (1, 9), (1, 2), 10),)
    assert [(load.broker_id, load.replicas) for load in plan.before] == [(1, 2), (2, 1), (9, 1)]
    assert [(load.broker_id, load.replicas) for load in plan.after] == [(1, 2), (2, 2), (9, 0)]


def test_leaders_spread_without_moving_data() -> None:
    plan = plan_reassignment(places((1, 2, 3), (1, 2, 3), (1, 2, 3)), brokers(1, 2, 3))
    assert counts(plan) == {1: (3, 1), 2: (3, 1), 3: (3, 1)}
    assert plan.moved_bytes == 0
    assert len(plan.moves) == 2


def test_leaders_are_handed_on_along_a_chain() -> None:
    """1 shares nothing with 3: 2 has to pass a lead on."""
    plan = plan_reassignment(places((1, 2), (1, 2), (2, 3), (2, 3), (1, 2), (3, 2)), brokers(1, 2, 3))
    leaders = {load.broker_id: load.leaders for load in plan.after}
    assert leaders == {1: 2, 2: 2, 3: 2}


def test_two_replicas_in_one_rack_are_parted() -> None:
    racks = [BrokerRack(1, "a"), BrokerRack(2, "a"), BrokerRack(3, "b"), BrokerRack(4, "b")]
    plan = plan_reassignment(places((1, 2), (3, 4)), racks)
    rack = dict(racks)
    after = {move.partition: move.after for move in plan.moves}
    assert len(plan.moves) == 2
    assert all(len({rack[broker] for broker in replicas}) == 2 for replicas in after.values())
    assert plan.moved_bytes == 20


def test_levelling_never_puts_two_replicas_into_one_rack() -> None:
    racks = [BrokerRack(1, "a"), BrokerRack(2, "b"), BrokerRack(3, "b"), BrokerRack(4, "b")]
    plan = plan_reassignment(places((1, 2), (1, 3), (1, 4), (1, 2), (1, 3), (1, 4)), racks)
    assert [move for move in plan.moves if move.moved_bytes] == []


def test_among_equal_moves_bytes_decide() -> None:
    partitions = [PartitionReplicas("t", n, (1,), 1, size) for n, size in enumerate((100, 10, 50, 40))]
    plan = plan_reassignment(partitions, brokers(1, 2))
    assert {load.broker_id: load.size_bytes for load in plan.after} == {1: 90, 2: 110}
    assert counts(plan) == {1: (2, 2), 2: (2, 2)}


def test_too_few_brokers_are_said_so() -> None:
    with pytest.raises(ImpossiblePlan, match="3 replicas need 3 brokers, 2 would be left"):
        plan_reassignment(places((1, 2, 3)), brokers(1, 2, 3), remove={3})


@settings(max_examples=150, deadline=None)
@given(data=st.data(), racks=st.lists(st.sampled_from("abc"), min_size=3, max_size=7))
def test_every_plan_is_sound(data: st.DataObject, racks: list[str]) -> None:
    all_brokers = [BrokerRack(number, rack) for number, rack in enumerate(racks)]
    ids = [broker.id for broker in all_brokers]
    remove = data.draw(st.sets(st.sampled_from(ids), max_size=len(ids) - 3))
    factor = data.draw(st.integers(1, 3))
    replicas = st.permutations(ids).map(lambda order: tuple(order[:factor]))
    partitions = [
        PartitionReplicas("t", number, each, each[0], data.draw(st.integers(0, 50)))
        for number, each in enumerate(data.draw(st.lists(replicas, max_size=12)))
    ]
    plan = plan_reassignment(partitions, all_brokers, remove=remove)
    assert plan == plan_reassignment(partitions[::-1], all_brokers[::-1], remove=remove)
    after = {p.partition: p.replicas for p in partitions} | {m.partition: m.after for m in plan.moves}
    left = {broker.rack for broker in all_brokers if broker.id not in remove}
    rack = dict(all_brokers)
    for each in after.values():
        assert len(set(each)) == factor
        assert not set(each) & remove
        assert len({rack[broker] for broker in each}) == min(factor, len(left))
    for leader, number in Counter(each[0] for each in after.values()).items():
        # No broker leads two more than another that could lead one of its partitions.
        for each in after.values():
            if each[0] == leader:
                others = Counter(x[0] for x in after.values())
                assert all(number - others[other] < 2 for other in each)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), number=st.integers(3, 6))
def test_without_racks_replicas_end_up_even(data: st.DataObject, number: int) -> None:
    ids = list(range(number))
    replicas = st.permutations(ids).map(lambda order: tuple(order[:2]))
    partitions = places(*data.draw(st.lists(replicas, min_size=1, max_size=15)))
    plan = plan_reassignment(partitions, brokers(*ids))
    held = [load.replicas for load in plan.after]
    assert max(held) - min(held) <= 1
    # No plan moves less: a broker with more than the even share gives away just the excess.
    share, more = divmod(2 * len(partitions), number)
    before = sorted((load.replicas for load in plan.before), reverse=True)
    surplus = sum(max(0, have - share - (rank < more)) for rank, have in enumerate(before))
    assert plan.moved_bytes == 10 * surplus
