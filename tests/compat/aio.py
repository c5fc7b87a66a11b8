"""aiokafka behind the few verbs that the tests share; `publish` and `read` also work outside of a loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from tests.compat.message import Message, Received, received_record

TIMEOUT_S = 60.0
UNACKNOWLEDGED = -1


def publish(
    bootstrap: str, topic: str, messages: Iterable[Message], codec: str = "none", **settings: Any
) -> list[int]:
    return asyncio.run(publish_async(bootstrap, topic, messages, codec, **settings))


def read(bootstrap: str, topic: str, count: int, *, partitions: int = 1, **settings: Any) -> list[Received]:
    async def read_async() -> list[Received]:
        async with consuming(bootstrap, **settings) as client:
            client.assign([TopicPartition(topic, index) for index in range(partitions)])
            return await take(client, count)

    return asyncio.run(read_async())


def read_to_end(bootstrap: str, topic: str) -> list[Received]:
    """All that is left of the topic's only partition, whose offsets may have gaps."""

    async def read_async() -> list[Received]:
        partition = TopicPartition(topic, 0)
        async with consuming(bootstrap) as client, asyncio.timeout(TIMEOUT_S):
            client.assign([partition])
            end = (await client.end_offsets([partition]))[partition]
            received: list[Received] = []
            while await client.position(partition) < end:
                received.append(received_record(await client.getone()))
            return received

    return asyncio.run(read_async())


@contextlib.asynccontextmanager
async def producing(bootstrap: str, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    client = AIOKafkaProducer(bootstrap_servers=bootstrap, **({"linger_ms": 5} | settings))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


@contextlib.asynccontextmanager
async def consuming(bootstrap: str, *topics: str, **settings: Any) -> AsyncIterator[AIOKafkaConsumer]:
    defaults = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 100, "enable_auto_commit": False}
    client = AIOKafkaConsumer(*topics, bootstrap_servers=bootstrap, **(defaults | settings))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def publish_async(
    bootstrap: str, topic: str, messages: Iterable[Message], codec: str = "none", **settings: Any
) -> list[int]:
    compression = None if codec == "none" else codec
    async with producing(bootstrap, compression_type=compression, **settings) as client:
        sent = [await client.send(topic, **message.send_arguments()) for message in messages]
        stored = await asyncio.wait_for(asyncio.gather(*sent), TIMEOUT_S)
        return [UNACKNOWLEDGED if each is None else each.offset for each in stored]


async def take(client: AIOKafkaConsumer, count: int, within_s: float = TIMEOUT_S) -> list[Received]:
    received: list[Received] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while len(received) < count:
                received.append(received_record(await client.getone()))
    assert len(received) == count, f"got {len(received)} of {count} messages: {received[:5]} ..."
    return received
