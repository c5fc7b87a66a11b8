"""Reassignment: the in-sync set never becomes smaller than promised."""

import pytest
from tests.unit.cluster.clusters import CONTROLLER, applied, cluster, create, fence, unfence

from penstock.cluster.controller.alter_partition import AlterPartition, IsrMember, alter_partitions
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.reassignment import (
    OngoingReassignment,
    Reassignment,
    alter_reassignments,
    list_reassignments,
)
from penstock.cluster.image import ClusterImage, PartitionState, TopicPartition
from penstock.cluster.topic_settings import effective_isr_min
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import finish


def placed(*replicas: int, isr_min: int = 2) -> ClusterImage:
    image = cluster(5)
    configs = (("min.insync.replicas", str(isr_min)),)
    create(image, NewTopic(name="t", assignments=((0, replicas),), configs=configs))
    return image


def partition(image: ClusterImage) -> PartitionState:
    return image.topics["t"].partitions[0]


def move(
    image: ClusterImage, replicas: tuple[int, ...] | None, *, partition: int = 0, topic: str = "t"
) -> tuple[ErrorCode, str | None]:
    item = Reassignment(topic=topic, partition=partition, replicas=replicas)
    (result,) = applied(image, finish(alter_reassignments(image, [item], rules=CONTROLLER))).reply
    return result.error, result.message


def sync(image: ClusterImage, *isr: int) -> None:
    state = partition(image)
    item = AlterPartition(
        topic_id=image.topics["t"].id,
        partition=0,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        isr=tuple(IsrMember(broker) for broker in isr),
    )
    epoch = image.brokers[state.leader].epoch
    applied(
        image,
        alter_partitions(image, [item], broker_id=state.leader, broker_epoch=epoch, rules=CONTROLLER),
    )


def test_newcomers_are_filled_before_others_go() -> None:
    image = placed(1, 2, 3)
    assert move(image, (4, 5, 3)) == (ErrorCode.none, None)
    state = partition(image)
    assert (state.replicas, state.adding_replicas, state.removing_replicas) == (
        (4, 5, 3, 1, 2),
        (4, 5),
        (1, 2),
    )
    assert state.leader == 1
    sync(image, 1, 2, 3, 4)
    assert partition(image).adding_replicas == (4, 5)
    sync(image, 1, 2, 3, 4, 5)
    state = partition(image)
    assert (state.replicas, state.adding_replicas, state.removing_replicas) == ((4, 5, 3), (), ())
    assert set(state.isr) == {3, 4, 5}
    assert (state.leader, state.leader_epoch) == (4, 1)
    assert state.directories == tuple(image.brokers[b].log_dirs[0] for b in (4, 5, 3))


def test_another_order_is_there_at_once_and_starts_no_epoch() -> None:
    image = placed(1, 2, 3)
    move(image, (3, 2, 1))
    state = partition(image)
    assert (state.replicas, state.leader, state.leader_epoch, state.adding_replicas) == ((3, 2, 1), 1, 0, ())


def test_removing_a_replica_cuts_it_off_by_the_epoch() -> None:
    image = placed(1, 2, 3)
    move(image, (1, 2))
    state = partition(image)
    assert (state.replicas, state.isr, state.leader, state.leader_epoch) == ((1, 2), (1, 2), 1, 1)


def test_a_dead_broker_is_replaced() -> None:
    image = placed(1, 2, 3)
    fence(image, 3)
    move(image, (1, 2, 4))
    assert partition(image).removing_replicas == (3,)
    sync(image, 1, 2, 4)
    assert (partition(image).replicas, partition(image).isr) == ((1, 2, 4), (1, 2, 4))


def test_who_alone_is_in_sync_is_not_let_go() -> None:
    image = placed(1, 2, 3)
    fence(image, 2, 3)
    move(image, (2, 3))
    state = partition(image)
    assert (state.leader, state.isr, state.removing_replicas) == (1, (1,), (1,))
    unfence(image, 2)
    sync(image, 1, 2)
    assert partition(image).removing_replicas == (1,), "one of two would be less than the minimum"
    unfence(image, 3)
    sync(image, 1, 2, 3)
    assert (partition(image).replicas, partition(image).leader) == ((2, 3), 2)


