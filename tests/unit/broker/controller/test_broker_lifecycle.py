"""The life cycle of a broker: registration, unfencing, heartbeats and controlled shutdown."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from tests.unit.broker.controller.small_cluster import Cluster, SmallNode
from tests.unit.broker.virtual_time import in_virtual_time

from penstock.broker.environment import StartFailed
from penstock.cluster.controller.create_topics import NewTopic
from penstock.log.data_directory import BrokerRun, note_run, previous_broker_epoch
from penstock.protocol.errors import ApiError, ErrorCode


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(reached: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def create(node: SmallNode, name: str, partitions: int = 1, replicas: int = 3, **configs: str) -> None:
    topic = NewTopic(
        name=name, partitions=partitions, replication_factor=replicas, configs=tuple(configs.items())
    )
    (result,) = await node.topic_creator.create([topic])  # type: ignore[arg-type]
    assert result.error is ErrorCode.none, result


async def three(folder: Path, **settings: str) -> Cluster:
    cluster = Cluster(folder, **settings)
    cluster.elect(1)
    await cluster.start()
    return cluster


# --- coming ---


@in_virtual_time
async def test_a_broker_is_fenced_until_it_is_ready(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    lifecycle = cluster[2].lifecycle
    await lifecycle.register()
    assert cluster[1].image.brokers[2].epoch == lifecycle.broker_epoch
    await asyncio.sleep(5)
    assert lifecycle.is_fenced
    assert cluster[1].image.brokers[2].fenced
    lifecycle.ready()
    started = now()
    await lifecycle.unfenced()
    assert now() - started < 0.2
    assert not cluster[1].image.brokers[2].fenced
    await cluster.stop()


@in_virtual_time
async def test_a_broker_that_has_not_seen_its_registration_stays_fenced(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    cluster[2].lags = True
    lifecycle = cluster[2].lifecycle
    await lifecycle.register()
    lifecycle.ready()
    await asyncio.sleep(5)
    assert lifecycle.is_fenced
    cluster[2].lags = False
    cluster[2].metadata.follow()
    await lifecycle.unfenced()
    await cluster.stop()


@in_virtual_time
async def test_a_broker_is_in_service_once_its_own_image_says_so(tmp_path: Path) -> None:
    """Or a client that asks it for metadata is told that there are no brokers."""
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    lifecycle = cluster[2].lifecycle
    await lifecycle.register()
    cluster[2].lags = True
    lifecycle.ready()
    serving = asyncio.create_task(lifecycle.unfenced())
    await until(lambda: not lifecycle.is_fenced)
    await asyncio.sleep(5)
    assert cluster[2].image.brokers[2].fenced
    assert not serving.done()
    cluster[2].metadata.follow()
    seen_at = now()
    await serving
    assert now() - seen_at < 0.2
    await cluster.stop()


@in_virtual_time
async def test_the_first_broker_brings_the_feature_levels(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    assert cluster[3].image.features["metadata.version"] > 0
    await cluster.stop()


@in_virtual_time
async def test_a_single_node_leads_at_once_without_requests(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, size=1)
    cluster.elect(1)
    await cluster[1].lifecycle.register()
    assert not cluster[1].lifecycle.is_fenced
    assert not cluster[1].image.brokers[1].fenced
    await create(cluster[1], "orders", replicas=1)
    written = len(cluster.records)
    await asyncio.sleep(60)
    assert len(cluster.records) == written
    assert not cluster[1].image.brokers[1].fenced
    await cluster[1].kill_and_replace()
    cluster.elect(1)
    await cluster[1].lifecycle.register()
    assert cluster[1].image.topics["orders"].partitions[0].leader == 1
    assert cluster[1].image.topics["orders"].partitions[0].leader_epoch == 1
    assert cluster.heard == []
    await cluster.stop()


@in_virtual_time
async def test_a_killed_brokers_successor_waits_until_its_silence_is_certain(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await cluster[3].kill_and_replace()
    started = now()
    await cluster[3].lifecycle.register()
    assert 0.4 < now() - started < 1.5  # two heartbeat intervals after it was last heard of, not a session
    await cluster.stop()


@in_virtual_time
async def test_a_successor_on_another_disk_waits_for_the_session_to_expire(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await cluster[3].kill_and_replace(keep_folder=False)
    started = now()
    await cluster[3].lifecycle.register()
    assert 2 < now() - started < 4
    await cluster.stop()


@in_virtual_time
async def test_a_second_live_broker_with_the_same_id_is_refused(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"initial.broker.registration.timeout.ms": "8000"})
    twin = SmallNode(cluster, 2, tmp_path, {"initial.broker.registration.timeout.ms": "8000"})
    twin.metadata.follow()
    with pytest.raises(StartFailed, match="node 2: another broker with this id"):
        await twin.lifecycle.register()
    assert not cluster[1].image.brokers[2].fenced
    assert cluster[1].image.brokers[2].incarnation == cluster[2].lifecycle.incarnation
    await cluster.stop()


@in_virtual_time
async def test_a_copy_of_the_controllers_folder_does_not_replace_it(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    controller = cluster[1]
    epoch = controller.lifecycle.broker_epoch
    copy = controller.lifecycle._own_registration(epoch)._replace(incarnation=uuid4())
    with pytest.raises(ApiError, match="alive") as refused:
        await controller.controller.register(copy, previous_epoch=epoch)
    assert refused.value.code is ErrorCode.duplicate_broker_registration
    assert controller.image.brokers[controller.node_id].incarnation == controller.lifecycle.incarnation
    await cluster.stop()


@in_virtual_time
async def test_a_start_without_a_controller_fails_in_the_end_and_says_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, **{"initial.broker.registration.timeout.ms": "8000"})
    with pytest.raises(StartFailed, match="no controller"):
        await cluster[2].lifecycle.register()
    assert 1007 < now() < 1020


@in_virtual_time
async def test_a_folder_of_another_cluster_is_not_let_in(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    cluster[2].store.cluster_id = "another"
    with pytest.raises(StartFailed, match="another cluster"):
        await cluster[2].lifecycle.register()
    await cluster.stop()


# --- what a restart may have lost ---


async def _restarted_under_flush_never(cluster: Cluster, *, forget_boot: bool) -> tuple[int, ...]:
    await create(cluster[1], "t", **{"penstock.flush": "never"})
    await cluster[3].kill_and_replace()
    if forget_boot:
        note = cluster[3].store.directory / ".boot"
        note.write_text(note.read_text().replace('"bootId": "', '"bootId": "before '))
    await cluster[3].lifecycle.register()
    partition = cluster[1].image.topics["t"].partitions[0]
    return (*partition.isr, *partition.elr)


@in_virtual_time
async def test_a_killed_process_loses_nothing_and_may_lead_again(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"min.insync.replicas": "3"})
    assert 3 in await _restarted_under_flush_never(cluster, forget_boot=False)
    await cluster.stop()


@in_virtual_time
async def test_a_machine_that_went_down_is_not_trusted_where_nothing_is_synced(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"min.insync.replicas": "3"})
    assert 3 not in await _restarted_under_flush_never(cluster, forget_boot=True)
    await cluster.stop()


def test_a_run_is_safe_after_a_clean_stop_or_in_the_same_boot(tmp_path: Path) -> None:
    assert previous_broker_epoch(tmp_path, stopped_cleanly=True, boot_id="a") == -1
    note_run(tmp_path, BrokerRun("a", 7))
    assert previous_broker_epoch(tmp_path, stopped_cleanly=False, boot_id="a") == 7
    assert previous_broker_epoch(tmp_path, stopped_cleanly=True, boot_id="b") == 7
    assert previous_broker_epoch(tmp_path, stopped_cleanly=False, boot_id="b") == -1
    assert previous_broker_epoch(tmp_path, stopped_cleanly=False, boot_id=None) == -1


def test_where_boots_have_no_names_only_a_clean_stop_is_safe(tmp_path: Path) -> None:
    note_run(tmp_path, BrokerRun(None, 7))
    assert previous_broker_epoch(tmp_path, stopped_cleanly=False, boot_id=None) == -1
    assert previous_broker_epoch(tmp_path, stopped_cleanly=True, boot_id=None) == 7


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"bootId": "a"}', b'{"bootId": "a", "brokerEpoch": []}']
)
def test_a_torn_note_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".boot").write_bytes(content)
    assert previous_broker_epoch(tmp_path, stopped_cleanly=True, boot_id="a") == -1


@in_virtual_time
async def test_a_start_that_was_not_let_in_leaves_the_doubt_standing(tmp_path: Path) -> None:
    cluster = await three(tmp_path, **{"initial.broker.registration.timeout.ms": "100"})
    note = cluster[3].store.directory / ".boot"
    before = note.read_bytes()
    await cluster[3].kill_and_replace()
    with pytest.raises(StartFailed):
        await cluster[3].lifecycle.register()
    assert note.read_bytes() == before
    await cluster.stop()


# --- staying ---


@in_virtual_time
async def test_heartbeats_follow_the_controller(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await cluster[1].stop()
    cluster.elect(2)
    await asyncio.sleep(30)
    image = cluster[2].image
    assert [broker.id for broker in image.active_brokers()] == [2, 3]
    await cluster.stop()


@in_virtual_time
async def test_a_broker_that_was_forgotten_registers_again(tmp_path: Path) -> None:
    from kio.schema.unregister_broker.v0.request import UnregisterBrokerRequest

    cluster = await three(tmp_path)
    epoch = cluster[3].lifecycle.broker_epoch
    cluster.cuts |= {(3, 1)}
    await until(lambda: cluster[1].image.brokers[3].fenced)
    response = await cluster[2].channel.call(64, UnregisterBrokerRequest(broker_id=3))
    assert response.error_code is ErrorCode.none
    assert 3 not in cluster[1].image.brokers
    cluster.cuts.clear()
    await until(lambda: 3 in cluster[1].image.brokers and not cluster[1].image.brokers[3].fenced)
    assert cluster[3].lifecycle.broker_epoch > epoch
    await cluster.stop()


def _levels_said(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records if record.name == "penstock.lifecycle"]


@in_virtual_time
async def test_a_broker_that_is_cut_off_says_so_once_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await three(tmp_path)
    with caplog.at_level(logging.INFO, "penstock.lifecycle"):
        cluster.cuts.add((2, 1))
        await asyncio.sleep(20)
        assert cluster[1].image.brokers[2].fenced
        cluster.cuts.clear()
        await until(lambda: not cluster[1].image.brokers[2].fenced)
        # The broker hears of it after the controller.
        await until(lambda: len(_levels_said(caplog)) >= 2)
    assert _levels_said(caplog) == [logging.WARNING, logging.INFO]
    await cluster.stop()


# --- losses ---


@in_virtual_time
async def test_a_lost_copy_leaves_the_in_sync_set(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=2)
    accepted = await cluster[2].lifecycle.report_lost([("orders", 0), ("gone", 4)])
    assert accepted == {("orders", 0)}
    partitions = cluster[1].image.topics["orders"].partitions
    assert 2 not in partitions[0].isr
    assert partitions[0].leader != 2
    assert 2 in partitions[1].isr
    await cluster.stop()


@in_virtual_time
async def test_losses_wait_for_a_controller_only_so_long(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders")
    cluster.elect(-1)
    with pytest.raises(ApiError):
        await cluster[2].lifecycle.report_lost([("orders", 0)])
    await cluster.stop()


# --- leaving ---


@in_virtual_time
async def test_leadership_is_handed_over_before_a_broker_leaves(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    started = now()
    await cluster[2].lifecycle.controlled_shutdown()
    assert now() - started < 2
    partitions = cluster[1].image.topics["orders"].partitions.values()
    assert {partition.leader for partition in partitions} == {1, 3}
    assert cluster[1].image.brokers[2].fenced
    await cluster.stop()


@in_virtual_time
async def test_a_leaver_waits_until_the_others_know_the_new_leaders(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    cluster[3].lags = True
    leaving = asyncio.create_task(cluster[2].lifecycle.controlled_shutdown())
    await asyncio.sleep(1)
    assert not leaving.done()
    cluster[3].lags = False
    cluster[3].metadata.follow()
    await asyncio.wait_for(leaving, 2)
    await cluster.stop()


@in_virtual_time
async def test_a_leaver_gives_up_when_no_controller_hears_it(tmp_path: Path) -> None:
    cluster = await three(tmp_path)
    await create(cluster[1], "orders", partitions=6)
    cluster.elect(-1)
    started = now()
    await cluster[2].lifecycle.controlled_shutdown()
    assert 2 < now() - started < 6
    await cluster.stop()


@in_virtual_time
async def test_a_lone_node_leaves_at_once(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, size=1)
    cluster.elect(1)
    await cluster.start()
    started = now()
    await cluster[1].lifecycle.controlled_shutdown()
    await cluster[1].lifecycle.close()
    assert now() == started
    await cluster.stop()
