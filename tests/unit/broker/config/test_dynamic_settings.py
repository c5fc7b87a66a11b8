"""Broker settings that change while the node runs: their effect, how they are described, and what is refused."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.config.config_requests import alter, described
from tests.unit.broker.raw_client import Client, create_topic, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.controller.features import feature_levels
from penstock.broker.node import Node
from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ResourceType
from penstock.cluster.metadata_records import ConfigRecord
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.config_def import SettingType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

HERE, EVERYWHERE = (ResourceType.BROKER, "1"), (ResourceType.BROKER, "")
OK = (ErrorCode.none, None)
#: Those of Apache Kafka 4.3 that exist here and are about more than one topic's default.
KAFKAS_DYNAMIC = {
    "compression.type",
    "group.consumer.assignment.interval.ms",
    "log.cleaner.backoff.ms",
    "log.cleaner.dedupe.buffer.size",
    "log.cleaner.threads",
    "log.retention.bytes",
    "log.retention.ms",
    "log.segment.bytes",
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "max.connection.creation.rate",
    "message.max.bytes",
    "min.insync.replicas",
    "num.recovery.threads.per.data.dir",
    "producer.id.expiration.ms",
    "transaction.partition.verification.enable",
    "unclean.leader.election.enable",
}


def test_what_apache_kafka_lets_one_change_is_dynamic() -> None:
    assert {name for name in KAFKAS_DYNAMIC if NODE_SETTINGS[name].read_only} == set()


async def test_fixed_settings_are_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for resource in (HERE, EVERYWHERE):
            assert await alter(client, resource, {"log.retention.ms": "5", "log.dirs": "/x"}) == (
                ErrorCode.invalid_request,
                "Cannot update these configs dynamically: [log.dirs]",
            )
            code, message = await alter(client, resource, {"max.connections": "-1"})
            assert code is ErrorCode.invalid_request
            assert message is not None
            assert "max.connections" in message
        assert node.image.configs == {}
        await client.close()


async def test_sources_and_synonyms_are_shown_strongest_first(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections="500") as node:
        client = await WireClient.connect(node)

        async def shown() -> tuple[str, int, bool, list[tuple[str, int]]]:
            found = (await described(client, HERE, "max.connections"))["max.connections"]
            synonyms = [(s.value, s.source) for s in found.synonyms]
            return found.value, found.config_source, found.read_only, synonyms

        given = [("500", ConfigSource.STATIC_BROKER), (str(2**31 - 1), ConfigSource.DEFAULT)]
        assert await shown() == ("500", ConfigSource.STATIC_BROKER, False, given)
        assert await alter(client, EVERYWHERE, {"max.connections": "400"}) == OK
        given = [("400", ConfigSource.DYNAMIC_DEFAULT_BROKER), *given]
        assert await shown() == ("400", ConfigSource.DYNAMIC_DEFAULT_BROKER, False, given)
        assert await alter(client, HERE, {"max.connections": "300"}) == OK
        given = [("300", ConfigSource.DYNAMIC_BROKER), *given]
        assert await shown() == ("300", ConfigSource.DYNAMIC_BROKER, False, given)
        everywhere = await described(client, EVERYWHERE)
        assert {name: config.value for name, config in everywhere.items()} == {"max.connections": "400"}
        await client.close()


async def test_limits_of_connections_count_for_the_next_one(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for resource, name in ((EVERYWHERE, "max.connections.per.ip"), (HERE, "max.connections")):
            assert await alter(client, resource, {name: "1"}) == OK
            assert await (await Client.connect(node)).is_cut_off()
            assert await alter(client, resource, {name: None}) == OK
            assert await answers(node)
        await client.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"max.connections": "0"},
        {"max.connections": "-0"},
        {"max.connections.per.ip": "0"},
        {"max.connections.per.ip": "00", "max.connections.per.ip.overrides": " , "},
        {"log.retention.ms": "0"},
        {"log.retention.minutes": "0"},
        {"log.retention.hours": "0"},
        {"group.consumer.assignment.interval.ms": "99999999"},
    ],
)
async def test_no_setting_can_lock_out_all_clients(tmp_path: Path, changes: dict[str, str | None]) -> None:
    """Or lose all records at once. No client could connect to undo it, not even after a restart."""
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for resource in (HERE, EVERYWHERE):
            assert (await alter(client, resource, changes))[0] is ErrorCode.invalid_request
        assert node.image.configs == {}
        kept: dict[str, str | None] = {
            "max.connections.per.ip": "0",
            "max.connections.per.ip.overrides": "127.0.0.1:9",
        }
        assert await alter(client, HERE, kept) == OK
        removed: dict[str, str | None] = {"max.connections.per.ip.overrides": None}
        assert (await alter(client, HERE, removed))[0] is ErrorCode.invalid_request
        assert await answers(node)
        await client.close()


async def answers(node: Node) -> bool:
    client = await WireClient.connect(node)
    found = await described(client, HERE, "node.id")
    await client.close()
    return bool(found)


async def test_a_change_outlives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        assert await alter(client, HERE, {"max.connections.per.ip": "1"}) == OK
        await client.close()
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        await described(client, HERE, "node.id")
        assert await (await Client.connect(node)).is_cut_off()
        await client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_may_have_a_limit_of_its_own(tmp_path: Path, host: str) -> None:
    async with running(tmp_path, max_connections_per_ip="2") as node:
        client = await WireClient.connect(node)
        for wrong in ("127.0.0.1", "127.0.0.1:many", ":5"):
            code, message = await alter(client, HERE, {"max.connections.per.ip.overrides": wrong})
            assert (code, "is not HOST:COUNT" in (message or "")) == (ErrorCode.invalid_request, True)
        assert await alter(client, HERE, {"max.connections.per.ip.overrides": f"{host}:1, 10.0.0.1:7"}) == OK
        await until(lambda: "127.0.0.1" in node.server.limits.by_host)
        assert await (await Client.connect(node)).is_cut_off()
        await client.close()


@pytest.mark.parametrize("name", ["a" * 70, "no\0name", "\udc80x", "."])
async def test_an_unresolvable_host_name_has_no_other_effect(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the process, on every node, and again at every start."""
    text = name.encode(errors="surrogateescape").decode(errors="replace")
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        await alter(client, EVERYWHERE, {"max.connections.per.ip.overrides": f"{text}:1,127.0.0.1:9"})
        await until(lambda: "no address for a host" in caplog.text)
        assert node.server.limits.by_host == {"127.0.0.1": 9}
        assert await answers(node)
        await client.close()
    async with running(tmp_path) as node:
        assert await answers(node)