def test_replicas_that_are_being_added_do_not_raise_the_minimum() -> None:
    image = placed(1)
    move(image, (1, 2, 3))
    assert effective_isr_min(2, partition(image)) == 1
    sync(image, 1, 2)
    assert effective_isr_min(2, partition(image)) == 1
    sync(image, 1, 2, 3)
    assert effective_isr_min(2, partition(image)) == 2


def test_a_reassignment_can_be_taken_back() -> None:
    image = placed(1, 2, 3)
    move(image, (4, 5, 3))
    sync(image, 1, 2, 3, 4)
    assert move(image, None) == (ErrorCode.none, None)
    state = partition(image)
    assert set(state.replicas) == set(state.isr) == {1, 2, 3}
    assert (state.leader, state.adding_replicas, state.removing_replicas) == (1, (), ())
    assert state.leader_epoch == 1, "broker 4 is cut off"


def test_it_cannot_be_taken_back_when_only_newcomers_have_everything() -> None:
    image = placed(1, 2, isr_min=1)
    move(image, (3, 4))
    sync(image, 1, 3)
    fence(image, 1)
    assert partition(image).leader == 3
    error, message = move(image, None)
    assert error is ErrorCode.invalid_replica_assignment
    assert message is not None
    assert "unclean leader election" in message
    assert partition(image).adding_replicas == (3, 4)


def test_it_can_when_an_old_replica_is_still_eligible() -> None:
    image = placed(1, 2)
    move(image, (3, 4))
    sync(image, 1, 3)
    fence(image, 2, 1)
    assert (partition(image).leader, partition(image).elr) == (3, (1,))
    assert move(image, None) == (ErrorCode.none, None)
    assert (partition(image).leader, partition(image).elr) == (-1, (1,))
    unfence(image, 1)
    assert partition(image).leader == 1


def test_a_second_wish_replaces_the_first() -> None:
    image = placed(1, 2, 3)
    move(image, (1, 2, 4))
    move(image, (1, 2, 5))
    state = partition(image)
    assert (state.adding_replicas, state.removing_replicas) == ((5,), (4, 3))
    sync(image, 1, 2, 3, 5)
    assert partition(image).replicas == (1, 2, 5)


@pytest.mark.parametrize(
    ("replicas", "where", "error", "message"),
    [
        (None, ("t", 0), ErrorCode.no_reassignment_in_progress, "No partition reassignment is in progress."),
        ((1,), ("x", 0), ErrorCode.unknown_topic_or_partition, "Unable to find a topic named x."),
        ((1,), ("t", 9), ErrorCode.unknown_topic_or_partition, "Unable to find partition t:9."),
        ((), ("t", 0), ErrorCode.invalid_replica_assignment, "empty replica list"),
        ((1, 1), ("t", 0), ErrorCode.invalid_replica_assignment, "more than once"),
        ((1, 9), ("t", 0), ErrorCode.invalid_replica_assignment, "no such broker is registered"),
    ],
)
def test_the_impossible_is_refused(
    replicas: tuple[int, ...] | None, where: tuple[str, int], error: ErrorCode, message: str
) -> None:
    image = placed(1, 2, 3)
    found, words = move(image, replicas, topic=where[0], partition=where[1])
    assert found is error
    assert words is not None
    assert message in words


def test_the_number_of_replicas_may_be_fixed() -> None:
    image = placed(1, 2, 3)
    item = Reassignment(topic="t", partition=0, replicas=(1, 2))
    decision = finish(
        alter_reassignments(image, [item], rules=CONTROLLER, allow_replication_factor_change=False)
    )
    assert decision.records == ()
    assert decision.reply[0].error is ErrorCode.invalid_replication_factor
    assert decision.reply[0].message == "The replication factor is changed from 3 to 2"


def test_what_is_under_way_is_listed() -> None:
    image = placed(1, 2, 3)
    create(image, NewTopic(name="still", partitions=1))
    assert list_reassignments(image) == ()
    move(image, (1, 2, 4))
    expected = OngoingReassignment(topic="t", partition=0, replicas=(1, 2, 4, 3), adding=(4,), removing=(3,))
    assert list_reassignments(image) == (expected,)
    named = [TopicPartition("t", 0), TopicPartition("still", 0), TopicPartition("x", 0)]
    assert list_reassignments(image, named) == (expected,)
