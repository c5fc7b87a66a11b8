"""Admin requests on a running node: topics, settings, producers, described and changed."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.alter_configs.v2 import request as alter
from kio.schema.create_partitions.v3 import request as partitions
from kio.schema.create_topics.v7 import request as create
from kio.schema.delete_records.v2 import request as records
from kio.schema.delete_topics.v6 import request as delete
from kio.schema.describe_cluster.v2 import request as cluster
from kio.schema.describe_configs.v4 import request as configs
from kio.schema.describe_log_dirs.v4 import request as log_dirs
from kio.schema.describe_producers.v0 import request as producers
from kio.schema.describe_topic_partitions.v0 import request as topic_partitions
from kio.schema.incremental_alter_configs.v1 import request as incremental
from kio.schema.init_producer_id.v5 import request as init
from kio.schema.metadata.v13 import request as metadata
from tests.unit.broker.raw_client import new_node, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

SECONDS_30 = timedelta(seconds=30)
TOPIC_OPERATIONS = 0b110111111000
NOT_ASKED = -(2**31)


class Running:
    """A node and a client of it."""

    def __init__(self, node: Node, client: WireClient) -> None:
        self.node = node
        self.ask = client.ask

    async def create(self, name: str, count: int = 1, /, **settings: str) -> uuid.UUID:
        named = {key.replace("_", "."): value for key, value in settings.items()}
        response = await self.ask(new_topics(new_topic(name, count, **named)))
        assert response.topics[0].error_code is ErrorCode.none, response
        found: uuid.UUID = response.topics[0].topic_id
        return found

    async def publish(self, topic: str, count: int = 1, *, producer_id: int = -1) -> None:
        partition = self.node.partitions.find(topic, 0)
        batch = encode_batch(
            [Record(offset, self.node.environment.now_ms(), None, b"x" * 100) for offset in range(count)],
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=0 if producer_id >= 0 else -1,
        )
        appended = partition.append(memoryview(batch), self.node.environment.now_ms())
        await partition.committed(appended.last_offset)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts nodes with settings of one's own; the data folder stays the same."""
    running: list[tuple[Node, WireClient]] = []

    async def stop() -> None:
        while running:
            node, client = running.pop()
            await client.close()
            await node.stop()

    async def start(settings: dict[str, str] | None = None, *, listener: int = 0) -> Running:
        await stop()
        node = new_node(tmp_path, **(settings or {}))
        await node.start()
        client = await WireClient.connect(node, listener)
        running.append((node, client))
        return Running(node, client)

    yield start
    await stop()


@pytest.fixture
async def node(start: Start) -> Running:
    return await start()


def new_topic(name: str, count: int = 1, /, replication_factor: int = 1, **settings: str) -> Any:
    return create.CreatableTopic(
        name=name,
        num_partitions=count,
        replication_factor=replication_factor,
        assignments=(),
        configs=tuple(create.CreatableTopicConfig(name=k, value=v) for k, v in settings.items()),
    )


def new_topics(*topics: Any, validate_only: bool = False) -> Any:
    return create.CreateTopicsRequest(topics=topics, timeout=SECONDS_30, validate_only=validate_only)


def about(*names: str | uuid.UUID, create: bool = False, operations: bool = False) -> Any:
    """A Metadata request for some topics; for all of them use about_all."""
    return metadata.MetadataRequest(
        topics=tuple(
            metadata.MetadataRequestTopic(topic_id=None, name=name)
            if isinstance(name, str)
            else metadata.MetadataRequestTopic(topic_id=name, name=None)
            for name in names
        ),
        allow_auto_topic_creation=create,
        include_topic_authorized_operations=operations,
    )


def about_all() -> Any:
    return metadata.MetadataRequest(
        topics=None, allow_auto_topic_creation=True, include_topic_authorized_operations=False
    )


