"""How transactions end: markers, restarts, errors, and what operators see."""

from __future__ import annotations

import asyncio
import pkgutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.coordinators.transactions.transaction_stage import SETTINGS, Stage, restart
from tests.unit.broker.coordinators.transactions.transactional_client import (
    BOTH,
    DESCRIBE_PRODUCERS,
    NEW,
    OLD,
    WRITE_TXN_MARKERS,
    TransactionalClient,
    Versions,
    seen,
)
from tests.unit.broker.raw_client import create_topic, delete_topic, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.coordinators.transactions.markers import MarkerQueue, MarkerSender
from penstock.broker.metrics.coordinators import transaction_families
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import TopicPartition, TransactionMarkers

NONE = ErrorCode.none


async def test_a_deleted_topic_does_not_hold_up_the_end(stage: Stage) -> None:
    await create_topic(stage.node, "short", partitions=1)
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    assert await producer.send("b", topic="short") is NONE
    await delete_topic(stage.node, "short")
    assert await producer.end(commit=True) is NONE
    assert await stage.settled(producer) == "CompleteCommit"
    assert await stage.committed() == ["a"]


async def test_a_topic_that_this_node_has_not_heard_of_yet_is_not_taken_for_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node leads a moment before its image says so, and that may be older than the topics of a transaction."""
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    index = stage.node.transactions().shard_of("tx")
    looked = []

    class Older:
        def __init__(self, image: ClusterImage) -> None:
            self._image = image

        def __getattr__(self, name: str) -> Any:
            return getattr(self._image, name)

        def partition(self, topic: str, index: int) -> Any:
            looked.append(topic)
            state = self._image.partition(topic, index)
            assert state is not None
            return None if topic == "t" else state._replace(leader_epoch=state.leader_epoch - 1)

    async def never_written(*args: Any) -> Any:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        with monkeypatch.context() as other:
            other.setattr(MarkerSender, "_write", never_written)
            assert await producer.end(commit=True) is NONE
        image = stage.node.image
        patch.setattr(stage.node.metadata, "image", Older(image))
        stage.node.transactions()._runtime.unload(index)  # the next load sends the markers again
        await until(lambda: looked.count("__transaction_state") > 3)
        assert "t" not in looked
    assert await stage.settled(producer) == "CompleteCommit"
    assert await stage.committed() == ["a"]


async def test_transactions_are_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, commit in enumerate((True, True, False)):
        producer = await stage.producer(NEW, f"done-{number}")
        assert await producer.send(str(number)) is NONE
        assert await producer.end(commit=commit) is NONE
        await stage.settled(producer)
    replaced = await stage.producer(NEW, "done-0")
    assert await replaced.send("fenced") is NONE
    await stage.producer(NEW, "done-0")
    late = await stage.producer(NEW, "late", transaction_timeout=timedelta(milliseconds=50))
    assert await late.send("late") is NONE
    await until(lambda: stage.node.transactions().ended["timed_out"] == 1)
    await stage.settled(late)
    is_open = await stage.producer(NEW, "open")
    assert await is_open.send("open") is NONE
    never = asyncio.Event()

    async def never_written(*args: Any) -> Any:
        await never.wait()

    monkeypatch.setattr(MarkerSender, "_write", never_written)
    prepared = await stage.producer(NEW, "prepared")
    assert [await prepared.send("x", partition=index) for index in (0, 1)] == [NONE] * 2
    assert await prepared.end(commit=True) is NONE
    families = {
        family.name: dict(family.samples) for family in transaction_families(stage.node.transactions())
    }
    assert families["penstock_transactions_ended"] == {
        ("committed",): 3,
        ("aborted",): 1,
        ("fenced",): 1,
        ("timed_out",): 1,
    }
    states = {state: count for (state,), count in families["penstock_transactions"].items() if count}
    assert states == {
        "Empty": 1,
        "Ongoing": 1,
        "PrepareCommit": 1,
        "CompleteCommit": 1,
        "CompleteAbort": 2,
    }
    assert families["penstock_transaction_markers_waiting"] == {(): 2}


@BOTH
async def test_an_open_transaction_goes_on_after_a_restart(
    stage: Stage, versions: Versions, tmp_path: Path
) -> None:
    producer = await stage.producer(versions)
    await stage.begin(producer, 0, 1)
    assert await producer.send("before") is NONE
    await restart(stage, tmp_path)
    producer.client = await stage.client()
    assert await producer.send("after") is NONE
    assert await producer.send("other", partition=1) is NONE
    assert await producer.end(commit=True) is NONE
    assert await stage.settled(producer) == "CompleteCommit"
    assert (await stage.committed(0), await stage.committed(1)) == (["before", "after"], ["other"])


async def test_a_transaction_that_was_prepared_is_completed_after_a_restart(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    never = asyncio.Event()

    async def never_written(*args: Any) -> Any:
        await never.wait()

    with monkeypatch.context() as patch:
        patch.setattr(MarkerSender, "_write", never_written)
        assert await producer.end(commit=True) is NONE
        assert (await producer.state()).transaction_state == "PrepareCommit"
        assert await stage.committed() == []
        await restart(stage, tmp_path, clean=False)
    await until(lambda: stage.node.transactions.existing is not None)
    producer.client = await stage.client()
    assert await stage.settled(producer) == "CompleteCommit"
    assert await stage.committed() == ["a"]


async def test_an_operator_finds_and_ends_a_transaction_that_hangs(tmp_path: Path) -> None:
    """By the requests of Apache Kafka's tool (`find-hanging`, `abort`), which know nothing of a coordinator."""
    async with running(tmp_path, **SETTINGS, transaction_partition_verification_enable="false") as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        producer = TransactionalClient(client, "tx", OLD)
        await producer.init()
        assert await producer.send("a") is NONE
        assert await producer.state_name() == "Empty", "the coordinator will never end it"
        topic = SimpleNamespace(name="t", partition_indexes=(0,))
        described = await client.ask(SimpleNamespace(topics=(topic,)), api_key=DESCRIBE_PRODUCERS, version=0)
        (hanging,) = described.topics[0].partitions[0].active_producers
        assert hanging.current_txn_start_offset == 0
        assert (await seen(client)).last_stable_offset == 0
        marker = SimpleNamespace(
            producer_id=hanging.producer_id,
            producer_epoch=hanging.producer_epoch,
            transaction_result=False,
            topics=(topic,),
            coordinator_epoch=max(hanging.coordinator_epoch, 0),
        )
        reply = await client.ask(SimpleNamespace(markers=(marker,)), api_key=WRITE_TXN_MARKERS, version=1)
        assert reply.markers[0].topics[0].partitions[0].error_code is NONE
        assert await seen(client) == ([], 2, 2)
        await client.close()


