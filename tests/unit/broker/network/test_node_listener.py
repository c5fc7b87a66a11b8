"""Requests between nodes are served only on the listener for nodes."""

import asyncio
import io
import struct
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.api_versions.v4.request import ApiVersionsRequest
from kio.schema.fetch.v18.request import ReplicaState
from kio.schema.metadata.v13.request import MetadataRequest
from kio.serial import entity_writer
from tests.fuzz.messages import Requests
from tests.unit.broker.raw_client import running, until
from tests.unit.broker.three_nodes import Trio
from tests.unit.broker.wire_client import WireClient

from penstock.broker.config.node_settings import load_settings
from penstock.broker.environment import StartFailed
from penstock.broker.network.apis import APIS, FETCH
from penstock.broker.node import Node
from penstock.broker.quorum.storage import METADATA_TOPIC_ID
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ErrorCode

BOTH = {"listeners": "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"}
#: The requests that only nodes send, and the first version in which they are.
NODE_ONLY = {
    24: 4, 27: 1, 52: 0, 53: 0, 54: 0, 56: 3, 58: 0, 59: 0, 62: 0, 63: 0, 67: 0, 73: 0, 80: 0, 82: 0,
    83: 0, 84: 0, 85: 0, 86: 0, 87: 0,
}  # fmt: skip


#: What Apache Kafka demands CLUSTER_ACTION for, or serves between controllers only.
KAFKA_NODE_ONLY = {4, 5, 6, 7, 27, 52, 53, 54, 56, 58, 59, 62, 63, 67, 70, 73, 82, 83, 84, 85, 86, 87}


def test_what_apache_kafka_keeps_to_its_nodes_is_kept_to_ours() -> None:
    assert KAFKA_NODE_ONLY & APIS.keys() <= NODE_ONLY.keys()
    assert {
        key: api.inter_broker_from for key, api in APIS.items() if api.inter_broker_from <= api.max_version
    } == {key: 4 if key == 24 else 0 for key in NODE_ONLY}