def old(request: Any) -> Any:
    """The same request with the field that only v8 to v10 have."""
    return SimpleNamespace(
        topics=request.topics,
        allow_auto_topic_creation=request.allow_auto_topic_creation,
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=request.include_topic_authorized_operations,
    )


# --- Metadata ---


@pytest.mark.parametrize("version", range(14))
async def test_metadata_of_a_topic_in_every_version(node: Running, version: int) -> None:
    topic_id = await node.create("orders", 2)
    response = await node.ask(old(about("orders")), api_key=3, version=version)
    address = node.node.listeners[0]
    assert [(b.node_id, b.host, b.port) for b in response.brokers] == [(1, address.host, address.port)]
    (topic,) = response.topics
    assert (topic.error_code, topic.name) == (ErrorCode.none, "orders")
    assert [(p.error_code, p.partition_index, p.leader_id) for p in topic.partitions] == [
        (ErrorCode.none, 0, 1),
        (ErrorCode.none, 1, 1),
    ]
    assert topic.partitions[0].replica_nodes == topic.partitions[0].isr_nodes == (1,)
    if version >= 1:
        assert (response.controller_id, topic.is_internal) == (1, False)
    if version >= 2:
        assert response.cluster_id == node.node.store.cluster_id
    if version >= 7:
        assert topic.partitions[0].leader_epoch == 0
    if version in (8, 9, 10):
        assert response.cluster_authorized_operations == 0b1111110100000
    if version >= 8:
        assert topic.topic_authorized_operations == NOT_ASKED
    if version >= 10:
        assert topic.topic_id == topic_id


async def test_metadata_tells_what_everyone_may_do_when_asked(node: Running) -> None:
    await node.create("orders")
    response = await node.ask(about("orders", operations=True))
    assert response.topics[0].topic_authorized_operations == TOPIC_OPERATIONS


async def test_no_topics_means_all_of_them_or_none(node: Running) -> None:
    await node.create("a")
    await node.create("b")
    assert {t.name for t in (await node.ask(about_all())).topics} == {"a", "b"}
    assert {t.name for t in (await node.ask(about(), version=0)).topics} == {"a", "b"}
    assert (await node.ask(about(), version=1)).topics == ()
    assert (await node.ask(about())).topics == ()


async def test_an_unknown_topic_is_created_when_client_and_node_agree(node: Running, start: Start) -> None:
    unknown = (await node.ask(about("a"))).topics[0]
    assert (unknown.error_code, unknown.partitions) == (ErrorCode.unknown_topic_or_partition, ())
    # As Apache Kafka 4.x: the first answer does not wait for the creation.
    assert (await node.ask(about("a", create=True))).topics == (unknown,)
    await until(lambda: "a" in node.node.image.topics)
    created = (await node.ask(about("a", create=True))).topics[0]
    assert created.error_code is ErrorCode.none
    assert created.partitions[0].leader_id == 1
    assert created.topic_id == node.node.image.topics["a"].id
    node = await start({"auto.create.topics.enable": "false"})
    assert (await node.ask(about("b", create=True))).topics[
        0
    ].error_code is ErrorCode.unknown_topic_or_partition
    await node.create("c")
    assert set(node.node.image.topics) == {"a", "c"}


async def test_a_client_that_cannot_say_creates_topics(node: Running) -> None:
    assert (await node.ask(about("old"), version=3)).topics[
        0
    ].error_code is ErrorCode.unknown_topic_or_partition
    await until(lambda: "old" in node.node.image.topics)


async def test_a_topic_that_many_ask_for_is_created_once(node: Running) -> None:
    for _ in range(3):
        await node.ask(about("a", "b", create=True))
    await until(lambda: {"a", "b"} <= set(node.node.image.topics))
    await node.create("c")
    assert set(node.node.image.topics) == {"a", "b", "c"}


