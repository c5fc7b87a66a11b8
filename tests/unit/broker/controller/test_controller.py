"""The active controller fences silent brokers, moves leaders to preferred replicas, reports unclean elections."""

import asyncio
import logging
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from tests.unit.broker.controller.small_cluster import Cluster
from tests.unit.broker.controller.test_broker_lifecycle import create, now, three, until
from tests.unit.broker.virtual_time import VirtualLoop, in_virtual_time

from penstock.broker.controller.leader_balancer import is_imbalanced
from penstock.cluster.controller.alter_partition import AlterPartition, IsrMember, alter_partitions
from penstock.cluster.controller.brokers import BrokerRegistration
from penstock.cluster.controller.heartbeats import BrokerHeartbeat
from penstock.cluster.controller.reassignment import list_reassignments
from penstock.protocol.errors import ApiError, ErrorCode


def leaders(cluster: Cluster, topic: str = "orders") -> list[int]:
    return [partition.leader for partition in cluster.leader.image.topics[topic].partitions.values()]


async def everyone_in_sync(cluster: Cluster, topic: str = "orders") -> None:
    """As the leaders would ask once the followers have caught up."""
    image, controller = cluster.leader.image, cluster.leader.controller
    found = image.topics[topic]
    for index, state in found.partitions.items():
        item = AlterPartition(
            topic_id=found.id,
            partition=index,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            isr=tuple(IsrMember(broker, image.brokers[broker].epoch) for broker in state.replicas),
        )
        epoch = image.brokers[state.leader].epoch
        (result,) = await controller.propose(
            lambda image, item=item, state=state, epoch=epoch: alter_partitions(  # type: ignore[misc]
                image, [item], broker_id=state.leader, broker_epoch=epoch, rules=controller.rules()
            )
        )
        assert result.error is ErrorCode.none


