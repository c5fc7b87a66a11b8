"""When a rebalance counts as finished."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from benchmarks.load import classic_members, consumer_members
from benchmarks.load.classic_members import ClassicMember
from benchmarks.load.consumer_members import ConsumerMember
from benchmarks.wire.raw_client import BrokerError
from kio.schema.consumer_group_heartbeat.v1.response import (
    Assignment,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from kio.schema.errors import ErrorCode

TOPIC = UUID("6f1f3a52-54f5-4b0e-8f0e-0a2f6b7c8d9e")


def member(epoch: int, *owned: int) -> Any:
    return SimpleNamespace(epoch=epoch, owned={TOPIC: frozenset(owned)})


@pytest.mark.parametrize(
    ("members", "is_settled"),
    [
        ([member(5, 0, 1), member(5, 2)], True),
        ([member(5, 0, 1), member(4, 2)], False),
        ([member(5, 0, 1), member(5)], False),
        ([member(5, 0, 1), member(5, 1)], False),
        ([member(5, 0, 1), member(5, 1, 2)], False),
        ([member(4, 0, 1), member(4, 2)], False),
    ],
    ids=["all", "one behind", "one missing", "twice and missing", "twice", "before the event"],
)
def test_a_consumer_group_is_settled_when_all_have_all_in_a_later_epoch(
    members: list[Any], is_settled: bool
) -> None:
    assert consumer_members.is_settled(members, 3, after_epoch=4) is is_settled


def test_a_classic_group_is_settled_when_all_share_one_generation() -> None:
    def classic(generation: int, sharers: int) -> Any:
        return SimpleNamespace(generation=generation, sharers=sharers)

    assert classic_members.is_settled([classic(3, 2), classic(3, 2)])
    assert not classic_members.is_settled([classic(3, 2), classic(2, 2)])
    assert not classic_members.is_settled([classic(3, 3), classic(3, 3)])
    assert not classic_members.is_settled([classic(3, 2), classic(3, 0)])


def answer(epoch: int, *partitions: int, error: ErrorCode = ErrorCode.none) -> Any:
    return ConsumerGroupHeartbeatResponse(
        throttle_time=timedelta(0),
        error_code=error,
        member_epoch=epoch,
        heartbeat_interval=timedelta(seconds=5),
        assignment=Assignment(topic_partitions=(TopicPartitions(topic_id=TOPIC, partitions=partitions),)),
    )


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch) -> ConsumerMember:
    monkeypatch.setattr(consumer_members, "Link", lambda _: None)
    return ConsumerMember(("localhost", 1), "group", "topic", 0.0, None)


def test_a_member_says_at_once_what_it_has_taken_up_and_then_waits_as_told(consumer: ConsumerMember) -> None:
    assert consumer.request().subscribed_topic_names == ("topic",)
    assert consumer.receive(answer(3, 1, 2), now_s=10.0)
    assert consumer.due_s == 10.0
    assert consumer.request().topic_partitions[0].partitions == (1, 2)
    assert consumer.request().subscribed_topic_names is None
    assert not consumer.receive(answer(3, 1, 2), now_s=11.0)
    assert consumer.due_s == 16.0
    assert consumer.request().topic_partitions is None


def test_a_member_that_is_thrown_out_fails_the_run(consumer: ConsumerMember) -> None:
    assert not consumer.receive(answer(0, error=ErrorCode.coordinator_load_in_progress), now_s=1.0)
    with pytest.raises(BrokerError, match="unknown_member_id"):
        consumer.receive(answer(0, error=ErrorCode.unknown_member_id), now_s=1.0)


def test_classic_members_join_again_when_told_of_a_rebalance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_members, "Link", lambda _: None)
    classic = ClassicMember(("localhost", 1), "group", 6.0, 0.0, 0.1)
    classic.receive(SimpleNamespace(error_code=ErrorCode.member_id_required, member_id="m"), now_s=1.0)
    assert classic.request().member_id == "m"
    classic._next = classic._beat
    classic.receive(SimpleNamespace(error_code=ErrorCode.rebalance_in_progress), now_s=2.0)
    assert type(classic.request()).__name__ == "JoinGroupRequest"