async def test_names_that_cannot_be_topics_are_not_created(node: Running) -> None:
    await node.create("a.b")
    response = await node.ask(about("no way", "a_b", "__consumer_offsets", create=True))
    assert [(t.name, t.error_code, t.is_internal) for t in response.topics] == [
        ("no way", ErrorCode.invalid_topic_exception, False),
        ("a_b", ErrorCode.unknown_topic_or_partition, False),  # collides with a.b, which the controller finds
        ("__consumer_offsets", ErrorCode.unknown_topic_or_partition, True),
    ]
    await node.create("c")
    assert set(node.node.image.topics) == {"a.b", "c"}


async def test_a_topic_asked_for_twice_is_told_once(node: Running) -> None:
    assert len((await node.ask(about("a", "a", create=True))).topics) == 1


async def test_topics_by_id(node: Running) -> None:
    topic_id, nobody = await node.create("a"), uuid.uuid4()
    found, missing = (await node.ask(about(topic_id, nobody))).topics
    assert (found.name, found.error_code) == ("a", ErrorCode.none)
    assert (missing.name, missing.topic_id, missing.error_code) == (None, nobody, ErrorCode.unknown_topic_id)
    (too_early,) = (await node.ask(old(about(topic_id)), api_key=3, version=10)).topics
    assert too_early.error_code is ErrorCode.invalid_request


async def test_each_listener_tells_its_own_address(start: Start) -> None:
    node = await start(
        {
            "listeners": "IN://127.0.0.1:0,OUT://127.0.0.1:0",
            "advertised.listeners": "IN://127.0.0.1:0,OUT://broker.example:19092",
        },
        listener=1,
    )
    (broker,) = (await node.ask(about_all())).brokers
    assert (broker.host, broker.port) == ("broker.example", 19092)
    (broker,) = (await node.ask(describe_cluster())).brokers
    assert (broker.host, broker.port) == ("broker.example", 19092)


# --- DescribeCluster ---


def describe_cluster(endpoint_type: int = 1, *, operations: bool = False) -> Any:
    return cluster.DescribeClusterRequest(
        include_cluster_authorized_operations=operations,
        endpoint_type=endpoint_type,
        include_fenced_brokers=False,
    )


@pytest.mark.parametrize("version", range(3))
async def test_the_cluster_is_described(node: Running, version: int) -> None:
    response = await node.ask(describe_cluster(), version=version)
    assert (response.error_code, response.cluster_id) == (ErrorCode.none, node.node.store.cluster_id)
    assert [broker.broker_id for broker in response.brokers] == [1]
    assert response.controller_id == 1
    assert response.cluster_authorized_operations == NOT_ASKED
    asked = await node.ask(describe_cluster(operations=True), version=version)
    assert asked.cluster_authorized_operations == 0b1111110100000


@pytest.mark.parametrize(
    ("endpoint_type", "code"),
    [(2, ErrorCode.mismatched_endpoint_type), (9, ErrorCode.unsupported_endpoint_type)],
)
async def test_only_brokers_are_described(node: Running, endpoint_type: int, code: ErrorCode) -> None:
    assert (await node.ask(describe_cluster(endpoint_type))).error_code is code


# --- CreateTopics, DeleteTopics, CreatePartitions ---


@pytest.mark.parametrize("version", range(2, 8))
async def test_topics_are_created_in_every_version(node: Running, version: int) -> None:
    request = new_topics(new_topic("a", 3, **{"retention.ms": "5"}), new_topic("b", 1, 2))
    a, b = (await node.ask(request, version=version)).topics
    assert (a.error_code, a.error_message) == (ErrorCode.none, None)
    assert b.error_code is ErrorCode.invalid_replication_factor
    assert "only 1 broker" in b.error_message
    assert len(node.node.image.topics["a"].partitions) == 3
    assert node.node.partitions.get("a", 2) is not None
    if version >= 5:
        assert (a.num_partitions, a.replication_factor) == (3, 1)
        retention = next(config for config in a.configs if config.name == "retention.ms")
        assert (retention.value, retention.config_source) == ("5", ConfigSource.TOPIC)
        assert [config.name for config in a.configs] == sorted(config.name for config in a.configs)
    if version >= 7:
        assert a.topic_id == node.node.image.topics["a"].id


