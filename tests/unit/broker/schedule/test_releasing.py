"""Releases by plan when the partition that they go to makes trouble: once each, and nobody waits for the others."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.compat import confluent
from tests.compat.message import Message, values

from penstock.broker.schedule import releaser
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import read_header
from penstock.testing import EmbeddedBroker

Append = Callable[..., Awaitable[int]]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedBroker]:
    monkeypatch.setattr(releaser, "_RETRY_S", 0.05)
    with EmbeddedBroker(settings={"penstock.schedule.topic.num.partitions": 1}) as running:
        running.create_topic("jobs", partitions=2, penstock_schedule_enable="true")
        yield running


def instead(
    monkeypatch: pytest.MonkeyPatch, append: Callable[[Append, int, bytearray], Awaitable[int]]
) -> None:
    """`append` gets the real one, bound to its arguments, the partition and the batch."""
    real = releaser.append_batch_once

    async def wrapped(node: Any, topic: str, partition: int, batch: bytearray, **more: Any) -> int:
        async def proceed() -> int:
            return await real(node, topic, partition, batch, **more)

        return await append(proceed, partition, batch)

    monkeypatch.setattr(releaser, "append_batch_once", wrapped)


def publish(broker: EmbeddedBroker, count: int, partition: int = 0, delay_ms: int = 1) -> list[bytes]:
    messages = [
        Message(
            b"%d-%d" % (partition, n),
            headers=(("penstock-deliver-after", b"%d" % delay_ms),),
            partition=partition,
        )
        for n in range(count)
    ]
    confluent.publish(broker.bootstrap_servers, "jobs", messages)
    return [message.value for message in messages if message.value is not None]


def read(broker: EmbeddedBroker, count: int) -> list[bytes | None]:
    return values(confluent.read(broker.bootstrap_servers, "jobs", count, partitions=2))


def test_a_partition_that_takes_nothing_does_not_hold_up_the_others(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_blocked = True

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        if partition == 0 and is_blocked:
            raise ApiError(ErrorCode.not_enough_replicas)
        return await proceed()

    instead(monkeypatch, append)
    stuck, free = publish(broker, 20), publish(broker, 20, partition=1)
    assert read(broker, 20) == free
    is_blocked = False
    assert sorted(read(broker, 40)) == sorted(stuck + free)


def test_what_was_appended_without_an_answer_is_there_once(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        offset = await proceed()
        if len(lost) < 3:
            lost.append(offset)
            raise TimeoutError
        return offset

    instead(monkeypatch, append)
    sent = publish(broker, 10)
    last = publish(broker, 1, partition=1, delay_ms=500)
    assert sorted(read(broker, 11)) == sorted(sent + last)
    assert len(set(lost)) < 3, "the same plan was repeated"


def test_plans_that_are_too_large_are_made_smaller(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        counts.append(read_header(batch).record_count)
        if counts[-1] > 7:
            raise ApiError(ErrorCode.message_too_large)
        return await proceed()

    instead(monkeypatch, append)
    sent = publish(broker, 50, delay_ms=200)
    assert read(broker, 50) == sent
    assert max(counts) > 7


def test_a_producer_that_is_not_known_any_more_is_replaced(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producers: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        producers.append(read_header(batch).producer_id)
        if len(set(producers)) == 1:
            raise ApiError(ErrorCode.out_of_order_sequence_number)
        return await proceed()

    instead(monkeypatch, append)
    sent = publish(broker, 10)
    assert read(broker, 10) == sent
    assert len(set(producers)) == 2


def test_a_shard_that_fails_is_loaded_again(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("no space left"), ValueError("surprise")])
    real = releaser.gather

    def gather(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return real(*arguments)

    monkeypatch.setattr(releaser, "gather", gather)
    sent = publish(broker, 10)
    assert read(broker, 10) == sent
