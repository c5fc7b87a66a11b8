"""What a connection remembers of logins, rules and quotas holds for no request after it has changed."""

import asyncio
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import pytest
from kio.schema.metadata.v13.request import MetadataRequest
from kio.schema.produce.v12 import request as by_name
from kio.schema.produce.v13 import request as by_id
from tests.access import matrix
from tests.access.matrix import READ_TOPIC, TOPIC, WRITE_TOPIC, Need, rule
from tests.access.ours import SETTINGS
from tests.unit.broker.network.test_sasl import SASL, authenticate, handshake, sasl_node
from tests.unit.broker.raw_client import Client, batch_of, create_topic, fetch_v7, fetched, running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.network.connection import Connection
from penstock.broker.network.tenants import TenantOnNode
from penstock.broker.node import Node
from penstock.cluster.tenants import Tenant
from penstock.protocol.errors import ErrorCode
from penstock.security.principal import Principal
from penstock.security.quotas import CLIENT_ID, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, USER, Entity
from penstock.security.tenant_limits import REQUEST_RATE, TenantRates

CLIENT = Principal.parse(matrix.CLIENT)  # of its rules
ALLOWED, REFUSED = ErrorCode.none, ErrorCode.topic_authorization_failed
_ASK: Any = MetadataRequest(
    topics=(), allow_auto_topic_creation=False, include_topic_authorized_operations=False
)


async def connect(node: Node, principal: Principal = CLIENT) -> tuple[WireClient, Connection]:
    known = set(node.server.connections)
    wire = await WireClient.connect(node)
    await wire.ask(_ASK)
    (connection,) = node.server.connections.keys() - known
    connection.principal = principal
    return wire, connection


def allow(node: Node, *needs: Need) -> None:
    assert node.authorizer is not None
    node.authorizer.update({uuid4(): rule(need) for need in needs})


async def produce(node: Node, wire: WireClient, *, is_by_id: bool = False, topic: str = TOPIC) -> ErrorCode:
    schema: Any = by_id if is_by_id else by_name
    named = {"topic_id": node.image.topics[topic].id} if is_by_id else {"name": topic}
    partition = schema.PartitionProduceData(index=0, records=batch_of(b"value"))
    data = schema.TopicProduceData(partition_data=(partition,), **named)
    request = schema.ProduceRequest(
        transactional_id=None, acks=-1, timeout=timedelta(seconds=30), topic_data=(data,)
    )
    answer = await wire.ask(request)
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


@pytest.mark.parametrize("is_by_id", [False, True])
async def test_a_producer_is_refused_as_soon_as_its_rule_is_gone(tmp_path: Path, is_by_id: bool) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        for name in (TOPIC, "other"):
            await create_topic(node, name)
        wire, _ = await connect(node)
        for _ in range(2):
            allow(node, WRITE_TOPIC)
            assert [await produce(node, wire, is_by_id=is_by_id) for _ in range(3)] == [ALLOWED] * 3
            assert await produce(node, wire, is_by_id=is_by_id, topic="other") is REFUSED
            allow(node, READ_TOPIC)
            assert [await produce(node, wire, is_by_id=is_by_id) for _ in range(2)] == [REFUSED] * 2
        assert node.partitions.get(TOPIC, 0).log.end_offset == 6
        await wire.close()