async def test_validating_creates_nothing(node: Running) -> None:
    (result,) = (await node.ask(new_topics(new_topic("a"), validate_only=True))).topics
    assert result.error_code is ErrorCode.none
    assert node.node.image.topics == {}


async def test_the_nodes_defaults_apply_and_can_be_changed_while_it_runs(start: Start) -> None:
    node = await start({"num.partitions": "4"})
    await node.create("a", -1)
    assert len(node.node.image.topics["a"].partitions) == 4
    await node.ask(incrementally(ResourceType.BROKER, "", ("num.partitions", 0, "6")))
    await node.create("b", -1)
    assert len(node.node.image.topics["b"].partitions) == 6


async def test_one_request_creates_only_so_many_partitions(start: Start) -> None:
    node = await start({"penstock.create.topics.partitions.max": "5"})
    (result,) = (await node.ask(new_topics(new_topic("a", 6)))).topics
    assert result.error_code is ErrorCode.policy_violation
    grown = await node.ask(more_partitions(("a", 9)))
    assert grown.results[0].error_code is ErrorCode.unknown_topic_or_partition


@pytest.mark.parametrize("version", range(1, 7))
async def test_topics_are_deleted_in_every_version(node: Running, version: int) -> None:
    await node.create("a")
    await node.create("b")
    request = SimpleNamespace(
        topic_names=("a", "x"),
        topics=tuple(delete.DeleteTopicState(name=name, topic_id=None) for name in ("a", "x")),
        timeout=SECONDS_30,
    )
    response = await node.ask(request, api_key=20, version=version)
    assert [(t.name, t.error_code) for t in response.responses] == [
        ("a", ErrorCode.none),
        ("x", ErrorCode.unknown_topic_or_partition),
    ]
    assert set(node.node.image.topics) == {"b"}
    assert node.node.partitions.get("a", 0) is None


async def test_a_topic_is_deleted_by_id_and_its_name_is_free_again(node: Running) -> None:
    topic_id = await node.create("a", 2)
    await node.publish("a")
    request = delete.DeleteTopicsRequest(
        topics=(delete.DeleteTopicState(name=None, topic_id=topic_id),), timeout=SECONDS_30
    )
    (result,) = (await node.ask(request)).responses
    assert (result.name, result.topic_id, result.error_code) == ("a", topic_id, ErrorCode.none)
    assert await node.create("a") != topic_id
    assert node.node.partitions.find("a", 0).log.end_offset == 0


@pytest.mark.parametrize(
    ("version", "code"), [(2, ErrorCode.invalid_request), (5, ErrorCode.topic_deletion_disabled)]
)
async def test_deletion_can_be_switched_off(start: Start, version: int, code: ErrorCode) -> None:
    node = await start({"delete.topic.enable": "false"})
    await node.create("a")
    request = SimpleNamespace(topic_names=("a",), timeout=SECONDS_30)
    (result,) = (await node.ask(request, api_key=20, version=version)).responses
    assert result.error_code is code
    assert "a" in node.node.image.topics


def more_partitions(*topics: tuple[str, int]) -> Any:
    return partitions.CreatePartitionsRequest(
        topics=tuple(
            partitions.CreatePartitionsTopic(name=name, count=count, assignments=None)
            for name, count in topics
        ),
        timeout=SECONDS_30,
        validate_only=False,
    )


@pytest.mark.parametrize("version", range(4))
async def test_partitions_are_added_in_every_version(node: Running, version: int) -> None:
    await node.create("a")
    response = await node.ask(more_partitions(("a", 3), ("x", 2)), version=version)
    assert [(r.name, r.error_code) for r in response.results] == [
        ("a", ErrorCode.none),
        ("x", ErrorCode.unknown_topic_or_partition),
    ]
    assert node.node.partitions.get("a", 2) is not None