@in_virtual_time
async def test_a_silent_broker_is_fenced_and_others_lead(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    assert 3 in leaders(cluster)
    await cluster[3].stop()
    started = now()
    await until(lambda: cluster[1].image.brokers[3].fenced)
    assert 2.4 <= now() - started <= 3.1
    assert set(leaders(cluster)) == {1, 2}
    assert cluster[1].metrics.brokers_fenced == 1
    await cluster.stop()


@in_virtual_time
async def test_brokers_that_report_are_not_fenced(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await asyncio.sleep(120)
    assert len(cluster[1].image.active_brokers()) == 3
    assert cluster[1].metrics.brokers_fenced == 0
    await cluster.stop()


@pytest.mark.parametrize(("election_s", "fenced_within_s"), [(0.1, 3.0), (1.5, 3.0), (10.0, 11.1)])
def test_the_controller_before_is_fenced_in_the_time_that_any_broker_is(
    tmp_path: Path, election_s: float, fenced_within_s: float
) -> None:
    @in_virtual_time
    async def scenario() -> None:
        cluster = await three(tmp_path)
        await asyncio.sleep(10)
        await cluster[1].stop()
        died = now()
        cluster.elect(-1)
        await asyncio.sleep(election_s)
        cluster.elect(2)
        assert not cluster[2].image.brokers[1].fenced
        await until(lambda: cluster[2].image.brokers[1].fenced)
        assert 2.4 <= now() - died <= fenced_within_s + 0.05
        assert not cluster[2].image.brokers[3].fenced
        await cluster.stop()

    scenario()


@in_virtual_time
async def test_a_controller_that_was_replaced_and_lives_is_not_fenced(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await asyncio.sleep(10)
    cluster.elect(-1)
    await asyncio.sleep(10)
    cluster.elect(2)
    await asyncio.sleep(10)
    assert len(cluster[2].image.active_brokers()) == 3
    assert cluster[2].metrics.brokers_fenced == 0
    await cluster.stop()


@in_virtual_time
async def test_a_controller_that_was_paused_fences_no_broker(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    for _ in range(5):
        loop.stand_still(10)
        await asyncio.sleep(1)
    assert len(cluster[1].image.active_brokers()) == 3
    assert cluster[1].metrics.brokers_fenced == 0
    await cluster.stop()


@in_virtual_time
async def test_a_pause_counts_at_whatever_moment_it_begins(tmp_path: Path) -> None:
    """Also if the pause begins when a check has just ended, and lasts little longer than the next one is away."""
    fast = {"broker_session_timeout_ms": "500", "broker_heartbeat_interval_ms": "100"}
    cluster = await three(tmp_path, **fast)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    for step in range(50):
        await asyncio.sleep(0.7 + 0.01 * step)
        cluster.cuts = {(2, 1), (3, 1)}  # what the brokers send is read only after the check
        loop.stand_still(0.48)
        await asyncio.sleep(0.05)
        cluster.cuts = set()
        assert cluster[1].metrics.brokers_fenced == 0
    await cluster.stop()


@in_virtual_time
async def test_a_pause_counts_while_a_decision_waits_to_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await three(tmp_path)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    metadata = cluster[1].metadata
    propose, decided, committed = metadata.propose, asyncio.Event(), asyncio.Event()

    async def propose_slowly(decide: Any) -> Any:
        reply = await propose(decide)
        decided.set()
        await committed.wait()
        return reply

    await cluster[3].stop()
    monkeypatch.setattr(metadata, "propose", propose_slowly)
    await decided.wait()
    assert cluster[1].image.brokers[3].fenced
    cluster.cuts = {(2, 1)}  # what broker 2 sends is read only after the next check
    loop.stand_still(10)
    committed.set()
    await asyncio.sleep(0.3)
    cluster.cuts = set()
    await asyncio.sleep(10)
    assert cluster[1].metrics.brokers_fenced == 1
    assert len(cluster[1].image.active_brokers()) == 2
    await cluster.stop()


@in_virtual_time
async def test_short_pauses_add_up_to_no_silence(tmp_path: Path) -> None:
    """As on a machine with too little CPU time: each pause is shorter than a heartbeat interval."""
    cluster = await three(tmp_path)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    cluster.cuts = {(2, 1)}
    for _ in range(8):
        loop.stand_still(0.45)
        await asyncio.sleep(0.15)
    assert cluster[1].metrics.brokers_fenced == 0
    await until(lambda: cluster[1].image.brokers[2].fenced)
    await cluster.stop()


@in_virtual_time
async def test_a_pause_does_not_let_a_copy_replace_a_live_broker(tmp_path: Path) -> None:
    """The controller's first request after the pause is the registration of a copy of broker 2's folder."""
    cluster = await three(tmp_path)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    controller, known = cluster[1].controller, cluster[1].image.brokers[2]
    copy = BrokerRegistration(broker_id=2, incarnation=uuid4(), endpoints=(), log_dirs=known.log_dirs)
    await asyncio.sleep(1)
    loop.stand_still(10)
    with pytest.raises(ApiError) as refused:
        await controller.register(copy, previous_epoch=known.epoch)
    assert refused.value.code is ErrorCode.duplicate_broker_registration
    await cluster.stop()


@in_virtual_time
async def test_an_inactive_controller_fences_no_broker(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await cluster[3].stop()
    cluster.elect(-1)
    await asyncio.sleep(20)
    assert not cluster[1].image.brokers[3].fenced
    await cluster.stop()


@in_virtual_time
async def test_a_broker_that_comes_back_gets_its_leaderships_back(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    before = leaders(cluster)
    await cluster[2].lifecycle.controlled_shutdown()
    await cluster[2].kill_and_replace()
    await cluster.start(2)
    assert 2 not in leaders(cluster)
    await asyncio.sleep(10)
    assert 2 not in leaders(cluster), "it leads nothing before it is in sync"
    await everyone_in_sync(cluster)
    started = now()
    await until(lambda: leaders(cluster) == before)
    assert now() - started < 3
    await cluster.stop()


@in_virtual_time
async def test_leaderships_come_back_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.controller.leader_balancer._BATCH", 2)
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=30)
    before = leaders(cluster)
    await cluster[2].lifecycle.controlled_shutdown()
    await cluster[2].kill_and_replace()
    await cluster.start(2)
    await everyone_in_sync(cluster)
    seen = set()
    while leaders(cluster) != before:
        seen.add(leaders(cluster).count(2))
        await asyncio.sleep(0.05)
    assert {0, 2, 4} <= seen
    await cluster.stop()


@in_virtual_time
async def test_leaderships_stay_where_that_is_switched_off(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"auto.leader.rebalance.enable": "false"})
    await create(cluster[1], "orders", partitions=6)
    await cluster[2].lifecycle.controlled_shutdown()
    await cluster[2].kill_and_replace()
    await cluster.start(2)
    await everyone_in_sync(cluster)
    await asyncio.sleep(900)
    assert 2 not in leaders(cluster)
    await cluster.stop()


@in_virtual_time
async def test_leaders_are_looked_at_from_time_to_time(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"leader.imbalance.check.interval.seconds": "60"})
    await create(cluster[1], "orders", partitions=6)
    before = leaders(cluster)
    await asyncio.sleep(10)
    await cluster[2].lifecycle.report_lost([("orders", index) for index in range(6)])
    assert 2 not in leaders(cluster)
    await everyone_in_sync(cluster)
    await asyncio.sleep(10)
    assert 2 not in leaders(cluster)
    await until(lambda: leaders(cluster) == before, within_s=120)
    await cluster.stop()


@in_virtual_time
async def test_few_strangers_are_tolerated(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    assert not is_imbalanced(cluster[1].image, 0)
    await cluster[2].lifecycle.report_lost([("orders", leaders(cluster).index(2))])
    assert is_imbalanced(cluster[1].image, 49)
    assert not is_imbalanced(cluster[1].image, 50)
    await cluster.stop()


@in_virtual_time
async def test_internal_topics_get_replicas_when_brokers_are_added(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start(1)
    await create(cluster[1], "__consumer_offsets", partitions=2, replicas=1)
    await create(cluster[1], "orders", replicas=1)
    await cluster.start(2, 3)
    await until(lambda: len(list_reassignments(cluster[1].image)) == 2)
    for partition in cluster[1].image.topics["__consumer_offsets"].partitions.values():
        assert set(partition.replicas) == {1, 2, 3}
    assert cluster[1].image.topics["orders"].partitions[0].replicas in ((1,), (2,), (3,))
    await cluster.stop()


@in_virtual_time
async def test_an_unclean_election_is_never_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from kio.schema.incremental_alter_configs.v1 import request as configs

    cluster = await three(tmp_path, **{"min.insync.replicas": "1"})
    await create(cluster[1], "orders", replicas=2)
    partition = cluster[1].image.topics["orders"].partitions[0]
    first, second = partition.replicas
    cluster.elect(({1, 2, 3} - {first, second}).pop())
    await cluster[second].stop()
    await until(lambda: cluster.leader.image.brokers[second].fenced)
    await cluster[first].stop()
    await until(lambda: cluster.leader.image.brokers[first].fenced)
    await cluster[second].kill_and_replace()
    await cluster.start(second)
    assert leaders(cluster) == [-1]
    assert cluster.leader.metrics.unclean_elections == 0
    change = configs.AlterableConfig(name="unclean.leader.election.enable", config_operation=0, value="true")
    resource = configs.AlterConfigsResource(resource_type=2, resource_name="orders", configs=(change,))
    with caplog.at_level(logging.WARNING, "penstock.controller"):
        await cluster[second].channel.call(
            44, configs.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
        )
        await until(lambda: cluster.leader.metrics.unclean_elections == 1)
    assert leaders(cluster) == [second]
    (said,) = [record for record in caplog.records if "unclean" in record.message]
    assert (said.topic, said.partition, said.leader) == ("orders", 0, second)  # type: ignore[attr-defined]
    assert said.epoch == cluster.leader.image.topics["orders"].partitions[0].leader_epoch  # type: ignore[attr-defined]
    await cluster.stop()


@in_virtual_time
async def test_elections_of_controllers_are_counted(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    cluster.elect(2)
    cluster.elect(1)
    assert [cluster[node].metrics.controller_elections for node in (1, 2, 3)] == [2, 1, 0]
    await cluster.stop()


@in_virtual_time
async def test_a_leader_changes_its_in_sync_set_through_the_controller(tmp_path: Path) -> None:
    from kio.schema.alter_partition.v3 import request as alter

    cluster = await three(tmp_path)
    await create(cluster[1], "orders")
    state = cluster[1].image.topics["orders"].partitions[0]
    leader = state.leader
    others = [broker for broker in state.replicas if broker != leader]

    async def ask(isr: list[int], partition_epoch: int, broker_epoch: int) -> tuple[ErrorCode, Any]:
        epochs = {id: broker.epoch for id, broker in cluster[1].image.brokers.items()}
        members = tuple(alter.BrokerState(broker_id=id, broker_epoch=epochs[id]) for id in isr)
        data = alter.PartitionData(
            partition_index=0,
            leader_epoch=state.leader_epoch,
            new_isr_with_epochs=members,
            partition_epoch=partition_epoch,
        )
        topic = alter.TopicData(topic_id=cluster[1].image.topics["orders"].id, partitions=(data,))
        request = alter.AlterPartitionRequest(broker_id=leader, broker_epoch=broker_epoch, topics=(topic,))
        response = await cluster[leader].channel.call(56, request)
        return response.error_code, response.topics and response.topics[0].partitions[0]

    epoch = cluster[leader].lifecycle.broker_epoch
    top, answer = await ask([leader, others[0]], state.partition_epoch, epoch)
    assert (top, answer.error_code) == (ErrorCode.none, ErrorCode.none)
    assert (answer.leader_id, set(answer.isr)) == (leader, {leader, others[0]})
    assert answer.partition_epoch == state.partition_epoch + 1
    assert (answer.leader_epoch, answer.leader_recovery_state) == (state.leader_epoch, 0)
    _, late = await ask([leader], state.partition_epoch, epoch)
    assert late.error_code is ErrorCode.invalid_update_version
    assert (await ask([leader], answer.partition_epoch, epoch - 1))[0] is ErrorCode.stale_broker_epoch
    await cluster.stop()


class _Wire:
    """A connection, as far as heartbeats need one."""

    is_open = True
    on_lost: Any = None


async def _beat(cluster: Cluster, broker: int) -> _Wire:
    wire = _Wire()
    epoch = cluster.leader.image.brokers[broker].epoch
    beat = BrokerHeartbeat(broker_id=broker, broker_epoch=epoch, metadata_offset=len(cluster.records))
    await cluster.leader.controller.heartbeat(beat, wire)  # type: ignore[arg-type]
    return wire


@in_virtual_time
async def test_a_broker_whose_connection_closes_is_fenced_sooner(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await cluster[3].stop()
    wire, died = await _beat(cluster, 3), now()
    wire.on_lost()
    await until(lambda: cluster[1].image.brokers[3].fenced)
    assert 0.99 <= now() - died <= 1.1
    await cluster.stop()


@in_virtual_time
async def test_a_broker_that_reports_over_another_connection_is_not_fenced(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    before = await _beat(cluster, 3)
    await _beat(cluster, 3)
    before.on_lost()
    await asyncio.sleep(0)
    assert cluster[1].controller.sessions.next_deadline_ms() > now() * 1000 + 2000  # type: ignore[operator]
    (await _beat(cluster, 2)).on_lost()
    await asyncio.sleep(20)  # the lifecycles go on
    assert cluster[1].metrics.brokers_fenced == 0
    await cluster.stop()


@in_virtual_time
async def test_connections_of_an_earlier_term_tell_nothing(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    wire = await _beat(cluster, 3)
    await cluster[3].stop()
    cluster.elect(-1)
    cluster.elect(1)
    started = now()
    wire.on_lost()
    await until(lambda: cluster[1].image.brokers[3].fenced)
    assert now() - started >= 2.9
    await cluster.stop()
