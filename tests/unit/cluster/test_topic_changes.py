"""Deleting topics and adding partitions."""

from uuid import UUID

import pytest
from tests.unit.cluster.clusters import cluster, create

from penstock.cluster.controller.alter_topics import NewPartitions, TopicRef, create_partitions, delete_topics
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import finish


def topics(*names: str, brokers: int = 1) -> ClusterImage:
    image = cluster(brokers)
    create(image, *(NewTopic(name=name, replication_factor=brokers) for name in names))
    return image


def delete(image: ClusterImage, *refs: TopicRef) -> list[tuple[str | None, UUID | None, ErrorCode]]:
    decision = finish(delete_topics(image, refs))
    image.apply(decision.records)
    image.check_invariants()
    return [(result.name, result.id, result.error) for result in decision.reply]


def grow(
    image: ClusterImage, *asked: NewPartitions, validate_only: bool = False
) -> list[tuple[ErrorCode, str | None]]:
    decision = finish(
        create_partitions(image, asked, partitions_max=10, draw=lambda _: 0, validate_only=validate_only)
    )
    image.apply(decision.records)
    image.check_invariants()
    return [(result.error, result.message) for result in decision.reply]


def test_topics_go_by_name_and_by_id() -> None:
    image = topics("a", "b", "c")
    a, b = image.topics["a"].id, image.topics["b"].id
    assert delete(image, TopicRef("a"), TopicRef(None, b)) == [
        ("a", a, ErrorCode.none), ("b", b, ErrorCode.none),
    ]  # fmt: skip
    assert set(image.topics) == {"c"}


def test_what_is_not_there_is_said_to_be_unknown() -> None:
    nobody = UUID(int=99)
    assert delete(topics("a"), TopicRef("x"), TopicRef(None, nobody)) == [
        ("x", None, ErrorCode.unknown_topic_or_partition), (None, nobody, ErrorCode.unknown_topic_id),
    ]  # fmt: skip


def test_a_reference_that_says_too_little_or_too_much_is_refused() -> None:
    image = topics("a")
    a = image.topics["a"].id
    assert delete(image, TopicRef(), TopicRef("a", a)) == [
        (None, None, ErrorCode.invalid_request), ("a", a, ErrorCode.invalid_request),
    ]  # fmt: skip
    assert "a" in image.topics


def test_a_topic_referred_to_twice_is_kept() -> None:
    image = topics("a", "b")
    b = image.topics["b"].id
    results = delete(image, TopicRef("a"), TopicRef("a"), TopicRef("b"), TopicRef(None, b))
    assert [error for _, _, error in results] == [ErrorCode.invalid_request] * 3
    assert set(image.topics) == {"a", "b"}


def test_internal_topics_are_not_deleted() -> None:
    image = topics("__consumer_offsets")
    assert delete(image, TopicRef("__consumer_offsets"))[0][2] is ErrorCode.invalid_request
    assert "__consumer_offsets" in image.topics


def test_partitions_are_added_behind_the_others() -> None:
    image = topics("a", brokers=2)
    before = dict(image.topics["a"].partitions)
    assert grow(image, NewPartitions(name="a", count=5)) == [(ErrorCode.none, None)]
    after = image.topics["a"].partitions
    assert len(after) == 5
    assert {index: after[index] for index in before} == before
    assert all(len(partition.replicas) == 2 for partition in after.values())


def test_added_partitions_may_be_placed_by_hand() -> None:
    image = topics("a", brokers=2)
    assert grow(image, NewPartitions(name="a", count=3, assignments=((2, 1),))) == [(ErrorCode.none, None)]
    assert image.topics["a"].partitions[2].replicas == (2, 1)


def test_asking_whether_partitions_could_be_added_adds_none() -> None:
    image = topics("a")
    assert grow(image, NewPartitions(name="a", count=3), validate_only=True) == [(ErrorCode.none, None)]
    assert len(image.topics["a"].partitions) == 2


@pytest.mark.parametrize(
    ("asked", "code", "reason"),
    [
        (NewPartitions(name="x", count=3), ErrorCode.unknown_topic_or_partition, "does not host"),
        (NewPartitions(name="a", count=2), ErrorCode.invalid_partitions, "already has 2 partition"),
        (NewPartitions(name="a", count=1), ErrorCode.invalid_partitions, "would not be an increase"),
        (NewPartitions(name="a", count=-1), ErrorCode.invalid_partitions, "would not be an increase"),
        (NewPartitions(name="a", count=2**31 - 1), ErrorCode.policy_violation, "so many"),
        (NewPartitions(name="a", count=4, assignments=((1, 2),)), ErrorCode.invalid_replica_assignment, "only 1"),
        (NewPartitions(name="a", count=3, assignments=((1,),)), ErrorCode.invalid_replica_assignment, "consistent"),
        (NewPartitions(name="a", count=3, assignments=((1, 9),)), ErrorCode.invalid_replica_assignment, "broker 9"),
        (NewPartitions(name="__consumer_offsets", count=99), ErrorCode.invalid_request, "fixed"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_partitions_is_refused(asked: NewPartitions, code: ErrorCode, reason: str) -> None:
    image = topics("a", "__consumer_offsets", brokers=2)
    ((error, message),) = grow(image, asked)
    assert error is code
    assert message is not None
    assert reason in message
    assert len(image.topics["a"].partitions) == 2


def test_a_topic_may_be_named_once() -> None:
    image = topics("a")
    assert grow(image, NewPartitions(name="a", count=3), NewPartitions(name="a", count=4)) == [
        (ErrorCode.invalid_request, "Duplicate topic name.")
    ]