async def test_topics_outlive_the_node(node: Running, start: Start) -> None:
    topic_id = await node.create("a", 2, retention_ms="5")
    await node.publish("a", 3)
    node = await start()
    (topic,) = (await node.ask(about("a"))).topics
    assert topic.topic_id == topic_id
    assert [p.leader_epoch for p in topic.partitions] == [1, 1], "a restart begins a new leader epoch"
    assert node.node.partitions.find("a", 0).log.end_offset == 3
    assert node.node.partitions.find("a", 0).log.config.retention_ms == 5


# --- DescribeConfigs, AlterConfigs, IncrementalAlterConfigs ---


def describe(resource_type: int, name: str, *names: str, synonyms: bool = True, docs: bool = True) -> Any:
    return configs.DescribeConfigsRequest(
        resources=(
            configs.DescribeConfigsResource(
                resource_type=resource_type, resource_name=name, configuration_keys=names or None
            ),
        ),
        include_synonyms=synonyms,
        include_documentation=docs,
    )


def incrementally(resource_type: int, name: str, *changes: tuple[str, int, str | None]) -> Any:
    return incremental.IncrementalAlterConfigsRequest(
        resources=(
            incremental.AlterConfigsResource(
                resource_type=resource_type,
                resource_name=name,
                configs=tuple(
                    incremental.AlterableConfig(name=setting, config_operation=op, value=value)
                    for setting, op, value in changes
                ),
            ),
        ),
        validate_only=False,
    )


@pytest.mark.parametrize("version", range(1, 5))
async def test_a_topics_settings_are_shown_with_their_sources(start: Start, version: int) -> None:
    node = await start({"log.segment.bytes": "2000"})
    await node.create("a", retention_ms="5")
    (result,) = (await node.ask(describe(ResourceType.TOPIC, "a"), version=version)).results
    assert result.error_code is ErrorCode.none
    shown = {config.name: config for config in result.configs}
    assert {"cleanup.policy", "min.insync.replicas", "compression.type", "penstock.flush"} <= set(shown)
    assert [
        (shown[name].value, shown[name].config_source)
        for name in ("retention.ms", "segment.bytes", "flush.ms")
    ] == [
        ("5", ConfigSource.TOPIC),
        ("2000", ConfigSource.STATIC_BROKER),
        ("9223372036854775807", ConfigSource.DEFAULT),
    ]
    assert [(s.name, s.value, s.source) for s in shown["segment.bytes"].synonyms] == [
        ("log.segment.bytes", "2000", ConfigSource.STATIC_BROKER),
        ("log.segment.bytes", "1073741824", ConfigSource.DEFAULT),
    ]
    if version >= 3:
        assert shown["retention.ms"].config_type == 5
        assert "records are kept" in shown["retention.ms"].documentation


async def test_only_what_is_asked_for_is_shown(node: Running) -> None:
    await node.create("a")
    request = describe(ResourceType.TOPIC, "a", "retention.ms", "nope", synonyms=False, docs=False)
    (config,) = (await node.ask(request)).results[0].configs
    assert (config.name, config.synonyms, config.documentation) == ("retention.ms", (), None)


async def test_a_brokers_settings_are_shown(node: Running) -> None:
    (result,) = (await node.ask(describe(ResourceType.BROKER, "1"))).results
    shown = {config.name: config for config in result.configs}
    assert (shown["node.id"].value, shown["node.id"].read_only) == ("1", True)
    assert (shown["log.segment.bytes"].value, shown["log.segment.bytes"].read_only) == ("1073741824", False)
    assert shown["listeners"].config_source == ConfigSource.STATIC_BROKER
    assert shown["log.retention.ms"].value is None


