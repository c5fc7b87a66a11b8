"""AlterPartition: valid requests of a leader, and the errors for others."""

from dataclasses import replace
from uuid import UUID

import pytest
from tests.unit.cluster.clusters import CONTROLLER, applied, cluster, create, fence, register, unfence
from tests.unit.cluster.clusters import broker as registration

from penstock.cluster.controller.alter_partition import (
    AlterPartition,
    AlterPartitionResult,
    IsrMember,
    alter_partitions,
)
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.elect_leaders import ElectionType, elect_leaders
from penstock.cluster.controller.heartbeats import begin_shutdown
from penstock.cluster.controller.reassignment import Reassignment, alter_reassignments
from penstock.cluster.image import ClusterImage, PartitionState
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish


def three() -> ClusterImage:
    image = cluster(4)
    configs = (("min.insync.replicas", "2"),)
    create(image, NewTopic(name="t", assignments=((0, (1, 2, 3)),), configs=configs))
    return image


def partition(image: ClusterImage) -> PartitionState:
    return image.topics["t"].partitions[0]


def asking(image: ClusterImage, *isr: int) -> AlterPartition:
    """As a leader that knows everything would ask."""
    state = partition(image)
    return AlterPartition(
        topic_id=image.topics["t"].id,
        partition=0,
        leader_epoch=state.leader_epoch,
        partition_epoch=state.partition_epoch,
        isr=tuple(IsrMember(b, image.brokers[b].epoch) for b in isr),
    )


def alter(image: ClusterImage, *items: AlterPartition, broker: int = 1) -> tuple[AlterPartitionResult, ...]:
    decision = alter_partitions(
        image, items, broker_id=broker, broker_epoch=image.brokers[broker].epoch, rules=CONTROLLER
    )
    return applied(image, decision).reply


def test_the_in_sync_set_shrinks_and_grows() -> None:
    image = three()
    (result,) = alter(image, asking(image, 1, 2))
    assert result.error is ErrorCode.none
    assert result.state == partition(image)
    assert (partition(image).isr, partition(image).elr) == ((1, 2), ())
    assert (partition(image).leader_epoch, partition(image).partition_epoch) == (0, 1)
    alter(image, asking(image, 1))
    assert (partition(image).isr, partition(image).elr) == ((1,), (2,))
    alter(image, asking(image, 1, 3))
    assert (partition(image).isr, partition(image).elr) == ((1, 3), ())


def test_asking_for_what_is_changes_nothing() -> None:
    image = three()
    (result,) = alter(image, asking(image, 1, 2, 3))
    assert (result.error, result.state) == (ErrorCode.none, partition(image))
    assert partition(image).partition_epoch == 0


def test_every_epoch_fences() -> None:
    image = three()
    alter(image, asking(image, 1, 2))
    fence(image, 2)
    unfence(image, 2)
    good = asking(image, 1)
    for item, error in (
        (replace(good, leader_epoch=5), ErrorCode.not_controller),
        (replace(good, partition_epoch=50), ErrorCode.not_controller),
        (replace(good, partition_epoch=good.partition_epoch - 1), ErrorCode.invalid_update_version),
        (replace(good, topic_id=UUID(int=9999)), ErrorCode.unknown_topic_id),
        (replace(good, partition=7), ErrorCode.unknown_topic_or_partition),
    ):
        assert alter(image, item)[0].error is error
    fence(image, 1)
    unfence(image, 1)
    assert partition(image).leader_epoch > good.leader_epoch
    assert alter(image, good)[0].error is ErrorCode.fenced_leader_epoch


def test_only_the_leader_asks() -> None:
    image = three()
    assert alter(image, asking(image, 1, 2), broker=2)[0].error is ErrorCode.invalid_request
    with pytest.raises(ApiError) as refused:
        alter_partitions(image, [asking(image, 1)], broker_id=1, broker_epoch=0, rules=CONTROLLER)
    assert refused.value.code is ErrorCode.stale_broker_epoch


@pytest.mark.parametrize("isr", [(), (2, 3), (1, 4), (1, 1)])
def test_an_unsound_set_is_refused(isr: tuple[int, ...]) -> None:
    image = three()
    assert alter(image, asking(image, *isr))[0].error is ErrorCode.invalid_request
    assert partition(image).isr == (1, 2, 3)


def test_who_is_fenced_or_leaving_or_unknown_is_not_eligible() -> None:
    image = three()
    alter(image, asking(image, 1, 2))
    wanted = asking(image, 1, 2, 3)
    fence(image, 3)
    assert alter(image, wanted)[0].error is ErrorCode.ineligible_replica
    unfence(image, 3)
    applied(image, begin_shutdown(image, 3, rules=CONTROLLER))
    assert alter(image, wanted)[0].error is ErrorCode.ineligible_replica


def test_a_replica_that_restarted_since_its_fetches_is_not_eligible() -> None:
    image = three()
    alter(image, asking(image, 1, 2))
    wanted = asking(image, 1, 2, 3)
    register(image, registration(3, incarnation=1), epoch=9, silent_ms=None)
    unfence(image, 3)
    assert alter(image, wanted)[0].error is ErrorCode.ineligible_replica
    unknown = replace(wanted, isr=(*wanted.isr[:2], IsrMember(3)))
    assert alter(image, unknown)[0].error is ErrorCode.none


def test_a_partition_named_twice_changes_once() -> None:
    image = three()
    results = alter(image, asking(image, 1, 2), asking(image, 1, 3))
    assert [result.error for result in results] == [ErrorCode.none, ErrorCode.invalid_request]
    assert partition(image).isr == (1, 2)


def test_a_recovering_leader_is_alone_until_it_has_recovered() -> None:
    image = three()
    fence(image, 2)
    fence(image, 1, 3)
    unfence(image, 2)
    applied(image, finish(elect_leaders(image, None, election=ElectionType.UNCLEAN, rules=CONTROLLER)))
    unfence(image, 1)
    assert (partition(image).leader, partition(image).leader_recovering) == (2, True)
    both = asking(image, 2, 1)
    assert alter(image, replace(both, leader_recovering=True), broker=2)[0].error is ErrorCode.invalid_request
    assert alter(image, both, broker=2)[0].error is ErrorCode.none
    assert not partition(image).leader_recovering
    again = replace(asking(image, 2), leader_recovering=True)
    assert alter(image, again, broker=2)[0].error is ErrorCode.invalid_request


def test_the_set_that_completes_a_reassignment_may_cost_the_leader_its_lead() -> None:
    image = three()
    move = Reassignment(topic="t", partition=0, replicas=(2, 3, 4))
    applied(image, finish(alter_reassignments(image, [move], rules=CONTROLLER)))
    (result,) = alter(image, asking(image, 1, 2, 3, 4))
    assert (result.error, result.state) == (ErrorCode.new_leader_elected, None)
    state = partition(image)
    assert (state.replicas, state.isr, state.leader, state.leader_epoch) == ((2, 3, 4), (2, 3, 4), 2, 1)
