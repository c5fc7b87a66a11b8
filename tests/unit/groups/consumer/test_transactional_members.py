"""Which members of a consumer group may commit offsets in a transaction (KIP-447 with KIP-848)."""

import pytest
from tests.unit.groups.consumer.world import GROUP, FakeTopics

from penstock.groups.consumer.consumer_heartbeat import consumer_group_heartbeat
from penstock.groups.consumer.membership import ConsumerHeartbeatReply, ConsumerHeartbeatRequest
from penstock.groups.group import (
    CommitRequest,
    GroupResult,
    OffsetToCommit,
    PartitionsReply,
    TransactionProducer,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode

PRODUCER = TransactionProducer(7, 0)


@pytest.fixture
def shard() -> GroupCoordinatorShard:
    """A group with one member, `m`, in epoch 1."""
    topics = FakeTopics()
    topics.set("t", 1)
    shard = GroupCoordinatorShard(GroupCoordinatorConfig(), topics)
    request = ConsumerHeartbeatRequest(
        group_id=GROUP,
        member_id="m",
        member_epoch=0,
        topic_names=("t",),
        rebalance_timeout_ms=30_000,
        owned={},
        session_timeout_ms=10_000,
        heartbeat_interval_ms=1_000,
    )
    reply = apply(shard, consumer_group_heartbeat(shard, request, "beat", now_ms=0))
    assert isinstance(reply, ConsumerHeartbeatReply)
    assert (reply.error, reply.member_epoch) == (ErrorCode.none, 1)
    return shard


def apply(shard: GroupCoordinatorShard, work: GroupResult) -> object:
    for key, value in work.records:
        if work.producer is None:
            shard.replay(key, value)
        else:
            shard.replay_pending(work.producer.id, key, value)
    return work.replies[0][1]


def commit(
    shard: GroupCoordinatorShard, member_id: str, epoch: int, instance_id: str | None = None
) -> ErrorCode:
    request = CommitRequest(
        group_id=GROUP,
        member_id=member_id,
        generation=epoch,
        instance_id=instance_id,
        offsets=(OffsetToCommit(topic="t", partition=0, offset=5),),
    )
    reply = apply(shard, shard.commit_in_transaction(request, PRODUCER, "commit", now_ms=0))
    assert isinstance(reply, PartitionsReply)
    return reply.error


@pytest.mark.parametrize(
    ("member_id", "epoch", "instance_id", "error"),
    [
        ("m", 1, None, ErrorCode.none),
        ("", -1, None, ErrorCode.none),
        ("m", 0, None, ErrorCode.illegal_generation),
        ("m", 2, None, ErrorCode.illegal_generation),
        ("gone", 1, None, ErrorCode.unknown_member_id),
        ("", -1, "i", ErrorCode.unknown_member_id),
    ],
    ids=["member", "nobody is named", "older epoch", "newer epoch", "no member", "only an instance is named"],
)
def test_who_may_commit(
    shard: GroupCoordinatorShard, member_id: str, epoch: int, instance_id: str | None, error: ErrorCode
) -> None:
    assert commit(shard, member_id, epoch, instance_id) is error
    shard.transaction_ended(PRODUCER.id, committed=True)
    (fetched,) = shard.fetch(GROUP, [("t", 0)])
    assert (fetched.committed is not None) == (error is ErrorCode.none)