@pytest.mark.parametrize(
    ("resource_type", "name", "code"),
    [
        (ResourceType.TOPIC, "x", ErrorCode.unknown_topic_or_partition),
        (ResourceType.TOPIC, "a b", ErrorCode.invalid_topic_exception),
        (ResourceType.BROKER, "2", ErrorCode.invalid_request),
        (ResourceType.BROKER_LOGGER, "", ErrorCode.invalid_request),
        (ResourceType.BROKER_LOGGER, "2", ErrorCode.invalid_request),
        (ResourceType.GROUP, "", ErrorCode.invalid_request),
        (ResourceType.CLIENT_METRICS, "", ErrorCode.invalid_request),
        (77, "x", ErrorCode.invalid_request),
    ],
)
async def test_what_has_no_settings_says_so(
    node: Running, resource_type: int, name: str, code: ErrorCode
) -> None:
    (result,) = (await node.ask(describe(resource_type, name))).results
    assert (result.error_code, result.configs) == (code, ())
    assert (result.resource_type, result.resource_name) == (resource_type, name)


@pytest.mark.parametrize("version", range(2))
async def test_a_topics_settings_change_while_it_is_used(node: Running, version: int) -> None:
    await node.create("a")
    request = incrementally(
        ResourceType.TOPIC, "a", ("max.message.bytes", 0, "500"), ("cleanup.policy", 2, "compact")
    )
    (result,) = (await node.ask(request, version=version)).responses
    assert (result.error_code, result.resource_name) == (ErrorCode.none, "a")
    config = node.node.partitions.find("a", 0).log.config
    assert (config.max_message_bytes, config.cleanup_compact, config.cleanup_delete) == (500, True, True)
    await node.ask(incrementally(ResourceType.TOPIC, "a", ("max.message.bytes", 1, None)))
    assert node.node.partitions.find("a", 0).log.config.max_message_bytes == 1_048_588


async def test_a_wrong_setting_is_refused_with_the_reason(node: Running) -> None:
    await node.create("a")
    (result,) = (
        await node.ask(incrementally(ResourceType.TOPIC, "a", ("retention.ms", 0, "soon")))
    ).responses
    assert result.error_code is ErrorCode.invalid_config
    assert result.error_message == "Invalid value soon for configuration retention.ms: must be a whole number"


async def test_a_broker_wide_change_reaches_every_topic(node: Running) -> None:
    await node.create("a")
    (result,) = (
        await node.ask(incrementally(ResourceType.BROKER, "", ("log.segment.bytes", 0, "3000")))
    ).responses
    assert result.error_code is ErrorCode.none
    assert node.node.partitions.find("a", 0).log.config.segment_bytes == 3000
    (cluster_wide,) = (await node.ask(describe(ResourceType.BROKER, ""))).results
    assert [(c.name, c.value, c.config_source) for c in cluster_wide.configs] == [
        ("log.segment.bytes", "3000", ConfigSource.DYNAMIC_DEFAULT_BROKER)
    ]
    (topic,) = (await node.ask(describe(ResourceType.TOPIC, "a", "segment.bytes"))).results
    assert (topic.configs[0].value, topic.configs[0].config_source) == (
        "3000",
        ConfigSource.DYNAMIC_DEFAULT_BROKER,
    )


async def test_what_is_read_at_start_cannot_be_changed(node: Running) -> None:
    (result,) = (await node.ask(incrementally(ResourceType.BROKER, "1", ("node.id", 0, "2")))).responses
    assert result.error_code is ErrorCode.invalid_request


@pytest.mark.parametrize("version", range(3))
async def test_replacing_settings_drops_the_others(node: Running, version: int) -> None:
    await node.create("a", retention_ms="5")
    request = alter.AlterConfigsRequest(
        resources=(
            alter.AlterConfigsResource(
                resource_type=ResourceType.TOPIC,
                resource_name="a",
                configs=(alter.AlterableConfig(name="segment.ms", value="7"),),
            ),
        ),
        validate_only=False,
    )
    (result,) = (await node.ask(request, version=version)).responses
    assert result.error_code is ErrorCode.none
    assert node.node.image.config(ResourceType.TOPIC, "a") == {"segment.ms": "7"}