async def test_a_name_server_that_does_not_answer_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, asked = threading.Event(), []

    def slow(host: str, port: object) -> list[Any]:
        asked.append(host)
        may_answer.wait()
        return [(0, 0, 0, "", ("10.0.0.9", 0))]

    monkeypatch.setattr("penstock.broker.network.connection_limits.socket.getaddrinfo", slow)
    setting = "max.connections.per.ip.overrides"
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for number in range(3):
            assert await alter(client, HERE, {setting: f"first-{number}:1,second-{number}:2"}) == OK
            await until(lambda: bool(asked))
        assert await answers(node)
        assert asked == ["first-0"], "one thread, however often the setting changes"
        may_answer.set()
        await until(lambda: len(asked) == 3 and not node.server.limits.is_resolving)
        assert asked == ["first-0", "first-2", "second-2"], "names that do not count any more are left out"
        assert node.server.limits.by_host == {"10.0.0.9": 1}
        await client.close()


async def test_a_broker_is_named_by_a_number_that_could_be_its_id(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for kind in (ResourceType.BROKER, ResourceType.BROKER_LOGGER):
            for name in ("9" * 5000, "9" * 11, "\N{ARABIC-INDIC DIGIT ONE}", "-1", "x"):
                code, message = await alter(client, (kind, name), {"root": "INFO"})
                assert code is ErrorCode.invalid_request
                assert message is not None
                assert message.startswith(f"Node id must be an integer, but it is: {name[:1000]}")
        await client.close()


async def test_connections_above_the_creation_rate_wait_their_turn(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        assert await alter(client, HERE, {"max.connection.creation.rate": "2"}) == OK
        began = node.server.clock()
        # A second's worth may come at once, and the one that is due now; the other two are half a second apart.
        assert all(await asyncio.gather(*(answers(node) for _ in range(5))))
        assert node.server.clock() - began >= 0.9
        await client.close()


async def test_defaults_of_topics_reach_their_logs(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "plain")
        await create_topic(node, "own", retention_ms="7000")
        client = await WireClient.connect(node)
        plain, own = (node.partitions.find(topic, 0).log for topic in ("plain", "own"))
        changes: dict[str, str | None] = {"log.retention.ms": "5000", "message.max.bytes": "2000"}
        assert await alter(client, EVERYWHERE, changes) == OK
        assert (plain.config.retention_ms, plain.config.max_message_bytes) == (5000, 2000)
        assert (own.config.retention_ms, own.config.max_message_bytes) == (7000, 2000)
        assert await alter(client, HERE, {"log.retention.ms": "6000"}) == OK
        assert (plain.config.retention_ms, own.config.retention_ms) == (6000, 7000)
        await client.close()


async def test_a_default_that_no_topic_can_have_is_refused_and_counts_for_nothing_where_it_is_stored(
    tmp_path: Path,
) -> None:
    """Taken as a default for all topics, it kept a node from following the metadata any further."""
    level = {"compression.gzip.level": "0"}
    async with running(tmp_path) as node:
        await create_topic(node, "before")
        client = await WireClient.connect(node)
        for resource in (HERE, EVERYWHERE):
            code, message = await alter(client, resource, dict(level))
            assert code is ErrorCode.invalid_request
            assert "must be -1 or from 1 to 9" in (message or "")
        stored = ConfigRecord(
            resource_type=ResourceType.BROKER, resource_name="", name="compression.gzip.level", value="0"
        )
        await node.metadata.propose(lambda _: Decision((stored,), None))
        await create_topic(node, "after")
        shown = await described(client, (ResourceType.TOPIC, "before"), "compression.gzip.level")
        found = shown["compression.gzip.level"]
        assert (found.value, found.config_source) == ("-1", ConfigSource.DEFAULT)
        await client.close()
    async with running(tmp_path) as node:
        assert node.partitions.find("after", 0).is_leader


def write(node: Node, topic: str, *, producer_id: int = -1) -> None:
    """Two values of one key, each in a segment of its own, and one more that is not yet to be compacted."""
    partition = node.partitions.find(topic, 0)
    producer = {} if producer_id < 0 else {"producer_id": producer_id, "producer_epoch": 0}
    for number in range(3):
        batch = encode_batch(
            [Record(0, node.environment.now_ms(), b"key", b"x" * 5000)],
            **producer | ({"base_sequence": number} if producer else {}),
        )
        partition.append(memoryview(batch), node.environment.now_ms())


async def test_a_shorter_rest_of_the_cleaner_counts_at_once(tmp_path: Path) -> None:
    compacted = {"cleanup_policy": "compact", "segment_bytes": "6000", "min_cleanable_dirty_ratio": "0"}
    async with running(tmp_path, log_cleaner_backoff_ms="3600000") as node:
        for topic in ("a", "b"):
            await create_topic(node, topic, **compacted)
            write(node, topic)
        client = await WireClient.connect(node)
        changes: dict[str, str | None] = {
            "log.cleaner.threads": "2",
            "log.cleaner.dedupe.buffer.size": str(4 << 20),
            "log.cleaner.backoff.ms": "10",
        }
        assert await alter(client, EVERYWHERE, changes) == OK
        cleaner = node.housekeeping._get_cleaner()
        await until(lambda: [cleaner.first_dirty_offset((topic, 0)) for topic in ("a", "b")] == [2, 2])
        assert cleaner.dedupe_buffer_bytes == 2 << 20, "shared by two threads"
        await client.close()


async def test_producers_are_forgotten_by_the_new_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, producer_id_expiration_check_interval_ms="10") as node:
        await create_topic(node, "t")
        write(node, "t", producer_id=7)
        known = node.partitions.find("t", 0).log.producers.states
        assert 7 in known
        client = await WireClient.connect(node)
        assert await alter(client, EVERYWHERE, {"producer.id.expiration.ms": "1"}) == OK
        await until(lambda: 7 not in known)
        await create_topic(node, "later")
        assert node.partitions.find("later", 0).log.producers.expiry_ms == 1
        await client.close()


async def test_verification_of_transactions_can_be_switched(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        admission = node.transactions().admission
        client = await WireClient.connect(node)
        assert admission._verifies
        assert await alter(client, HERE, {"transaction.partition.verification.enable": "false"}) == OK
        assert not admission._verifies
        await client.close()


async def test_with_eligible_leader_replicas_one_minimum_counts_for_all_brokers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Apache Kafka with eligible.leader.replicas.version 1: what the founder was given, not what files say."""
    async with running(tmp_path, min_insync_replicas="2") as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        (feature,) = (f for f in feature_levels(node.image) if f.name == "eligible.leader.replicas.version")
        assert (feature.level_min, feature.level, feature.level_max) == (1, 1, 1)
        for resource in (HERE, (ResourceType.TOPIC, "t")):
            shown = (await described(client, resource, "min.insync.replicas"))["min.insync.replicas"]
            assert (shown.value, shown.config_source) == ("2", ConfigSource.DYNAMIC_DEFAULT_BROKER)
        assert await alter(client, HERE, {"min.insync.replicas": "1"}) == (
            ErrorCode.invalid_config,
            "Broker-level min.insync.replicas cannot be altered while ELR is enabled.",
        )
        assert await alter(client, EVERYWHERE, {"min.insync.replicas": None}) == (
            ErrorCode.invalid_config,
            "Cluster-level min.insync.replicas cannot be removed while ELR is enabled.",
        )
        assert await alter(client, EVERYWHERE, {"min.insync.replicas": "3"}) == OK
        await client.close()
    async with running(tmp_path, min_insync_replicas="2") as node:
        assert node.partitions.find("t", 0).min_insync_replicas == 3
        assert node.dynamic.overridden() == ["min.insync.replicas"]
    assert "settings of this node that the cluster overrules" in caplog.messages


async def test_a_default_minimum_is_not_stored(tmp_path: Path) -> None:
    """So that it can still be chosen in the files of the nodes when one node grows into three."""
    async with running(tmp_path) as node:
        assert node.image.config(ResourceType.BROKER, "") == {}
        await create_topic(node, "t")
        assert node.partitions.find("t", 0).min_insync_replicas == 1
    async with running(tmp_path, min_insync_replicas="2") as node:
        assert node.partitions.find("t", 0).min_insync_replicas == 2
        assert node.dynamic.overridden() == []


async def test_stored_settings_of_another_version_count_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a downgrade a node follows the metadata, serves, and lets other settings be changed."""
    stored = {
        "setting.of.a.newer.version": "secret",
        "max.connections": "as many as there are",
        "node.id": "7",
        "log.retention.ms": "5000",
        "log.cleanup.policy": "archive",
        "group.consumer.max.session.timeout.ms": "for ever",
    }
    records = [
        ConfigRecord(resource_type=ResourceType.BROKER, resource_name=name, name=setting, value=text)
        for name in ("", "1")
        for setting, text in stored.items()
    ]
    for_topic = [
        ConfigRecord(resource_type=ResourceType.TOPIC, resource_name="t", name=name, value="newer")
        for name in ("segment.bytes", "topic.setting.of.a.newer.version")
    ]
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        await node.metadata.propose(lambda _: Decision((*records, *for_topic), None))
        assert node.partitions.find("t", 0).log.config.retention_ms == 5000
        assert await answers(node)
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        for name in sorted({*stored} - {"log.retention.ms"}):
            warned = [record for record in caplog.records if getattr(record, "setting", None) == name]
            assert len(warned) == 2, f"{name}: once in each life of the node"
        for resource, source in (
            (HERE, ConfigSource.DYNAMIC_BROKER),
            (EVERYWHERE, ConfigSource.DYNAMIC_DEFAULT_BROKER),
        ):
            shown = await described(client, resource)
            unknown = shown["setting.of.a.newer.version"]
            assert (unknown.value, unknown.is_sensitive, unknown.read_only) == (None, True, True)
            assert (unknown.config_type, unknown.config_source) == (SettingType.UNKNOWN, source)
            assert {each.value for each in unknown.synonyms} == {None}
        here = await described(client, HERE)
        assert (here["max.connections"].value, here["node.id"].value) == (str(2**31 - 1), "1")
        assert (await described(client, EVERYWHERE))["max.connections"].value == "as many as there are"
        topic = await described(client, (ResourceType.TOPIC, "t"))
        assert (topic["segment.bytes"].value, topic["retention.ms"].value) == (str(1 << 30), "5000")

        for resource in (HERE, EVERYWHERE):
            assert await alter(client, resource, {"log.retention.ms": "6000"}) == OK
            assert await alter(client, resource, {"log.cleanup.policy": "compact"}, op=ConfigOp.APPEND) == OK
            assert (await alter(client, resource, {"setting.of.a.newer.version": "x"}))[
                0
            ] is not ErrorCode.none
            assert (
                await alter(client, resource, {"setting.of.a.newer.version": None, "max.connections": None})
                == OK
            )
        assert await alter(client, (ResourceType.TOPIC, "t"), {"retention.ms": "7000"}) == OK
        assert await alter(client, (ResourceType.GROUP, "g"), {"consumer.session.timeout.ms": "45000"}) == OK
        assert node.partitions.find("t", 0).log.config.cleanup_compact
        await client.close()


async def test_limits_of_connections_are_for_clients_not_for_nodes(tmp_path: Path) -> None:
    """Nodes that cannot reach each other have no controller, so that the limit could not be undone."""
    listeners = "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"
    limits: dict[str, str | None] = {
        "max.connections": "1",
        "max.connections.per.ip": "1",
        "max.connections.per.ip.overrides": "127.0.0.1:1",
        "max.connection.creation.rate": "1",
    }
    async with running(tmp_path, listeners=listeners) as node:
        peers = [await WireClient.connect(node, listener=1) for _ in range(3)]
        client = await WireClient.connect(node)
        assert await alter(client, EVERYWHERE, limits) == OK
        peers += [await WireClient.connect(node, listener=1) for _ in range(3)]
        for peer in peers:
            await described(peer, HERE, "node.id")
        assert await (await Client.connect(node)).is_cut_off()
        await client.close()
        await until(lambda: node.server.limits.clients == 0)
        assert await answers(node), "one client still gets in and can undo it"
        for peer in peers:
            await peer.close()


async def test_a_lifted_creation_rate_leaves_no_queue_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        assert await alter(client, HERE, {"max.connection.creation.rate": "1"}) == OK
        crowd = [await WireClient.connect(node) for _ in range(300)]
        assert await alter(client, HERE, {"max.connection.creation.rate": None}) == OK
        assert await answers(node), "it would come after the crowd, minutes later"
        for each in crowd:
            await each.close()
        await client.close()
