"""The audit trail: what its lines say, and that nobody can flood it."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kio.index import load_request_schema
from kio.schema.alter_client_quotas.v1 import request as quotas
from kio.schema.alter_user_scram_credentials.v0 import request as scram
from kio.schema.create_topics.v7 import request as create
from kio.schema.write_txn_markers.v1 import request as markers
from tests.access.matrix import MILLISECOND, rule
from tests.access.ours import SETTINGS, Client
from tests.certificates import Authority
from tests.unit.broker.network.test_node_principals import logged_in, node_with
from tests.unit.broker.network.test_sasl import authenticate, handshake, sasl_node
from tests.unit.broker.network.test_tls import ask, client_context, connect, tls_settings
from tests.unit.broker.network.test_tls import running as tls_node
from tests.unit.broker.raw_client import create_topic, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.network.audit import BURST_LINES, LINES_PER_SECOND, AuditTrail
from penstock.protocol.acls import Operation, ResourceType

NOW_MS = 1_700_000_000_000


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "penstock.audit"]


def test_a_flood_is_counted_and_other_principals_keep_their_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    trail = AuditTrail()
    for _ in range(BURST_LINES + 1000):
        trail.write("User:mallory", NOW_MS, {"event": "refused"})
    trail.write("User:alice", NOW_MS, {"event": "refused"})
    assert len(lines(caplog)) == BURST_LINES + 1
    assert trail.left_out == 1000
    trail.write("User:mallory", NOW_MS + int(2000 / LINES_PER_SECOND), {"event": "refused"})
    assert lines(caplog)[-1]["left_out"] == 1000


def test_the_memory_for_principals_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.network.audit._PRINCIPALS_MAX", 3)
    trail = AuditTrail()
    for number in range(10):
        trail.write(f"User:{number}", NOW_MS, {"event": "refused"})
    assert len(trail._budgets) == 3


async def test_refusals_and_changes_name_principal_host_and_resources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    topic = create.CreatableTopic(
        name="orders",
        num_partitions=1,
        replication_factor=1,
        assignments=(),
        configs=(create.CreatableTopicConfig(name="retention.ms", value="12345"),),
    )
    request = create.CreateTopicsRequest(topics=(topic,), timeout=5000 * MILLISECOND, validate_only=False)
    async with sasl_node(tmp_path, **SETTINGS) as node:
        client = Client(node)
        await client.ask(request)
        assert node.authorizer is not None
        node.authorizer.update({uuid4(): rule((Operation.CREATE, ResourceType.TOPIC, "orders"))})
        await client.ask(request)
    refused, changed = (line for line in lines(caplog) if line["api"] == "create_topics")
    common = {"principal": "User:alice", "host": "127.0.0.1", "client_id": "test", "api": "create_topics"}
    assert refused.items() >= (common | {"event": "refused", "operation": "CREATE", "name": "orders"}).items()
    assert changed.items() >= (common | {"event": "changed"}).items()
    assert changed["resources"] == [{"name": "orders", "settings": ["retention.ms"]}]
    assert "12345" not in json.dumps(changed), "values of settings may be secrets"


def changes() -> Iterator[tuple[Any, list[object]]]:
    """Requests, and what their audit lines name."""
    delete = load_request_schema(20, 1)
    yield (
        quotas.AlterClientQuotasRequest(
            entries=(
                quotas.EntryData(
                    entity=(quotas.EntityData(entity_type="user", entity_name="bob"),),
                    ops=(quotas.OpData(key="producer_byte_rate", value=12345.0, remove=False),),
                ),
            ),
            validate_only=False,
        ),
        [{"entity": {"user": "bob"}, "settings": ["producer_byte_rate"]}],
    )
    yield (
        scram.AlterUserScramCredentialsRequest(
            deletions=(scram.ScramCredentialDeletion(name="bob", mechanism=2),), upsertions=()
        ),
        [{"name": "bob", "mechanism": 2, "deleted": True}],
    )
    yield (
        scram.AlterUserScramCredentialsRequest(
            deletions=(),
            upsertions=(
                scram.ScramCredentialUpsertion(
                    name="bob",
                    mechanism=1,
                    iterations=4096,
                    salt=b"planted-salt",
                    salted_password=b"planted-key",
                ),
            ),
        ),
        [{"name": "bob", "mechanism": 1}],
    )
    yield delete(topic_names=("orders",), timeout=5000 * MILLISECOND), ["orders"]


async def test_lines_name_what_was_changed_also_without_an_authorizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with running(tmp_path) as node:
        await create_topic(node, "orders")
        client = await WireClient.connect(node)
        for request, resources in changes():
            await client.ask(request)
            line = lines(caplog)[-1]
            assert (line["event"], line["principal"]) == ("changed", "User:ANONYMOUS")
            assert line["resources"] == resources
        await client.close()
    assert "planted" not in caplog.text
    assert "12345" not in json.dumps(lines(caplog))


async def test_markers_of_operators_are_in_the_trail_and_those_of_coordinators_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    marker = markers.WritableTxnMarker(
        producer_id=7,
        producer_epoch=0,
        transaction_result=False,
        topics=(markers.WritableTxnMarkerTopic(name="orders", partition_indexes=(0,)),),
        coordinator_epoch=0,
    )
    rules = {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:admin;User:broker"}
    async with node_with(tmp_path, **rules) as node:
        for user in ("broker", "admin"):
            client = await logged_in(node, user, user[0])
            await client.ask(markers.WriteTxnMarkersRequest(markers=(marker,)))
            await client.close()
    (line,) = (line for line in lines(caplog) if line["api"] == "write_txn_markers")
    assert line["principal"] == "User:admin"
    assert line["resources"] == [{"producer_id": 7, "transaction_result": False, "topics": ["orders"]}]


async def test_failed_logins_share_one_budget_whatever_user_they_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with node_with(tmp_path, **{"connection.failed.authentication.delay.ms": "0"}) as node:

        async def fail(number: int) -> None:
            client = await WireClient.connect(node)
            await handshake()(client)
            await authenticate(f"\0user-{number}\0planted-password".encode())(client)
            await client.close()

        for number in range(BURST_LINES + 20):
            await fail(number)
        await until(lambda: node.services.audit.left_out > 0)
    first = lines(caplog)[0]
    assert (
        first.items()
        >= {
            "event": "login_failed",
            "principal": "User:ANONYMOUS",
            "user": "user-0",
            "mechanism": "PLAIN",
            "host": "127.0.0.1",
            "listener": "SASL_PLAINTEXT",
        }.items()
    )
    assert "planted" not in caplog.text


async def test_refused_certificates_are_in_the_trail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    authority = Authority(tmp_path / "certificates")
    settings = tls_settings(
        authority, ssl_client_auth="required", ssl_principal_mapping_rules="RULE:^CN=(?!eve)(.*?),.*$/$1/"
    )
    refused = {
        "no certificate": None,
        "expired": authority.issue("old", expired=True),
        "unable to get local issuer certificate": Authority(tmp_path / "other").issue("mallory"),
        "CN=eve": authority.issue("eve"),
    }
    async with tls_node(tmp_path, settings) as node:
        for certificate in refused.values():
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await ask(await connect(node, client_context(authority, certificate)))
        await until(lambda: len(lines(caplog)) == len(refused))
        reader, writer = await connect(node, client_context(authority, authority.issue("alice")))
        await ask((reader, writer))
        writer.close()
    for line, reason in zip(lines(caplog), refused, strict=True):
        assert reason in str(line.pop("reason"))
        assert line.pop("time")
        assert line == {
            "principal": "User:ANONYMOUS",
            "event": "login_failed",
            "host": "127.0.0.1",
            "listener": "SSL",
            "mechanism": "certificate",
        }


async def test_who_is_refused_as_a_node_is_in_the_trail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with node_with(tmp_path) as node:
        client = await logged_in(node, "mallory", "m")
        with pytest.raises(asyncio.IncompleteReadError):
            await client.ask_raw(58, 0, b"")
        await client.close()
    assert [(line["principal"], line["api"], line["operation"]) for line in lines(caplog)] == [
        ("User:mallory", "envelope", "CLUSTER_ACTION")
    ]
