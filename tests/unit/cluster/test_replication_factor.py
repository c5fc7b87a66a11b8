"""Plans that change how many replicas partitions have."""

import pytest

from penstock.cluster.reassignment_plan import (
    BrokerRack,
    ImpossiblePlan,
    PartitionReplicas,
    plan_reassignment,
)

BROKERS = [BrokerRack(1, "a"), BrokerRack(2, "a"), BrokerRack(3, "b"), BrokerRack(4, "c")]


def replicas_after(partitions: list[PartitionReplicas], **options: int | list[int]) -> list[tuple[int, ...]]:
    plan = plan_reassignment(partitions, BROKERS, **options)  # type: ignore[arg-type]
    moved = {(move.topic, move.partition): move.after for move in plan.moves}
    return [moved.get((p.topic, p.partition), p.replicas) for p in partitions]


def test_more_replicas_go_to_other_racks() -> None:
    [after] = replicas_after([PartitionReplicas("t", 0, (1,), 1, 10)], replication_factor=3)
    assert 1 in after
    assert {"a", "b", "c"} == {broker.rack for broker in BROKERS if broker.id in after}


def test_what_is_copied_is_counted_per_newcomer() -> None:
    plan = plan_reassignment([PartitionReplicas("t", 0, (1,), 1, 10)], BROKERS, replication_factor=3)
    assert plan.moved_bytes == 20
    assert [move.before for move in plan.moves] == [(1,)]


def test_fewer_replicas_keep_the_leader_and_the_racks_apart() -> None:
    [after] = replicas_after([PartitionReplicas("t", 0, (2, 1, 3), 1, 10)], replication_factor=2)
    assert set(after) == {1, 3}


def test_fewer_replicas_leave_first_who_goes() -> None:
    [after] = replicas_after([PartitionReplicas("t", 0, (4, 1, 3), 4, 10)], replication_factor=2, remove=[4])
    assert set(after) == {1, 3}


def test_many_partitions_stay_level() -> None:
    partitions = [PartitionReplicas("t", n, (1 + n % 4,), 1 + n % 4, 1) for n in range(40)]
    plan = plan_reassignment(partitions, BROKERS, replication_factor=2)
    assert {load.replicas for load in plan.after} == {20}
    assert {load.leaders for load in plan.after} == {10}


def test_more_replicas_than_brokers_are_impossible() -> None:
    with pytest.raises(ImpossiblePlan, match="5 replicas need 5 brokers"):
        plan_reassignment([PartitionReplicas("t", 0, (1,), 1)], BROKERS, replication_factor=5)
