"""The channel to the active controller finds it on any node and retries until the timeout."""

import asyncio
from pathlib import Path

import pytest
from kio.schema.allocate_producer_ids.v0.request import AllocateProducerIdsRequest
from kio.schema.create_topics.v7 import request as create
from tests.unit.broker.controller.small_cluster import Cluster
from tests.unit.broker.virtual_time import in_virtual_time

from penstock.protocol.errors import ApiError, ErrorCode

ALLOCATE = 67
CREATE_TOPICS = 19


def for_ids(cluster: Cluster, node_id: int) -> AllocateProducerIdsRequest:
    return AllocateProducerIdsRequest(broker_id=node_id, broker_epoch=cluster[node_id].lifecycle.broker_epoch)


async def ask(cluster: Cluster, node_id: int, timeout_s: float = 15.0) -> tuple[int, int]:
    response = await cluster[node_id].channel.call(ALLOCATE, for_ids(cluster, node_id), timeout_s)
    assert response.error_code is ErrorCode.none
    return response.producer_id_start, response.producer_id_len


@in_virtual_time
async def test_the_active_controller_asks_itself_and_the_others_ask_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.heard.clear()
    assert await ask(cluster, 1) == (0, 1000)
    assert cluster.heard == []
    assert await ask(cluster, 2) == (1000, 1000)
    assert (1, ALLOCATE) in cluster.heard
    await cluster.stop()


@in_virtual_time
async def test_a_question_survives_an_election(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.elect(-1)
    asking = asyncio.create_task(ask(cluster, 3))
    await asyncio.sleep(2)
    assert not asking.done()
    cluster.elect(2)
    assert await asking == (0, 1000)
    await cluster.stop()


@in_virtual_time
async def test_a_node_that_becomes_active_answers_its_own_question(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.elect(-1)
    asking = asyncio.create_task(ask(cluster, 3))
    await asyncio.sleep(1)
    cluster.elect(3)
    assert await asking == (0, 1000)
    await cluster.stop()


@in_virtual_time
async def test_who_decides_no_longer_says_so_and_is_not_taken_at_its_word(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.elect(3)
    cluster[2].quorum.believes = 1
    asking = asyncio.create_task(ask(cluster, 2))
    await asyncio.sleep(1)
    assert not asking.done()
    cluster[2].quorum.believes = None
    assert await asking == (0, 1000)
    await cluster.stop()


@in_virtual_time
async def test_what_cannot_be_reached_is_asked_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.cuts.add((2, 1))
    asking = asyncio.create_task(ask(cluster, 2))
    await asyncio.sleep(2)
    cluster.cuts.clear()
    assert await asking == (0, 1000)
    await cluster.stop()


@in_virtual_time
async def test_a_frozen_controller_is_left_as_soon_as_another_is_elected(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster.frozen.add(1)
    asking = asyncio.create_task(ask(cluster, 2))
    await asyncio.sleep(1)
    cluster.elect(3)
    started = asyncio.get_running_loop().time()
    await asking
    assert asyncio.get_running_loop().time() - started < 0.5
    await cluster.stop()


@in_virtual_time
async def test_without_a_controller_the_time_runs_out(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with pytest.raises(ApiError) as failure:
        await ask(cluster, 2, timeout_s=3)
    assert failure.value.code is ErrorCode.request_timed_out
    assert asyncio.get_running_loop().time() == pytest.approx(1003, abs=0.01)


@in_virtual_time
async def test_other_errors_are_answers(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    request = AllocateProducerIdsRequest(broker_id=2, broker_epoch=7)
    response = await cluster[2].channel.call(ALLOCATE, request)
    assert response.error_code is ErrorCode.stale_broker_epoch
    await cluster.stop()


@in_virtual_time
async def test_what_a_node_creates_elsewhere_it_shows_itself(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    cluster[2].lags = True
    topic = create.CreatableTopic(
        name="orders", num_partitions=2, replication_factor=3, assignments=(), configs=()
    )
    calling = asyncio.create_task(
        cluster[2].channel.call(CREATE_TOPICS, create.CreateTopicsRequest(topics=(topic,)))
    )
    await asyncio.sleep(1)
    assert "orders" in cluster[1].image.topics
    assert not calling.done()
    cluster[2].metadata.follow()
    (result,) = (await calling).topics
    assert result.error_code is ErrorCode.none
    assert result.topic_id == cluster[2].image.topics["orders"].id
    await cluster.stop()


@in_virtual_time
async def test_producer_ids_come_from_one_counter(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.elect(1)
    await cluster.start()
    ids = [await cluster[node].producer_ids.fresh() for node in (1, 2, 3, 2) for _ in range(600)]
    assert len(set(ids)) == len(ids)
    cluster.elect(-1)
    refused = [await _fresh_or_error(cluster, 3) for _ in range(401)]
    assert refused[-1] is ErrorCode.coordinator_load_in_progress
    await cluster.stop()


async def _fresh_or_error(cluster: Cluster, node_id: int) -> int | ErrorCode:
    try:
        return await cluster[node_id].producer_ids.fresh()
    except ApiError as error:
        return error.code
