"""Client quotas over the wire: set, described, and enforced by throttling; Kafka's answers to what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kio.schema.alter_client_quotas.v1 import request as alter
from kio.schema.create_partitions.v3 import request as more
from kio.schema.create_topics.v7 import request as create
from kio.schema.delete_topics.v6 import request as delete
from kio.schema.describe_client_quotas.v1 import request as describe
from kio.schema.fetch.v12 import request as fetch_request
from kio.schema.metadata.v12 import request as metadata
from kio.schema.produce.v11 import request as produce_request
from kio.static.primitive import i8, i16, i32, i64
from tests.unit.broker.raw_client import create_topic, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.cluster.controller.decision import Decision
from penstock.cluster.rare_records import ClientQuotaRecord, QuotaEntity
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from penstock.security.quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)

Entity = Mapping[str, str | None]
USER, CLIENT = "user", "client-id"
RATE = "connection_creation_rate"


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


@pytest_asyncio.fixture
async def client(node: Node) -> AsyncIterator[WireClient]:
    client = await WireClient.connect(node)
    yield client
    await client.close()


async def produce(client: WireClient, size: int) -> int:
    """Return the throttle time in milliseconds."""
    records = encode_batch([Record(0, 1_700_000_000_000, None, bytes(size))])
    partition = produce_request.PartitionProduceData(index=i32(0), records=records)
    topic = produce_request.TopicProduceData(name="t", partition_data=(partition,))
    request = produce_request.ProduceRequest(
        transactional_id=None, acks=i16(-1), timeout=timedelta(seconds=30), topic_data=(topic,)
    )
    answer = await client.ask(request)
    assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none
    return round(answer.throttle_time.total_seconds() * 1000)


async def fetch(client: WireClient) -> tuple[int, float]:
    """Return the bytes of records and the throttle time in milliseconds."""
    partition = fetch_request.FetchPartition(
        partition=i32(0), fetch_offset=i64(0), log_start_offset=i64(-1), partition_max_bytes=i32(1 << 20)
    )
    topic = fetch_request.FetchTopic(topic="t", partitions=(partition,))
    request = fetch_request.FetchRequest(
        max_wait=timedelta(0), min_bytes=i32(1), topics=(topic,), forgotten_topics_data=(), rack_id=""
    )
    answer = await client.ask(request)
    records = answer.responses[0].partitions[0].records
    return len(records or b""), answer.throttle_time.total_seconds() * 1000


async def set_quotas(
    client: WireClient, entity: Entity, limits: Mapping[str, float | None], *, validate_only: bool = False
) -> tuple[ErrorCode, str | None]:
    entry = alter.EntryData(
        entity=tuple(alter.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.items()),
        ops=tuple(
            alter.OpData(key=key, value=value or 0.0, remove=value is None) for key, value in limits.items()
        ),
    )
    answer = await client.ask(alter.AlterClientQuotasRequest(entries=(entry,), validate_only=validate_only))
    return answer.entries[0].error_code, answer.entries[0].error_message


async def described(
    client: WireClient, *components: tuple[str, int, str | None], strict: bool = False
) -> dict[tuple[tuple[str, str | None], ...], dict[str, float]]:
    request = describe.DescribeClientQuotasRequest(
        components=tuple(
            describe.ComponentData(entity_type=kind, match_type=i8(match_type), match=name)
            for kind, match_type, name in components
        ),
        strict=strict,
    )
    answer = await client.ask(request)
    assert answer.error_code is ErrorCode.none, answer.error_message
    return {
        tuple(sorted((part.entity_type, part.entity_name) for part in entry.entity)): {
            value.key: value.value for value in entry.values
        }
        for entry in answer.entries
    }


async def test_what_is_set_is_described_and_removed(client: WireClient) -> None:
    ann, default, both = ((USER, "ann"),), ((USER, None),), ((CLIENT, "app"), (USER, "ann"))
    for entity in (ann, default, both):
        assert await set_quotas(client, dict(entity), {PRODUCER_BYTE_RATE: 1000.0}) == (ErrorCode.none, None)
    await set_quotas(client, dict(ann), {REQUEST_PERCENTAGE: 12.5, PRODUCER_BYTE_RATE: None})
    assert await described(client) == {
        ann: {REQUEST_PERCENTAGE: 12.5},
        default: {PRODUCER_BYTE_RATE: 1000.0},
        both: {PRODUCER_BYTE_RATE: 1000.0},
    }
    assert set(await described(client, (USER, 0, "ann"))) == {ann, both}
    assert set(await described(client, (USER, 0, "ann"), strict=True)) == {ann}
    assert set(await described(client, (USER, 1, None))) == {default}
    assert set(await described(client, (USER, 2, None))) == {ann, default, both}
    assert set(await described(client, (USER, 2, None), (CLIENT, 2, None))) == {both}
    await set_quotas(client, {USER: "bob"}, {PRODUCER_BYTE_RATE: 5.0}, validate_only=True)
    assert len(await described(client)) == 3


@pytest.mark.parametrize(
    ("components", "code", "message"),
    [
        ([("group", 0, "g")], ErrorCode.unsupported_version, "Custom entity type 'group' not supported"),
        ([("", 0, "g")], ErrorCode.invalid_request, "Custom entity type '' not supported"),
        ([(USER, 9, None)], ErrorCode.invalid_request, "Unknown match type 9"),
        ([(USER, 0, None)], ErrorCode.invalid_request, "needs a name"),
        ([(USER, 1, "a")], ErrorCode.invalid_request, "takes no name"),
        ([(USER, 0, "a"), (USER, 1, None)], ErrorCode.invalid_request, "cannot appear more than once"),
        ([(USER, 0, "a"), ("ip", 1, None)], ErrorCode.invalid_request, "component combination"),
    ],
)
async def test_impossible_filters_are_refused(
    client: WireClient, components: list[tuple[str, int, str | None]], code: ErrorCode, message: str
) -> None:
    request = describe.DescribeClientQuotasRequest(
        components=tuple(
            describe.ComponentData(entity_type=kind, match_type=i8(match_type), match=name)
            for kind, match_type, name in components
        ),
        strict=False,
    )
    answer = await client.ask(request)
    assert (answer.error_code, answer.entries) == (code, None)
    assert message in answer.error_message


async def test_quotas_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        await set_quotas(client, {CLIENT: None}, {CONSUMER_BYTE_RATE: 77.0})
        await client.close()
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        assert await described(client) == {((CLIENT, None),): {CONSUMER_BYTE_RATE: 77.0}}
        assert node.quotas.limits_fetch
        await client.close()


async def test_an_address_is_one_entity_however_it_is_spelled(node: Node, client: WireClient) -> None:
    spelled, canonical = "2001:DB8:0::1", (("ip", "2001:db8::1"),)
    assert await set_quotas(client, {"ip": spelled}, {RATE: 5.0}) == (ErrorCode.none, None)
    for filters in ([], [("ip", 0, spelled)], [("ip", 0, "2001:db8::1")]):
        assert await described(client, *filters) == {canonical: {RATE: 5.0}}
    assert node.quotas.connection_rate("2001:db8::1") == 5.0
    await set_quotas(client, {"ip": "2001:db8:0:0::1"}, {RATE: None})
    assert await described(client) == {}


async def test_two_spellings_of_an_address_are_one_entity_named_twice(client: WireClient) -> None:
    entries = tuple(
        alter.EntryData(
            entity=(alter.EntityData(entity_type="ip", entity_name=name),),
            ops=(alter.OpData(key=RATE, value=1.0, remove=False),),
        )
        for name in ("::1", "0::1")
    )
    answer = await client.ask(alter.AlterClientQuotasRequest(entries=entries, validate_only=False))
    assert {entry.error_code for entry in answer.entries} == {ErrorCode.invalid_request}


async def test_addresses_that_an_older_version_stored_as_spelled(node: Node, client: WireClient) -> None:
    old = [
        ClientQuotaRecord(
            entity=(QuotaEntity(entity_type="ip", entity_name=name),), key=RATE, value=rate, remove=False
        )
        for name, rate in (("2001:DB8::1", 1.0), ("2001:DB8:0::1", 2.0), ("2001:DB8::2", 3.0))
    ]
    await node.controller.propose(lambda image: Decision(tuple(old), None))
    assert node.quotas.connection_rate("2001:db8::2") == 3.0
    assert await described(client, ("ip", 0, "2001:db8::2")) == {(("ip", "2001:DB8::2"),): {RATE: 3.0}}
    await set_quotas(client, {"ip": "2001:db8::1"}, {RATE: 4.0})
    await set_quotas(client, {"ip": "2001:db8::2"}, {RATE: None})
    assert await described(client) == {(("ip", "2001:db8::1"),): {RATE: 4.0}}


@pytest.mark.parametrize(
    ("entity", "limits", "message"),
    [
        ({}, {PRODUCER_BYTE_RATE: 1.0}, "Invalid empty client quota entity"),
        ({"group": "g"}, {PRODUCER_BYTE_RATE: 1.0}, "Unhandled client quota entity type: group"),
        ({USER: ""}, {PRODUCER_BYTE_RATE: 1.0}, "Empty user not supported"),
        ({USER: "a", "ip": "::1"}, {PRODUCER_BYTE_RATE: 1.0}, "Invalid quota entity combination"),
        ({"ip": "no address"}, {"connection_creation_rate": 1.0}, "no address is not an IP address."),
        ({"ip": "::1"}, {PRODUCER_BYTE_RATE: 1.0}, "Invalid configuration key producer_byte_rate"),
        (
            {USER: "a"},
            {"connection_creation_rate": 1.0},
            "Invalid configuration key connection_creation_rate",
        ),
        ({USER: "a"}, {PRODUCER_BYTE_RATE: 0.0001}, "producer_byte_rate cannot be a fractional value."),
        ({USER: "a"}, {PRODUCER_BYTE_RATE: -1.0}, "Quota producer_byte_rate must be greater than 0"),
        ({USER: "a"}, {PRODUCER_BYTE_RATE: 2.0**64}, "too large for a LONG"),
        ({USER: "a"}, {REQUEST_PERCENTAGE: float("nan")}, "Quota request_percentage must be greater than 0"),
        ({USER: "a"}, {REQUEST_PERCENTAGE: float("inf")}, "Quota request_percentage must be finite"),
    ],
)
async def test_impossible_quotas_are_refused(
    client: WireClient, entity: Entity, limits: Mapping[str, float], message: str
) -> None:
    code, told = await set_quotas(client, entity, limits)
    assert code is ErrorCode.invalid_request
    assert message in str(told)
    assert await described(client) == {}


async def test_a_producer_above_its_rate_is_told_to_wait_and_not_read_meanwhile(
    node: Node, client: WireClient
) -> None:
    await create_topic(node, "t", 1)
    operator = await WireClient.connect(node)
    assert await produce(client, 49_000) == 0
    await set_quotas(operator, {CLIENT: None}, {PRODUCER_BYTE_RATE: 10_000.0})
    for _ in range(2):
        assert await produce(client, 49_000) == 0, "a burst of ten seconds' worth is allowed"
    throttle_ms = await produce(client, 490_000)
    assert 45_000 < throttle_ms < 50_000
    (connection,) = (each for each in node.server.connections if each.throttle_ms)
    assert connection.throttle_ms > 1_000
    waiting = asyncio.ensure_future(client.ask(metadata.MetadataRequest(topics=(), **_METADATA)))
    await operator.ask(metadata.MetadataRequest(topics=(), **_METADATA))
    assert not waiting.done(), "another connection is served, this one is not read"
    connection._throttle_over()
    await waiting
    await operator.close()


async def test_a_client_that_leaves_while_it_must_wait_is_noticed(node: Node) -> None:
    """The connection is not read meanwhile, so that its end goes unnoticed otherwise, for up to an hour."""
    await create_topic(node, "t", 1)
    operator = await WireClient.connect(node)
    await set_quotas(operator, {CLIENT: None}, {PRODUCER_BYTE_RATE: 1.0})
    client = await WireClient.connect(node)
    assert await produce(client, 1000) > 0
    await client.close()
    for _ in range(2):
        client = await WireClient.connect(node)
        waiting = asyncio.ensure_future(produce(client, 1000))
        await until(lambda: sum(each.throttle_ms > 0 for each in node.server.connections) == 1)
        assert not waiting.done(), "its user owes something, so a new connection waits first"
        waiting.cancel()
        await client.close()
        await until(lambda: len(node.server.connections) == 1)
    await until(lambda: len(node.server.connections) == 1)
    await operator.close()


async def test_a_consumer_above_its_rate_is_told_to_wait(node: Node, client: WireClient) -> None:
    await create_topic(node, "t", 1)
    for _ in range(8):
        await produce(client, 50_000)
    operator = await WireClient.connect(node)
    await set_quotas(operator, {USER: "ANONYMOUS"}, {CONSUMER_BYTE_RATE: 10_000.0})
    size, throttle_ms = await fetch(client)
    assert size <= 11 * 10_000 + 51_000, "a response holds no more than all windows allow"
    assert throttle_ms == pytest.approx((size - 100_000) / 10, abs=300)
    await operator.close()


async def test_clients_on_a_listener_that_nodes_share_are_limited_too(tmp_path: Path) -> None:
    async with running(tmp_path, inter_broker_listener_name="PLAINTEXT") as node:
        await create_topic(node, "t", 1)
        client = await WireClient.connect(node)
        await set_quotas(client, {CLIENT: None}, {PRODUCER_BYTE_RATE: 10_000.0, REQUEST_PERCENTAGE: 1e-9})
        assert await produce(client, 490_000) > 30_000
        assert REQUEST_PERCENTAGE not in node.quotas.throttled_ms
        await client.close()


async def test_time_of_requests_is_limited(node: Node, client: WireClient) -> None:
    await set_quotas(client, {USER: None}, {REQUEST_PERCENTAGE: 1e-9})
    # The request that set the quota is measured when it ends, which may be after the quota has come into force.
    before_ms = node.quotas.throttled_ms.get(REQUEST_PERCENTAGE, 0)
    answer = await client.ask(metadata.MetadataRequest(topics=None, **_METADATA))
    assert node.quotas.throttled_ms[REQUEST_PERCENTAGE] == before_ms + 1000
    assert answer is not None


async def test_partitions_above_the_mutation_rate_are_refused(node: Node, client: WireClient) -> None:
    await set_quotas(client, {USER: None}, {CONTROLLER_MUTATION_RATE: 1.0})

    async def make(*names: str, version: int | None = None) -> tuple[list[ErrorCode], float]:
        topics = tuple(
            create.CreatableTopic(
                name=name, num_partitions=i32(11), replication_factor=i16(1), assignments=(), configs=()
            )
            for name in names
        )
        answer = await client.ask(create.CreateTopicsRequest(topics=topics), version=version)
        for connection in node.server.connections:
            connection._throttle_over()
        return [topic.error_code for topic in answer.topics], answer.throttle_time.total_seconds()

    codes, _ = await make("a", "b", "c")
    assert codes == [ErrorCode.none, ErrorCode.none, ErrorCode.throttling_quota_exceeded]
    codes, seconds = await make("c")
    assert codes == [ErrorCode.throttling_quota_exceeded]
    assert 9 < seconds <= 11
    codes, seconds = await make("d", version=5)
    assert codes == [ErrorCode.none], "a client that does not know the error is served, and waits"
    assert 20 < seconds <= 22
    grown = more.CreatePartitionsTopic(name="a", count=i32(12), assignments=None)
    answer = await client.ask(
        more.CreatePartitionsRequest(topics=(grown,), timeout=timedelta(seconds=30), validate_only=False)
    )
    assert answer.results[0].error_code is ErrorCode.throttling_quota_exceeded
    for connection in node.server.connections:
        connection._throttle_over()
    gone = delete.DeleteTopicState(name="a", topic_id=None)
    answer = await client.ask(delete.DeleteTopicsRequest(topics=(gone,), timeout=timedelta(seconds=30)))
    assert [topic.error_code for topic in answer.responses] == [ErrorCode.throttling_quota_exceeded]
    assert set(node.metadata.image.topics) >= {"a", "b", "d"}


async def test_topics_that_clients_make_by_asking_for_them_count_too(node: Node, client: WireClient) -> None:
    await set_quotas(client, {USER: None}, {CONTROLLER_MUTATION_RATE: 0.001})
    names = {f"made-{number}" for number in range(5)}

    async def ask_for_all() -> None:
        topics = tuple(metadata.MetadataRequestTopic(topic_id=None, name=name) for name in names)
        await client.ask(
            metadata.MetadataRequest(topics=topics, **_METADATA | {"allow_auto_topic_creation": True})
        )

    await ask_for_all()
    await until(lambda: len(node.image.topics) == 1)
    await ask_for_all()
    await create_topic(node, "later", 1)
    assert len(node.image.topics) == 2, "the client owes partitions for a quarter of an hour"
    await set_quotas(client, {USER: None}, {CONTROLLER_MUTATION_RATE: None})
    await ask_for_all()
    await until(lambda: set(node.image.topics) == {*names, "later"})


# What Kafka counts: its controller has this quota for CreateTopics, CreatePartitions and DeleteTopics alone.
async def test_other_changes_of_metadata_do_not_count(node: Node, client: WireClient) -> None:
    await set_quotas(client, {USER: None}, {CONTROLLER_MUTATION_RATE: 0.001})
    for number in range(20):
        await set_quotas(client, {USER: f"user-{number}"}, {PRODUCER_BYTE_RATE: 1e6})
    assert CONTROLLER_MUTATION_RATE not in node.quotas.throttled_ms


_METADATA: dict[str, Any] = {
    "allow_auto_topic_creation": False,
    "include_topic_authorized_operations": False,
}
