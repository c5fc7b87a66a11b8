"""Metadata of all topics: the same bytes as without the cache, encoded once, and in small steps."""

import asyncio
import struct
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from kio.index import load_response_schema
from kio.serial import entity_reader
from tests.unit.broker.raw_client import (
    API_VERSIONS,
    METADATA,
    Client,
    create_topic,
    delete_topic,
    frame,
    running,
    turn_until,
    until,
)

from penstock.broker.handlers import metadata as handler
from penstock.broker.network import response_cache
from penstock.broker.network.apis import EncodedResponse, encode_response_body
from penstock.broker.network.requests import RequestContext
from penstock.broker.node import Node
from penstock.protocol.schemas import schema_class

_DESCRIBE_TOPIC_PARTITIONS = 75
_ALL_V4 = struct.pack(">i", -1) + b"\x00"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        for name in ("a", "b", "c"):
            await create_topic(node, name, partitions=3)
        yield node


class Described:
    """Names of topics in the order in which they are described."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        describe = handler._topic

        def counted(ctx: Any, viewer: Any, topic: Any, operations: int) -> Any:
            self.names.append(topic.name)
            return describe(ctx, viewer, topic, operations)

        monkeypatch.setattr(handler, "_topic", counted)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Described:
    return Described(monkeypatch)


def _names(reply: bytes) -> list[str]:
    response, _ = entity_reader(load_response_schema(METADATA, 4))(reply, 0)
    return [topic.name for topic in response.topics]


async def _all(client: Client) -> list[str]:
    return _names(await client.ask(frame(METADATA, 4, _ALL_V4)))


async def test_it_is_what_would_have_been_encoded_at_once(node: Node) -> None:
    for version, with_operations in product(range(14), (False, True)):
        shape = 10 if version in range(8, 11) else 13
        cluster = {"include_cluster_authorized_operations": with_operations} if shape == 10 else {}
        request = schema_class(f"metadata.v{shape}.request:MetadataRequest")(
            topics=None,
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=with_operations,
            **cluster,
        )
        context = RequestContext(node.services, METADATA, version, None, "host", node.listeners[0].name)
        view = handler._View(context, request)
        plain = view.response(tuple(view.topic(topic) for topic in node.image.topics.values()))
        answer = handler.handle(context, request)
        assert isinstance(answer, EncodedResponse)
        assert answer.body == encode_response_body(METADATA, version, plain)
        assert handler.handle(context, request) is answer


async def test_topics_are_described_once_until_they_change(node: Node, described: Described) -> None:
    client = await Client.connect(node)
    assert await _all(client) == ["a", "b", "c"]
    assert described.names == ["a", "b", "c"]
    described.names.clear()
    assert await _all(client) == ["a", "b", "c"]
    assert described.names == []
    await create_topic(node, "d")
    await delete_topic(node, "b")
    assert await _all(client) == ["a", "c", "d"]
    assert described.names == ["d"]
    # By name it is the same topic.
    one = struct.pack(">i", 1) + struct.pack(">h", 1) + b"c" + b"\x00"
    assert _names(await client.ask(frame(METADATA, 4, one))) == ["c"]
    assert described.names == ["d"]


async def test_topics_are_described_again_when_brokers_change(node: Node, described: Described) -> None:
    client = await Client.connect(node)
    await _all(client)
    described.names.clear()
    image = node.image.fork()
    broker = image.brokers[1]
    image.brokers[2] = broker._replace(id=2, fenced=True)
    node.metadata.image = image
    await _all(client)
    assert described.names == ["a", "b", "c"]


async def test_many_topics_are_described_in_pieces(
    node: Node, described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_cache, "_PIECE_PARTITIONS", 2)
    for number in range(40):
        await create_topic(node, f"t{number:02}")
    client, neighbour = await Client.connect(node), await Client.connect(node)
    await neighbour.ask(frame(API_VERSIONS, 0))
    client.writer.write(frame(METADATA, 4, _ALL_V4))
    await turn_until(lambda: bool(described.names))
    await neighbour.ask(frame(API_VERSIONS, 0))
    assert len(described.names) < 43
    assert len(_names((await client.reply())[1])) == len(described.names) == 43


async def test_clients_that_ask_meanwhile_share_the_work_and_see_what_was_created_before(
    node: Node, described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_cache, "_PIECE_PARTITIONS", 2)
    clients = [await Client.connect(node) for _ in range(3)]
    for client in clients:
        client.writer.write(frame(METADATA, 4, _ALL_V4) * 5)
    await turn_until(lambda: bool(described.names))
    await create_topic(node, "late")
    assert "late" in await _all(await Client.connect(node))
    for client in clients:
        assert [len(_names((await client.reply())[1])) for _ in range(5)] in (
            [3] * 5,
            [3, 4, 4, 4, 4],
            [4] * 5,
        )
    assert sorted(described.names) == ["a", "b", "c", "late"]


async def test_a_connection_has_one_costly_request_under_way(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_cache, "_PIECE_PARTITIONS", 0)
    client = await Client.connect(node)
    await client.ask(frame(API_VERSIONS, 0))
    (connection,) = node.server.connections
    most = 0
    spawn = node.services.spawn

    def watched(work: Any) -> Any:
        nonlocal most
        most = max(most, len(connection._slots))
        return spawn(work)

    monkeypatch.setattr(node.services, "spawn", watched)
    client.writer.write(
        b"".join(frame(METADATA, 4, _ALL_V4, correlation=i) for i in range(9))
        + frame(API_VERSIONS, 0, correlation=9)
    )
    assert [(await client.reply())[0] for _ in range(10)] == list(range(10))
    assert most == 1


async def test_who_leaves_before_the_answer_is_ready_takes_the_request_along(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_cache, "_PIECE_PARTITIONS", 0)
    gate = asyncio.Event()
    pieces = response_cache.TopicResponseCache._encode_in_pieces

    async def gated(*args: Any) -> None:
        await gate.wait()
        await pieces(*args)

    monkeypatch.setattr(response_cache.TopicResponseCache, "_encode_in_pieces", gated)
    client = await Client.connect(node)
    client.writer.write(frame(METADATA, 4, _ALL_V4) * 9)
    await turn_until(lambda: any(c.has_pending_replies for c in node.server.connections))
    client.writer.close()
    # The node looks for peers that have gone every second, as it reads no more from this one.
    await until(lambda: not node.server.connections)
    gate.set()
    assert len(await _all(await Client.connect(node))) == 3


async def test_pages_of_all_topics_are_the_same_from_what_is_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = load_response_schema(_DESCRIBE_TOPIC_PARTITIONS, 0)
    client = await Client.connect(node)

    async def pages(limit: int) -> list[tuple[str, int]]:
        cursor, found = b"\xff", []
        while True:
            body = b"\x00" + b"\x01" + struct.pack(">i", limit) + cursor + b"\x00"
            reply = await client.ask(frame(_DESCRIBE_TOPIC_PARTITIONS, 0, body))
            response, _ = entity_reader(schema)(reply, 1)
            found += [(t.name, p.partition_index) for t in response.topics for p in t.partitions]
            if response.next_cursor is None:
                return found
            name = response.next_cursor.topic_name.encode()
            cursor = b"\x01" + bytes([len(name) + 1]) + name
            cursor += struct.pack(">i", response.next_cursor.partition_index) + b"\x00"

    expected = [(name, index) for name in "abc" for index in range(3)]
    for limit in (1, 2, 3, 4, 100):
        assert await pages(limit) == expected
    monkeypatch.setattr(response_cache, "_PIECE_PARTITIONS", 0)
    await create_topic(node, "d")
    assert await pages(2) == [*expected, ("d", 0)]
