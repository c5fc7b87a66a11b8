"""A node in the process of the test, and a client that sends frames which tests can pipeline, cut and repeat."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kio.index import load_response_schema
from kio.serial import entity_reader

from penstock.broker.config.node_settings import load_settings
from penstock.broker.handlers.alter_configs import alter_cluster_configs
from penstock.broker.node import Node
from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    incremental_alter_configs,
)
from penstock.cluster.controller.alter_topics import TopicRef, delete_topics
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ConfigResource, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

API_VERSIONS, METADATA, PRODUCE, FETCH = 18, 3, 0, 1


@contextlib.asynccontextmanager
async def running(tmp_path: Path, **settings: str) -> AsyncIterator[Node]:
    node = new_node(tmp_path, **settings)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def new_node(tmp_path: Path, **settings: str) -> Node:
    given = {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path / "data")}
    given |= {name.replace("_", "."): value for name, value in settings.items()}
    return Node(load_settings(given, {}))


async def create_topic(node: Node, name: str, partitions: int = 1, **configs: str) -> None:
    topic = NewTopic(
        name=name,
        partitions=partitions,
        configs=tuple((key.replace("_", "."), value) for key, value in configs.items()),
    )
    (result,) = await node.topic_creator.create([topic])
    assert result.error is ErrorCode.none, result


async def delete_topic(node: Node, name: str) -> None:
    await node.metadata.propose(lambda image: delete_topics(image, [TopicRef(name)]))


async def set_config(node: Node, topic: str, name: str, value: str) -> None:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    change = AlterConfigsResource(resource=resource, changes=(ConfigChange(name, ConfigOp.SET, value),))
    (result,) = await alter_cluster_configs(node, incremental_alter_configs, [change], False)
    assert result.error is ErrorCode.none, result


async def until(reached: Callable[[], object]) -> None:
    """Let the node get on until something has happened."""
    for _ in range(60_000):
        if reached():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never reached")


async def turn_until(reached: Callable[[], bool]) -> None:
    """Let the loop turn, and stop at the very turn in which it is reached."""
    for _ in range(1_000_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("never reached")


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, node: Node, *, receive_bytes: int | None = None) -> "Client":
        """`receive_bytes` bounds what the system takes in for a client that does not read."""
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", node.listeners[0].port))
        return cls(*await asyncio.open_connection(sock=connection))

    async def reply(self) -> tuple[int, bytes]:
        size = struct.unpack(">i", await self.reader.readexactly(4))[0]
        data = await self.reader.readexactly(size)
        return struct.unpack_from(">i", data)[0], data[4:]

    async def ask(self, frame: bytes) -> bytes:
        self.writer.write(frame)
        return (await self.reply())[1]

    async def create(self, topic: str) -> None:
        """As clients do that rely on auto-creation: ask for it until it is there."""
        read = entity_reader(load_response_schema(METADATA, 4))
        while read(await self.ask(metadata(topic)), 0)[0].topics[0].error_code is not ErrorCode.none:
            pass

    async def is_cut_off(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def produce(self, *args: Any, **options: Any) -> "Produced":
        (result,) = produced(await self.ask(produce(*args, **options)))
        return result

    async def fetch(self, *args: Any, **options: Any) -> Any:
        return fetched(await self.ask(fetch_v7(*args, **options)))


def frame(api_key: int, version: int, body: bytes = b"", correlation: int = 0) -> bytes:
    message = struct.pack(">hhih", api_key, version, correlation, 4) + b"test" + body
    return struct.pack(">i", len(message)) + message


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def metadata(topic: str, correlation: int = 0) -> bytes:
    return frame(METADATA, 4, struct.pack(">i", 1) + string(topic) + b"\x01", correlation)


def batch_of(value: bytes, key: bytes | None = None, sequence: int | None = None) -> bytes:
    """One record; with a sequence it is producer 7's."""
    producer = {} if sequence is None else {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
    return bytes(encode_batch([Record(0, 1_000, key, value)], **producer))


def produce(
    topic: str,
    value: bytes,
    *,
    key: bytes | None = None,
    sequence: int | None = None,
    partition: int = 0,
    acks: int = 1,
    correlation: int = 0,
    timeout_ms: int = 60_000,
) -> bytes:
    parts = [(partition, batch_of(value, key, sequence))]
    return produce_many([(topic, parts)], acks=acks, correlation=correlation, timeout_ms=timeout_ms)


def produce_many(
    topics: Sequence[tuple[str, Sequence[tuple[int, bytes]]]],
    *,
    acks: int = 1,
    correlation: int = 0,
    timeout_ms: int = 60_000,
) -> bytes:
    body = struct.pack(">hhi", -1, acks, timeout_ms) + struct.pack(">i", len(topics))
    for topic, parts in topics:
        body += string(topic) + struct.pack(">i", len(parts))
        for index, batch in parts:
            body += struct.pack(">ii", index, len(batch)) + batch
    return frame(PRODUCE, 7, body, correlation)


def fetch(
    topic: str, offset: int, *, max_wait_ms: int = 0, min_bytes: int = 1, correlation: int = 0
) -> bytes:
    body = (
        struct.pack(">iiiib", -1, max_wait_ms, min_bytes, 1 << 20, 0) + struct.pack(">i", 1) + string(topic)
    )
    return frame(FETCH, 4, body + struct.pack(">iiqi", 1, 0, offset, 1 << 20), correlation)


def fetch_v7(
    wanted: Sequence[tuple[str, int, int]] = (),
    *,
    session: tuple[int, int] = (0, -1),
    forget: Sequence[tuple[str, int]] = (),
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    partition_bytes: int = 1 << 20,
    correlation: int = 0,
    replica: int = -1,
) -> bytes:
    """`wanted` is (topic, partition, offset), `session` is (id, epoch)."""
    body = struct.pack(">iiiibii", replica, max_wait_ms, min_bytes, max_bytes, 0, *session)
    body += struct.pack(">i", len(wanted))
    for topic, index, offset in wanted:
        body += string(topic) + struct.pack(">iiqqi", 1, index, offset, -1, partition_bytes)
    body += struct.pack(">i", len(forget))
    for topic, index in forget:
        body += string(topic) + struct.pack(">ii", 1, index)
    return frame(FETCH, 7, body, correlation)


class Produced(NamedTuple):
    topic: str
    partition: int
    error: ErrorCode
    offset: int


def produced(reply: bytes) -> list[Produced]:
    response, _ = entity_reader(load_response_schema(PRODUCE, 7))(reply, 0)
    return [
        Produced(topic.name, part.index, part.error_code, part.base_offset)
        for topic in response.responses
        for part in topic.partition_responses
    ]


class Fetched(NamedTuple):
    error: ErrorCode
    session_id: int
    partitions: dict[tuple[str, int], Any]

    def one(self) -> Any:
        (partition,) = self.partitions.values()
        return partition


def fetched(reply: bytes) -> Fetched:
    response, _ = entity_reader(load_response_schema(FETCH, 7))(reply, 0)
    partitions = {
        (topic.topic, part.partition_index): part for topic in response.responses for part in topic.partitions
    }
    return Fetched(response.error_code, response.session_id, partitions)


def base_offset(reply: bytes, topic: str) -> int:
    error, offset = struct.unpack_from(">hq", reply, 4 + 2 + len(topic) + 4 + 4)
    assert error == 0
    return int(offset)