# --- DeleteRecords, DescribeLogDirs, DescribeProducers, InitProducerId, DescribeTopicPartitions ---


def delete_before(topic: str, index: int, offset: int) -> Any:
    return records.DeleteRecordsRequest(
        topics=(
            records.DeleteRecordsTopic(
                name=topic, partitions=(records.DeleteRecordsPartition(partition_index=index, offset=offset),)
            ),
        ),
        timeout=SECONDS_30,
    )


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize(("offset", "start_offset"), [(3, 3), (-1, 5), (0, 0), (5, 5)])
async def test_records_are_deleted_up_to_an_offset(
    node: Running, version: int, offset: int, start_offset: int
) -> None:
    await node.create("a")
    await node.publish("a", 5)
    (result,) = (await node.ask(delete_before("a", 0, offset), version=version)).topics[0].partitions
    assert (result.error_code, result.low_watermark) == (ErrorCode.none, start_offset)
    assert node.node.partitions.find("a", 0).log.start_offset == start_offset


@pytest.mark.parametrize(
    ("topic", "index", "offset", "code"),
    [
        ("a", 0, 6, ErrorCode.offset_out_of_range),
        ("a", 0, -2, ErrorCode.offset_out_of_range),
        ("a", 1, 0, ErrorCode.unknown_topic_or_partition),
        ("x", 0, 0, ErrorCode.unknown_topic_or_partition),
        ("compacted", 0, -1, ErrorCode.policy_violation),
        ("__consumer_offsets", 0, -1, ErrorCode.invalid_topic_exception),
    ],
)
async def test_records_that_cannot_be_deleted_stay(
    node: Running, topic: str, index: int, offset: int, code: ErrorCode
) -> None:
    await node.create("a")
    await node.create("compacted", cleanup_policy="compact")
    await node.create("__consumer_offsets", cleanup_policy="compact")
    await node.publish("a", 5)
    (result,) = (await node.ask(delete_before(topic, index, offset))).topics[0].partitions
    assert (result.error_code, result.low_watermark) == (code, -1)
    assert node.node.partitions.find("a", 0).log.start_offset == 0


async def test_deleted_records_do_not_come_back_after_a_crash(start: Start, tmp_path: Path) -> None:
    node = await start()
    await node.create("a")
    await node.publish("a", 5)
    await node.ask(delete_before("a", 0, 3))
    await node.node.stop(clean=False)
    node = await start()
    assert node.node.partitions.find("a", 0).log.start_offset == 3


@pytest.mark.parametrize("version", range(1, 5))
async def test_log_dirs_show_sizes(node: Running, version: int, tmp_path: Path) -> None:
    await node.create("a", 2)
    await node.create("b")
    await node.publish("a", 10)
    everything = log_dirs.DescribeLogDirsRequest(topics=None)
    (result,) = (await node.ask(everything, version=version)).results
    assert (result.error_code, result.log_dir) == (ErrorCode.none, str(tmp_path / "data"))
    sizes = {(t.name, p.partition_index): p.partition_size for t in result.topics for p in t.partitions}
    assert set(sizes) == {("a", 0), ("a", 1), ("b", 0)}
    assert sizes["a", 0] > 1000
    assert sizes["a", 1] == 0
    if version >= 4:
        assert result.total_bytes >= result.usable_bytes > 0
    some = log_dirs.DescribeLogDirsRequest(
        topics=(
            log_dirs.DescribableLogDirTopic(topic="b", partitions=(0, 7)),
            log_dirs.DescribableLogDirTopic(topic="x", partitions=(0,)),
        )
    )
    (result,) = (await node.ask(some, version=version)).results
    assert [(t.name, [p.partition_index for p in t.partitions]) for t in result.topics] == [("b", [0])]


def init_producer(transactional_id: str | None = None, *, producer_id: int = -1, epoch: int = -1) -> Any:
    return init.InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout=SECONDS_30,
        producer_id=producer_id,
        producer_epoch=epoch,
    )


