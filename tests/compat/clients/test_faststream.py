"""FastStream on both of its Kafka back ends: routing, answers, batches, manual acknowledgement and requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.kafka import KafkaBroker as AioBroker
from pydantic import BaseModel
from tests.compat import confluent
from tests.compat.message import Message
from tests.waiting import eventually_async

BROKERS = [pytest.param(AioBroker, id="aiokafka"), pytest.param(ConfluentBroker, id="confluent")]
TIMEOUT_S = 60.0

MakeBroker = Callable[..., Any]


class Order(BaseModel):
    number: int
    item: str


@contextlib.asynccontextmanager
async def running(broker: Any) -> AsyncIterator[Any]:
    """The application as FastStream runs it, without its signal handlers."""
    app = FastStream(broker)
    await app.start()
    try:
        yield broker
    finally:
        await app.stop()


def noting(subscribe: Any) -> asyncio.Queue[str]:
    """Subscribe with a handler that keeps what it is given."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    @subscribe
    async def note(text: str) -> None:
        seen.put_nowait(text)

    return seen


@pytest.mark.parametrize("make", BROKERS)
async def test_an_application_passes_messages_on(
    bootstrap: str, new_topic: Callable[..., str], group: str, make: MakeBroker
) -> None:
    orders, invoices = new_topic(partitions=2), new_topic()
    broker = make(bootstrap)
    seen = noting(broker.subscriber(invoices, group_id=group + "-2", auto_offset_reset="earliest"))

    @broker.subscriber(orders, group_id=group, auto_offset_reset="earliest")
    @broker.publisher(invoices)
    async def invoice(order: Order) -> str:
        return f"{order.number} x {order.item}"

    async with running(broker):
        for number in range(5):
            await broker.publish(Order(number=number, item="bolt"), topic=orders, key=b"%d" % number)
        arrived = [await asyncio.wait_for(seen.get(), TIMEOUT_S) for _ in range(5)]
    assert sorted(arrived) == [f"{number} x bolt" for number in range(5)]


@pytest.mark.parametrize("make", BROKERS)
async def test_batches(bootstrap: str, topic: str, group: str, make: MakeBroker) -> None:
    broker = make(bootstrap)
    seen: asyncio.Queue[list[str]] = asyncio.Queue()

    @broker.subscriber(topic, group_id=group, auto_offset_reset="earliest", batch=True, max_records=50)
    async def note(texts: list[str]) -> None:
        seen.put_nowait(texts)

    async with running(broker):
        await broker.publish_batch(*(f"message {number}" for number in range(20)), topic=topic)
        arrived: list[str] = []
        while len(arrived) < 20:
            arrived += await asyncio.wait_for(seen.get(), TIMEOUT_S)
    assert arrived == [f"message {number}" for number in range(20)]


@pytest.mark.parametrize("make", BROKERS)
async def test_what_was_not_acknowledged_comes_again(
    bootstrap: str, topic: str, group: str, make: MakeBroker
) -> None:
    await asyncio.to_thread(confluent.publish, bootstrap, topic, [Message(value=b"a job")])
    for policy in (AckPolicy.MANUAL, AckPolicy.ACK):
        broker = make(bootstrap)
        seen = noting(
            broker.subscriber(topic, group_id=group, auto_offset_reset="earliest", ack_policy=policy)
        )
        async with running(broker):
            assert await asyncio.wait_for(seen.get(), TIMEOUT_S) == "a job"


@pytest.mark.parametrize("make", BROKERS)
async def test_headers_and_correlation_travel(
    bootstrap: str, topic: str, group: str, make: MakeBroker
) -> None:
    broker = make(bootstrap)
    seen = noting(broker.subscriber(topic, group_id=group, auto_offset_reset="earliest"))

    @broker.subscriber(topic, group_id=group + "-raw", auto_offset_reset="earliest")
    async def ignore(message: Any) -> None:
        """A second group on the same topic changes nothing for the first."""

    async with running(broker):
        await broker.publish("hello", topic=topic, headers={"tenant": "acme"}, correlation_id="c-1")
        assert await asyncio.wait_for(seen.get(), TIMEOUT_S) == "hello"
    [received] = await asyncio.to_thread(confluent.read, bootstrap, topic, 1)
    headers = dict(received.message.headers)
    assert headers["tenant"] == b"acme"
    assert headers["correlation_id"] == b"c-1"


@pytest.mark.parametrize("make", BROKERS)
async def test_workers_of_one_group_share(
    bootstrap: str, new_topic: Callable[..., str], group: str, make: MakeBroker
) -> None:
    topic = new_topic(partitions=4)
    broker = make(bootstrap)
    workers = [
        noting(broker.subscriber(topic, group_id=group, auto_offset_reset="earliest")) for _ in range(2)
    ]
    jobs = [Message(value=b"job %d" % number, partition=number % 4) for number in range(40)]
    async with running(broker):
        await asyncio.to_thread(confluent.publish, bootstrap, topic, jobs)

        async def all_done() -> bool:
            return sum(worker.qsize() for worker in workers) >= 40

        await eventually_async(all_done)
    done = [worker.get_nowait() for worker in workers for _ in range(worker.qsize())]
    assert sorted(done) == sorted(f"job {number}" for number in range(40))