@pytest.mark.parametrize(
    "failing",
    [
        "penstock.broker.coordinators.transactions.coordinator.TransactionCoordinator.join",
        "penstock.broker.coordinators.transactions.markers.MarkerAppender.append",
    ],
)
async def test_an_error_in_one_response_delays_no_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Otherwise the request would wait forever, and with it all later batches of the producer."""
    producer = await stage.producer(NEW)
    mistakes = ["a mistake"]
    answer = pkgutil.resolve_name(failing)

    async def mistaken(*args: Any, **named: Any) -> Any:
        if mistakes:
            raise LookupError(mistakes.pop())
        return await answer(*args, **named)

    monkeypatch.setattr(failing, mistaken)
    first = producer.batch("a")
    while (error := await producer.send_batch(first)) is ErrorCode.not_enough_replicas:
        pass
    assert error is NONE
    assert await producer.end(commit=True) is NONE
    assert await stage.settled(producer) == "CompleteCommit"
    assert not mistakes
    assert await stage.committed() == ["a"]


async def test_a_mistake_in_the_answer_of_another_broker_is_no_answer(
    stage: Stage,
) -> None:
    async def mistaken(*args: Any, **named: Any) -> Any:
        raise LookupError("a mistake")

    brokers = SimpleNamespace(call=mistaken)
    queue, place = MarkerQueue(2, brokers, stage.node.environment), TopicPartition("t", 0)  # type: ignore[arg-type]
    markers = TransactionMarkers(1, "tx", 1000, 0, True, (place,), 2)
    for _ in range(2):
        told = await queue.write(markers, 0, markers.partitions, lambda: False)
        assert told == {place: ErrorCode.network_exception}


async def test_a_mistake_does_not_end_the_delivery_of_markers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    mistakes = ["a mistake"]
    begin = MarkerSender._begin

    def mistaken(*args: Any) -> None:
        if mistakes:
            raise LookupError(mistakes.pop())
        begin(*args)

    monkeypatch.setattr(MarkerSender, "_begin", mistaken)
    assert await producer.end(commit=True) is NONE
    assert await stage.settled(producer) == "CompleteCommit"
    assert not mistakes
    assert await stage.committed() == ["a"]