async def test_what_one_user_may_do_says_nothing_about_another(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        await create_topic(node, TOPIC)
        allow(node, WRITE_TOPIC)
        mine, connection = await connect(node)
        same, _ = await connect(node, Principal(*CLIENT))
        other, _ = await connect(node, Principal("User", "mallory"))
        for _ in range(3):
            assert [await produce(node, each) for each in (mine, same, other)] == [ALLOWED, ALLOWED, REFUSED]
        connection.authenticated(Principal("User", "mallory"))
        assert await produce(node, mine) is REFUSED
        for wire in (mine, same, other):
            await wire.close()


async def test_a_fetch_session_is_refused_as_soon_as_its_rule_is_gone(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        await create_topic(node, TOPIC)
        allow(node, READ_TOPIC, WRITE_TOPIC)
        wire, _ = await connect(node)
        assert await produce(node, wire) is ALLOWED
        client = await Client.connect(node)
        await client.ask(fetch_v7(session=(0, -1)))
        reader = next(each for each in reversed(node.server.connections) if each.principal != CLIENT)
        reader.principal = CLIENT

        async def fetch(session: tuple[int, int]) -> Any:
            return fetched(await client.ask(fetch_v7([(TOPIC, 0, 0)], session=session)))

        first = await fetch((0, 0))
        assert first.one().records
        assert (await fetch((first.session_id, 1))).one().records
        allow(node, WRITE_TOPIC)
        refused = (await fetch((first.session_id, 2))).one()
        assert refused.error_code is REFUSED
        assert not refused.records
        await wire.close()


async def logged_in(node: Node) -> tuple[WireClient, Connection]:
    client = await WireClient.connect(node, SASL)
    await handshake()(client)
    await authenticate()(client)
    (connection,) = (each for each in node.server.connections if each.authentication is not None)
    return client, connection


async def test_a_session_that_has_expired_is_over_at_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sasl_node(tmp_path, **{"connections.max.reauth.ms": "3600000"}) as node:
        client, connection = await logged_in(node)
        assert 3000 < connection.session_end - perf_counter() <= 3600
        await client.ask(_ASK)
        now_ms = node.environment.now_ms() + 3_600_000
        monkeypatch.setattr(type(node.environment), "now_ms", lambda _: now_ms)
        monkeypatch.setattr("penstock.broker.network.dispatch.perf_counter", lambda: perf_counter() + 3600)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.ask(_ASK)
        assert [kind for _, kind in node.metrics.authentication_failures] == ["session_expired"]


async def test_nothing_is_served_in_the_middle_of_a_new_login(tmp_path: Path) -> None:
    async with sasl_node(tmp_path) as node:
        client, connection = await logged_in(node)
        await client.ask(_ASK)
        assert (await handshake()(client)).error_code is ErrorCode.none
        assert (await authenticate()(client)).error_code is ErrorCode.none
        await client.ask(_ASK)
        assert connection.session_end > perf_counter(), "a new login is remembered like the first one"
        now_ms = node.services.now_ms() + 2_000
        node.services.now_ms = lambda: now_ms  # one login in a second
        assert (await handshake()(client)).error_code is ErrorCode.none
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.ask(_ASK)
        assert [kind for _, kind in node.metrics.authentication_failures] == ["no_authentication"]


ANYBODY: Entity = ((CLIENT_ID, None),)
ANONYMOUS: Entity = ((USER, "ANONYMOUS"),)


@pytest.mark.parametrize("kind", [PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE])
@pytest.mark.parametrize("others", [{}, {((CLIENT_ID, "x"),): 1e12}], ids=["no other quota", "other quotas"])
async def test_a_quota_holds_for_the_next_request_of_a_connection(
    tmp_path: Path, kind: str, others: dict[Entity, float]
) -> None:
    """Also if the connection had none, or a higher one, or one that it shared with others."""
    async with running(tmp_path) as node:
        await create_topic(node, TOPIC)
        wire, connection = await connect(node, Principal("User", "ANONYMOUS"))

        async def throttled_ms(limits: dict[Entity, float]) -> int:
            node.quotas.configure({entity: {kind: limit} for entity, limit in (others | limits).items()})
            waits_ms = []
            for _ in range(3):
                assert await produce(node, wire) is ALLOWED
                waits_ms.append(connection.throttle_ms)
                connection._throttle_over()
            return min(waits_ms)

        for high in ({}, {ANYBODY: 1e12}, {ANONYMOUS: 1e12}):
            assert await throttled_ms(high) == 0
            assert await throttled_ms({ANYBODY: 1e12, ANONYMOUS: 1e-9}) > 0
            assert await throttled_ms({ANYBODY: 1e-9}) > 0
        assert await throttled_ms({}) == 0
        await wire.close()


@pytest.mark.parametrize("kind", [PRODUCER_BYTE_RATE, REQUEST_RATE])
async def test_the_limit_of_a_tenant_holds_for_a_connection_that_was_no_tenants(
    tmp_path: Path, kind: str
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, TOPIC)
        wire, connection = await connect(node, Principal("User", "ANONYMOUS"))
        node.quotas.configure({ANYBODY: {PRODUCER_BYTE_RATE: 1e12, REQUEST_PERCENTAGE: 1e12}})
        for _ in range(3):
            assert await produce(node, wire) is ALLOWED
        assert connection.throttle_ms == 0
        rates = TenantRates(11, 1000)
        rates.limit({kind: 1e-9})
        connection.joins(TenantOnNode(Tenant(name="t", users=(), prefix="t-", limits={}), rates))
        assert await produce(node, wire) is ALLOWED
        assert connection.throttle_ms > 0
        connection._throttle_over()
        await wire.close()
