"""ElectLeaders, preferred leaders, lost replicas, and internal topics that grow with the cluster."""

from uuid import UUID

import pytest
from tests.unit.cluster.clusters import CONTROLLER, applied, broker, cluster, create, fence, register, unfence

from penstock.cluster.controller.alter_partition import (
    LOST_DIRECTORY,
    DirectoryAssignment,
    assign_replicas_to_dirs,
)
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.elect_leaders import (
    ElectionResult,
    ElectionType,
    balance_leaders,
    elect_leaders,
    raise_internal_topic_replicas,
)
from penstock.cluster.image import ClusterImage, PartitionState, TopicPartition
from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish

PREFERRED, UNCLEAN = ElectionType.PREFERRED, ElectionType.UNCLEAN
RAISED = {CONSUMER_OFFSETS: 3}


def topic(*assignments: tuple[int, ...], flush: str = "ack") -> ClusterImage:
    image = cluster(3)
    configs = (("penstock.flush", flush),)
    create(image, NewTopic(name="t", assignments=tuple(enumerate(assignments)), configs=configs))
    return image


def partition(image: ClusterImage, index: int = 0) -> PartitionState:
    return image.topics["t"].partitions[index]


def join(image: ClusterImage, *isr: int) -> None:
    """As if the leader had let them in."""
    image.topics["t"].partitions[0] = partition(image)._replace(isr=isr)


def elect(
    image: ClusterImage, election: ElectionType, *partitions: tuple[str, int]
) -> Decision[tuple[ElectionResult, ...]]:
    asked = [TopicPartition(*each) for each in partitions] if partitions else None
    return applied(image, finish(elect_leaders(image, asked, election=election, rules=CONTROLLER)))


def error(decision: Decision[tuple[ElectionResult, ...]]) -> ErrorCode:
    (result,) = decision.reply
    return result.error


# --- on request ---


def test_the_preferred_leader_leads_again_when_it_is_in_sync() -> None:
    image = topic((1, 2, 3))
    fence(image, 1)
    assert error(elect(image, PREFERRED, ("t", 0))) is ErrorCode.preferred_leader_not_available
    unfence(image, 1)
    assert error(elect(image, PREFERRED, ("t", 0))) is ErrorCode.preferred_leader_not_available
    join(image, 1, 2, 3)
    assert error(elect(image, PREFERRED, ("t", 0))) is ErrorCode.none
    assert partition(image).leader == 1
    assert error(elect(image, PREFERRED, ("t", 0))) is ErrorCode.election_not_needed


def test_an_operator_may_choose_a_leader_that_lacks_something_and_it_is_reported() -> None:
    image = topic((1, 2))
    fence(image, 1)
    fence(image, 2)
    assert error(elect(image, UNCLEAN, ("t", 0))) is ErrorCode.eligible_leaders_not_available
    unfence(image, 1)
    assert partition(image).leader == -1
    decision = elect(image, UNCLEAN, ("t", 0))
    assert error(decision) is ErrorCode.none
    assert [(each.old_leader, each.leader) for each in decision.unclean] == [(-1, 1)]
    assert (partition(image).isr, partition(image).elr) == ((1,), ())
    assert error(elect(image, UNCLEAN, ("t", 0))) is ErrorCode.election_not_needed


def test_asking_for_all_names_only_those_that_needed_it() -> None:
    image = topic((1, 2), (2, 1), (3, 1))
    fence(image, 1)
    decision = elect(image, PREFERRED)
    assert [(each.partition, each.error) for each in decision.reply] == [
        (0, ErrorCode.preferred_leader_not_available)
    ]


@pytest.mark.parametrize(
    ("where", "message"), [(("x", 0), "No such topic as x"), (("t", 4), "No such partition as t-4")]
)
def test_what_does_not_exist_has_no_leader(where: tuple[str, int], message: str) -> None:
    (result,) = elect(topic((1, 2)), PREFERRED, where).reply
    assert (result.error, result.message) == (ErrorCode.unknown_topic_or_partition, message)


# --- unasked ---


def test_leaders_go_home_a_few_at_a_time() -> None:
    image = topic((1, 2), (1, 3), (1, 2))
    fence(image, 1)
    unfence(image, 1)
    assert balance_leaders(image, rules=CONTROLLER, partitions_max=10).records == (), "1 is not in sync yet"
    for index in range(3):
        image.topics["t"].partitions[index] = partition(image, index)._replace(
            isr=partition(image, index).replicas
        )
    assert applied(image, balance_leaders(image, rules=CONTROLLER, partitions_max=2)).reply == 2
    assert applied(image, balance_leaders(image, rules=CONTROLLER, partitions_max=2)).reply == 1
    assert {partition(image, index).leader for index in range(3)} == {1}


