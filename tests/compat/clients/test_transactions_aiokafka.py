"""Transactions with aiokafka."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiokafka.errors
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from tests.compat import aio
from tests.compat.message import Message, numbered, values
from tests.waiting import eventually_async

END = b"end"


@pytest.fixture
def name(unique: Callable[[str], str]) -> str:
    return unique("tx")


@asynccontextmanager
async def transactional(bootstrap: str, name: str, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    async with aio.producing(bootstrap, transactional_id=name, **settings) as producer:
        yield producer


async def read_all(bootstrap: str, topic: str, *, committed: bool) -> list[bytes | None]:
    await aio.publish_async(bootstrap, topic, [Message(value=END)])
    isolation = "read_committed" if committed else "read_uncommitted"
    found: list[bytes | None] = []
    async with aio.consuming(bootstrap, isolation_level=isolation) as client:
        client.assign([TopicPartition(topic, 0)])
        while not found or found[-1] != END:
            found += values(await aio.take(client, 1))
    return [value for value in found if value != END]


async def test_committed_transactions_are_seen_and_aborted_ones_are_not(
    bootstrap: str, topic: str, name: str
) -> None:
    async with transactional(bootstrap, name) as producer:
        async with producer.transaction():
            await asyncio.gather(*[await producer.send(topic, value) for value in (b"a", b"b")])
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"never")
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"c")
    assert await read_all(bootstrap, topic, committed=True) == [b"a", b"b", b"c"]
    assert await read_all(bootstrap, topic, committed=False) == [b"a", b"b", b"never", b"c"]


async def test_a_zombie_is_fenced(bootstrap: str, topic: str, name: str) -> None:
    async with transactional(bootstrap, name) as zombie:
        await zombie.begin_transaction()
        await zombie.send_and_wait(topic, b"zombie")
        async with transactional(bootstrap, name) as heir:
            with pytest.raises(aiokafka.errors.ProducerFenced):
                await zombie.commit_transaction()
            async with heir.transaction():
                await heir.send_and_wait(topic, b"heir")
    assert await read_all(bootstrap, topic, committed=True) == [b"heir"]


async def test_what_is_consumed_and_what_is_produced_are_committed_together(
    bootstrap: str, new_topic: Callable[..., str], group: str, name: str
) -> None:
    source, target = new_topic(), new_topic()
    await aio.publish_async(bootstrap, source, numbered(10))
    place = TopicPartition(source, 0)
    settings = {"group_id": group, "isolation_level": "read_committed"}
    async with (
        aio.consuming(bootstrap, source, **settings) as reader,
        transactional(bootstrap, name) as producer,
    ):

        async def copy(count: int) -> None:
            received = await aio.take(reader, count)
            for each in received:
                await producer.send_and_wait(target, each.message.value)
            await producer.send_offsets_to_transaction({place: received[-1].offset + 1}, group)

        async def is_committed(offset: int) -> None:
            """This client does not ask for stable offsets: it may see the old one until the marker is there."""

            async def is_there() -> bool:
                return bool(await reader.committed(place) == offset)

            await eventually_async(is_there, what=f"offset {offset}")

        async with producer.transaction():
            await copy(4)
        await is_committed(4)
        await producer.begin_transaction()
        await copy(3)
        await producer.abort_transaction()
        assert await reader.committed(place) == 4
        reader.seek(place, 4)
        async with producer.transaction():
            await copy(6)
        await is_committed(10)
    assert await read_all(bootstrap, target, committed=True) == [b"%d" % number for number in range(10)]