async def test_a_client_is_refused_whatever_the_request_says(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        before = _state(node)
        for key, first in NODE_ONLY.items():
            for version in range(first, APIS[key].max_version + 1):
                codes = await _codes_of_answer(
                    node, Requests(version)._entity(load_request_schema(key, version))
                )
                assert codes <= {ErrorCode.cluster_authorization_failed}, (APIS[key].name, version)
        assert _state(node) == before
        versions = {APIS[key].name: APIS[key].max_version - first + 1 for key, first in NODE_ONLY.items()}
        assert node.metrics.node_requests_refused == versions


def _state(node: Node) -> Any:
    return node.quorum.epoch, node.image.brokers, node.metadata.committed_offset


async def _codes_of_answer(node: Node, request: Any) -> set[ErrorCode]:
    """Every error in the answer; none where the connection was closed."""
    client = await WireClient.connect(node)
    try:
        return set(_error_codes(await client.ask(request)))
    except asyncio.IncompleteReadError:
        return set()
    finally:
        await client.close()


def _error_codes(entity: Any) -> Iterator[ErrorCode]:
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.metadata.get("kafka_type") == "error_code":
            yield value
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from _error_codes(item)


#: Requests that brokers send each other. All others in NODE_ONLY go to controllers.
BETWEEN_BROKERS = {24, 27, 83, 84, 85, 86, 87}


async def test_requests_to_the_controller_are_served_at_its_own_listener_only(tmp_path: Path) -> None:
    three = {"listeners": BOTH["listeners"] + ",CONTROLLER://127.0.0.1:0"}
    async with running(tmp_path, **three, **{"controller.listener.names": "CONTROLLER"}) as node:
        request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
        for_clients, for_brokers, for_controllers = [
            {api.api_key for api in (await _ask(node, at, request)).api_keys} for at in range(3)
        ]
        assert for_brokers - for_clients == BETWEEN_BROKERS - {24}
        assert for_controllers - for_clients == NODE_ONLY.keys() - {24}
        before = _state(node)
        nodes = await WireClient.connect(node, 1)
        for key in sorted(NODE_ONLY.keys() - BETWEEN_BROKERS):
            version = APIS[key].max_version
            answer = await nodes.ask(Requests(version)._entity(load_request_schema(key, version)))
            assert set(_error_codes(answer)) <= {ErrorCode.cluster_authorization_failed}, APIS[key].name
        body = _with_replica_states(_metadata_fetch(node, 18), str(node.store.cluster_id), (7,))
        answer = await nodes.ask_raw(FETCH, 18, body)
        assert answer.error_code is ErrorCode.cluster_authorization_failed
        assert _state(node) == before
        await nodes.close()


@pytest.mark.parametrize("version", [4, 6, 7, 14, 15, 18])
async def test_a_client_cannot_pose_as_a_follower(tmp_path: Path, version: int) -> None:
    async with running(tmp_path, **BOTH) as node:
        request = Requests(version)._entity(load_request_schema(FETCH, version))
        if version < 15:
            request = replace(request, replica_id=0)
        else:
            request = replace(request, replica_state=ReplicaState(replica_id=0))  # type: ignore[arg-type]
        refused = {ErrorCode.cluster_authorization_failed}
        assert await _codes_of_answer(node, request) == (refused if version >= 7 else set())
        assert node.metrics.node_requests_refused == {"fetch by a replica": 1}
        nodes = await WireClient.connect(node, 1)
        assert refused.isdisjoint(_error_codes(await nodes.ask(request)))
        await nodes.close()


@pytest.mark.parametrize("version", [12, 13, 14, 15, 18])
async def test_no_fetch_of_a_client_follows_the_metadata_log(tmp_path: Path, version: int) -> None:
    """Whichever of two replica ids counts: a tag that the version does not know, or one that comes twice."""
    async with running(tmp_path) as node:
        request = _metadata_fetch(node, version)
        answers = []
        for replicas in ((-1,), (9, -1), (-1, 9)):
            client = await WireClient.connect(node)
            body = _with_replica_states(request, str(node.store.cluster_id), replicas)
            answers += _error_codes(await client.ask_raw(FETCH, version, body))
            await client.close()
        known_by_id = version > 12
        unknown = ErrorCode.unknown_topic_id if known_by_id else ErrorCode.unknown_topic_or_partition
        assert set(answers) <= {ErrorCode.none, unknown, ErrorCode.cluster_authorization_failed}
        assert node.quorum.describe().observers == ()


def _metadata_fetch(node: Node, version: int) -> Any:
    """The beginning of the metadata log, as a follower asks for it."""
    schema = load_request_schema(FETCH, version)
    names = {field.name: field.type for field in fields(schema)}
    topic = names["topics"].__args__[0]
    partition = {field.name: field.type for field in fields(topic)}["partitions"].__args__[0]
    asked = partition(
        partition=0,
        current_leader_epoch=node.quorum.epoch,
        fetch_offset=0,
        last_fetched_epoch=0,
        log_start_offset=-1,
        partition_max_bytes=1 << 20,
    )
    named = {"topic": CLUSTER_METADATA} if version == 12 else {"topic_id": METADATA_TOPIC_ID}
    return schema(
        **({"replica_id": 9} if version < 15 else {}),
        max_wait=timedelta(0),
        min_bytes=0,
        topics=(topic(**named, partitions=(asked,)),),
        forgotten_topics_data=(),
    )


def _with_replica_states(request: Any, cluster_id: str, replicas: tuple[int, ...]) -> bytes:
    """The body of a Fetch, and behind it the cluster id and replica states as its tagged fields."""
    body = io.BytesIO()
    entity_writer(type(request))(body, request)
    assert body.getvalue().endswith(b"\0"), "a request without tagged fields"
    name = cluster_id.encode()
    tags = bytes([1 + len(replicas), 0, len(name) + 1, len(name) + 1]) + name
    for replica in replicas:
        tags += b"\x01\x0d" + struct.pack(">iq", replica, -1) + b"\0"
    return body.getvalue()[:-1] + tags


async def test_only_nodes_are_offered_what_nodes_send(tmp_path: Path) -> None:
    async with running(tmp_path, **BOTH) as node:
        request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
        for_clients, is_inter_broker = [
            {api.api_key: api.max_version for api in (await _ask(node, at, request)).api_keys}
            for at in (0, 1)
        ]
        client_metrics = {71, 72}  # offered only where a subscription is defined
        assert is_inter_broker.keys() == APIS.keys() - client_metrics
        assert is_inter_broker.keys() - for_clients.keys() == NODE_ONLY.keys() - {24}
        assert (for_clients[24], is_inter_broker[24]) == (3, APIS[24].max_version)


async def test_metadata_names_the_listener_that_was_asked(tmp_path: Path) -> None:
    async with running(tmp_path, **BOTH) as node:
        request = MetadataRequest(
            topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False
        )
        for at in (0, 1):
            (broker,) = (await _ask(node, at, request)).brokers
            assert broker.port == node.listeners[at].port


async def _ask(node: Node, listener: int, request: Any) -> Any:
    client = await WireClient.connect(node, listener)
    try:
        return await client.ask(request)
    finally:
        await client.close()


async def test_a_cluster_that_shared_its_listeners_gets_separate_ones(tmp_path: Path) -> None:
    """Its voters are recorded with the clients' addresses; controller.quorum.voters says where they are now."""
    trio = Trio(tmp_path)
    trio.shares_listeners = True
    try:
        await trio.start()
        await trio.create_topic("t")
        assert all(at.name == "PLAINTEXT" for voter in trio.any.quorum.voters for at in voter.addresses)
        await trio.separate_listeners()
        await until(lambda: trio.leader("t") is not None)
        await until(lambda: len(trio.any.image.partition("t", 0).isr) == 3)
        await until(
            lambda: all(at.name == "NODES" for voter in trio.any.quorum.voters for at in voter.addresses)
        )
    finally:
        await trio.stop()


async def test_a_node_of_a_cluster_does_not_start_without_a_listener_for_nodes(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    try:
        await trio.start()
    finally:
        await trio.stop()
    alone = load_settings({"node.id": "1", "listeners": "127.0.0.1:0", "log.dirs": str(tmp_path / "1")}, {})
    with pytest.raises(StartFailed, match="has no listener for the other nodes") as refused:
        await Node(alone).start()
    assert "--listen NODES://" in str(refused.value.hint)