def test_internal_topics_grow_with_the_cluster() -> None:
    image = cluster(1)
    create(image, NewTopic(name=CONSUMER_OFFSETS, partitions=4, replication_factor=1))
    create(image, NewTopic(name="own", partitions=1, replication_factor=1))
    assert raise_internal_topic_replicas(image, RAISED, rules=CONTROLLER).records == ()
    for number in (2, 3, 4):
        register(image, broker(number), epoch=number)
    unfence(image, 2)
    unfence(image, 3)
    assert (
        applied(image, raise_internal_topic_replicas(image, RAISED, rules=CONTROLLER, partitions_max=3)).reply
        == 3
    )
    assert (
        applied(image, raise_internal_topic_replicas(image, RAISED, rules=CONTROLLER, partitions_max=3)).reply
        == 1
    )
    for state in image.topics[CONSUMER_OFFSETS].partitions.values():
        assert (state.leader, set(state.replicas), set(state.adding_replicas)) == (1, {1, 2, 3}, {2, 3})
    assert image.topics["own"].partitions[0].replicas == (1,)
    assert raise_internal_topic_replicas(image, RAISED, rules=CONTROLLER).records == ()


def test_internal_replicas_go_to_other_racks_and_emptier_brokers() -> None:
    image = ClusterImage()
    for number, rack in enumerate("aabb", start=1):
        register(image, broker(number, rack=rack), epoch=number)
        unfence(image, number)
    create(image, NewTopic(name=CONSUMER_OFFSETS, assignments=((0, (1,)), (1, (1,)))))
    applied(image, raise_internal_topic_replicas(image, {CONSUMER_OFFSETS: 2}, rules=CONTROLLER))
    replicas = [state.replicas for state in image.topics[CONSUMER_OFFSETS].partitions.values()]
    assert replicas == [(1, 3), (4, 1)], "and they are led in turn"


# --- lost copies ---


def report(
    image: ClusterImage, broker_id: int, directory: UUID = LOST_DIRECTORY, *, index: int = 0
) -> ErrorCode:
    item = DirectoryAssignment(image.topics["t"].id, index, directory)
    decision = assign_replicas_to_dirs(
        image,
        [item],
        broker_id=broker_id,
        broker_epoch=image.brokers[broker_id].epoch,
        rules=CONTROLLER,
    )
    return applied(image, decision).reply[0].error


def test_a_damaged_copy_leaves_the_in_sync_set_and_its_lead() -> None:
    image = topic((1, 2, 3))
    assert report(image, 1) is ErrorCode.none
    state = partition(image)
    assert (state.leader, state.isr, state.elr, state.leader_epoch) == (2, (2, 3), (), 1)
    assert state.directories[0] == image.brokers[1].log_dirs[0]


@pytest.mark.parametrize("flush", ["ack", "never"])
def test_the_last_copy_does_not_lead_when_it_is_damaged(flush: str) -> None:
    image = topic((1, 2), flush=flush)
    fence(image, 2)
    report(image, 1)
    state = partition(image)
    assert (state.leader, state.isr, state.elr, state.last_known_elr) == (-1, (), (), ())


def test_a_sole_damaged_copy_is_all_there_is() -> None:
    image = topic((1,))
    report(image, 1)
    state = partition(image)
    assert (state.leader, state.isr, state.leader_epoch, state.leader_recovering) == (1, (1,), 1, True)


def test_a_broker_speaks_for_its_own_copies_and_folders() -> None:
    image = topic((1, 2))
    assert report(image, 3) is ErrorCode.not_leader_or_follower
    assert report(image, 1, index=8) is ErrorCode.unknown_topic_or_partition
    assert report(image, 1, UUID(int=12345)) is ErrorCode.invalid_request
    assert report(image, 1, image.brokers[1].log_dirs[0]) is ErrorCode.none
    assert partition(image).isr == (1, 2)
    with pytest.raises(ApiError) as refused:
        assign_replicas_to_dirs(image, [], broker_id=1, broker_epoch=99, rules=CONTROLLER)
    assert refused.value.code is ErrorCode.stale_broker_epoch