@pytest.mark.parametrize("version", range(6))
async def test_every_producer_gets_an_id_of_its_own(node: Running, version: int) -> None:
    answers = [await node.ask(init_producer(), version=version) for _ in range(3)]
    assert {(answer.error_code, answer.producer_epoch) for answer in answers} == {(ErrorCode.none, 0)}
    assert len({answer.producer_id for answer in answers}) == 3


async def test_producer_ids_are_not_given_out_again_after_a_restart(node: Running, start: Start) -> None:
    before = (await node.ask(init_producer())).producer_id
    node = await start()
    assert (await node.ask(init_producer())).producer_id > before


async def test_a_block_of_producer_ids_is_followed_by_the_next(node: Running) -> None:
    fresh = [await node.node.producer_ids.fresh() for _ in range(1001)]
    assert fresh == list(range(1001))


async def test_a_producer_that_names_its_old_id_gets_a_new_one(node: Running) -> None:
    first = await node.ask(init_producer())
    again = await node.ask(init_producer(producer_id=first.producer_id, epoch=0))
    assert (again.error_code, again.producer_epoch) == (ErrorCode.none, 0)
    assert again.producer_id != first.producer_id
    half = await node.ask(init_producer(producer_id=first.producer_id))
    assert half.error_code is ErrorCode.invalid_request


async def test_producers_of_a_partition_are_shown(node: Running) -> None:
    await node.create("a")
    await node.publish("a", 3, producer_id=42)
    request = producers.DescribeProducersRequest(
        topics=(
            producers.TopicRequest(name="a", partition_indexes=(0, 9)),
            producers.TopicRequest(name="no way", partition_indexes=(0,)),
        )
    )
    a, wrong = (await node.ask(request)).topics
    known, missing = a.partitions
    (producer,) = known.active_producers
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (42, 0, 2)
    assert producer.current_txn_start_offset == -1
    assert missing.error_code is ErrorCode.unknown_topic_or_partition
    assert wrong.partitions[0].error_code is ErrorCode.invalid_topic_exception


def page(*names: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
    return topic_partitions.DescribeTopicPartitionsRequest(
        topics=tuple(topic_partitions.TopicRequest(name=name) for name in names),
        response_partition_limit=limit,
        cursor=None
        if cursor is None
        else topic_partitions.Cursor(topic_name=cursor[0], partition_index=cursor[1]),
    )


async def test_partitions_are_described_page_by_page(node: Running) -> None:
    for name, count in (("c", 2), ("a", 3), ("b", 1)):
        await node.create(name, count)
    seen: list[tuple[str, int]] = []
    pages, cursor = 0, None
    while pages == 0 or cursor is not None:
        response = await node.ask(page(limit=2, cursor=cursor))
        told = [(t.name, p.partition_index) for t in response.topics for p in t.partitions]
        assert len(told) <= 2
        seen += told
        pages += 1
        following = response.next_cursor
        cursor = None if following is None else (following.topic_name, following.partition_index)
    assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    assert pages == 3


async def test_described_partitions_carry_leader_and_replicas(node: Running) -> None:
    topic_id = await node.create("a")
    found, missing = (await node.ask(page("x", "a"))).topics
    assert (found.name, found.topic_id, found.topic_authorized_operations) == (
        "a",
        topic_id,
        TOPIC_OPERATIONS,
    )
    (partition,) = found.partitions
    assert (partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (1, (1,), (1,))
    assert (missing.name, missing.error_code) == ("x", ErrorCode.unknown_topic_or_partition)


async def test_a_cursor_must_point_at_what_is_asked_for(node: Running) -> None:
    await node.create("a")
    for cursor in (("b", 0), ("a", -1)):
        (topic,) = (await node.ask(page("a", cursor=cursor))).topics
        assert topic.error_code is ErrorCode.invalid_request
