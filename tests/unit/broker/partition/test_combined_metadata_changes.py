"""A leader applies several metadata changes that arrive together as one change."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.partition.one_broker import (
    ME,
    PEER,
    TOPIC_ID,
    Broker,
    broker_of_three,
    configs,
    registration,
)
from tests.unit.broker.raw_client import until

from penstock.broker.partition.leader_replica import monotonic_ms
from penstock.broker.partition.partition import Partition
from penstock.cluster.image import PartitionState
from penstock.cluster.metadata_records import PartitionChangeRecord
from penstock.protocol.errors import ErrorCode
from penstock.replication.leader import JOIN_HOLD_MS_MAX


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_of_three(tmp_path) as broker:
        yield broker


async def test_a_higher_minimum_and_a_smaller_set_that_come_together_commit_nothing(broker: Broker) -> None:
    """A move ends and the newcomer dies before this leader hears of either: the newcomer is eligible to lead."""
    await broker.create(replicas=(ME,), min_isr=2)
    await broker.change(replicas=(ME, PEER), adding_replicas=(PEER,))
    broker.fetch({0: 0}, replica=PEER)
    broker.isr.look_at([broker.partition()])
    await until(lambda: len(broker.controller.requests) == 1)
    write = broker.produce()
    assert not write.is_done, "the controller may have let the newcomer in already"
    leading = broker.partition().leading
    assert leading is not None
    assert not leading.rules.expired(monotonic_ms() + 2 * JOIN_HOLD_MS_MAX), (
        "silent for longer than anyone is waited for"
    )
    await broker.apply(
        PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, isr=(ME, PEER), adding_replicas=()),
        registration(PEER, 200, fenced=True),
        PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, isr=(ME,), eligible_leader_replicas=(PEER,)),
    )
    assert not write.is_done, "who may be elected does not have it"
    assert broker.partition().high_watermark == 0


async def test_one_partition_that_fails_keeps_none_of_the_others_from_their_roles(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(leader=ME, partitions=3)
    real = Partition.follow
    failures = [1]

    def follow(partition: Partition, state: PartitionState, *, local_id: int) -> None:
        if partition.index == 0 and failures:
            failures.clear()
            raise RuntimeError("unforeseen")
        real(partition, state, local_id=local_id)

    monkeypatch.setattr(Partition, "follow", follow)
    await broker.apply(
        *(PartitionChangeRecord(partition_id=index, topic_id=TOPIC_ID, leader=PEER) for index in range(3))
    )
    assert [broker.partition(index).is_leader for index in range(3)] == [False] * 3
    assert broker.partition(2).leader_id == PEER


async def test_nothing_is_committed_without_those_who_may_be_elected_whatever_this_node_thinks(
    broker: Broker,
) -> None:
    """The controller goes by a higher minimum than this broker's own file says."""
    await broker.create(isr=(ME, PEER), min_isr=1)
    first = broker.produce()
    await broker.change(isr=(ME,), eligible_leader_replicas=(PEER,))
    assert (first.is_done, broker.partition().high_watermark) == (False, 0)
    assert broker.produce().produced.error_code is ErrorCode.not_enough_replicas
    await broker.apply(*configs("t", {"min.insync.replicas": "1"}))
    assert not first.is_done
    await broker.change(eligible_leader_replicas=())
    assert first.produced.error_code is ErrorCode.none
