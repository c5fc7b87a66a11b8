"""Only nodes may send what only nodes send: on a listener that authenticates, their principals say who is one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from benchmarks.request_turns import message
from kio.index import load_request_schema
from kio.schema.fetch.v18.request import ReplicaState
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from tests.certificates import Authority
from tests.fuzz.messages import Requests
from tests.unit.broker.handlers.test_delegation_tokens import creation, log_in_with
from tests.unit.broker.handlers.test_scram_credentials import altered, upsertion
from tests.unit.broker.raw_client import create_topic
from tests.unit.broker.wire_client import WireClient

from penstock.broker.config.node_settings import load_settings
from penstock.broker.network.apis import APIS, FETCH
from penstock.broker.network.connection import Connection
from penstock.broker.network.node_principals import NodePrincipals
from penstock.broker.node import Node
from penstock.broker.partition.idempotent_append import _produce_request
from penstock.cluster.topic_names import AUDIT, CONSUMER_OFFSETS
from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.protocol.config_def import InvalidSetting
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from penstock.security.principal import Principal
from penstock.security.quotas import CONSUMER_BYTE_RATE

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
USERS = 'user_broker="b" user_mallory="m" user_admin="a";'
SHARED = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "security.inter.broker.protocol": "SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        f'{MODULE} required username="broker" password="b" {USERS}'
    ),
}
BY_RULES = {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:admin"}
NOW_MS = 1_700_000_000_000
NODE_ONLY = [key for key, api in APIS.items() if api.inter_broker_from <= api.max_version]
DESCRIBE_CONFIGS = 32
REFUSED = {ErrorCode.cluster_authorization_failed}
ACCESS_REFUSED = ("access", ErrorCode.cluster_authorization_failed.name)


@contextlib.asynccontextmanager
async def node_with(tmp_path: Path, **settings: str) -> AsyncIterator[Node]:
    given = {"log.dirs": str(tmp_path / "data")} | SHARED | settings
    node = Node(load_settings(given, {}))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def logged_in(node: Node, user: str, password: str) -> WireClient:
    client = await WireClient.connect(node)
    await client.ask(SaslHandshakeRequest(mechanism="PLAIN"))
    message = f"\0{user}\0{password}".encode()
    answer = await client.ask(SaslAuthenticateRequest(auth_bytes=message))
    assert answer.error_code is ErrorCode.none
    return client


async def codes_of_answer(node: Node, user: str, request: Any) -> set[ErrorCode]:
    """Every error in the answer; CLUSTER_AUTHORIZATION_FAILED also where the connection was closed for it."""
    client = await logged_in(node, user, user[0])
    before = node.metrics.node_requests_refused.copy()
    try:
        return set(error_codes(await client.ask(request)))
    except asyncio.IncompleteReadError:
        return REFUSED if node.metrics.node_requests_refused != before else set()
    finally:
        await client.close()


def error_codes(entity: Any) -> Iterator[ErrorCode]:
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.metadata.get("kafka_type") == "error_code":
            yield value
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from error_codes(item)


def follower_fetch(partitions: int = 1, *, session_epoch: int = -1) -> Any:
    request = message(load_request_schema(FETCH, 18), ("topics", "partitions"), partitions)
    fetch = replace(request, session_id=0, session_epoch=session_epoch, max_wait=timedelta(0))
    return replace(fetch, replica_state=ReplicaState(replica_id=0))  # type: ignore[arg-type]


def requests_of_nodes() -> Iterator[Any]:
    for key in NODE_ONLY:
        yield Requests(1)._entity(load_request_schema(key, APIS[key].max_version))
    yield follower_fetch()


async def test_a_user_who_can_log_in_is_no_node(tmp_path: Path) -> None:
    async with node_with(tmp_path) as node:
        brokers, epoch = node.image.brokers, node.quorum.epoch
        for request in requests_of_nodes():
            assert await codes_of_answer(node, "mallory", request) == REFUSED, type(request).__module__
        assert (node.image.brokers, node.quorum.epoch) == (brokers, epoch)
        assert sum(node.metrics.node_requests_refused.values()) == len(NODE_ONLY) + 1


async def test_the_principal_of_this_node_is_that_of_a_node(tmp_path: Path) -> None:
    async with node_with(tmp_path) as node:
        assert REFUSED.isdisjoint(await codes_of_answer(node, "broker", follower_fetch()))
        assert node.metrics.node_requests_refused == {}


async def test_other_principals_are_named_in_a_setting(tmp_path: Path) -> None:
    named = {"penstock.node.principals": "User:mallory;User:other"}
    async with node_with(tmp_path, **named) as node:
        assert REFUSED.isdisjoint(await codes_of_answer(node, "mallory", follower_fetch()))
        assert await codes_of_answer(node, "broker", follower_fetch()) == REFUSED


async def test_with_an_authorizer_super_users_count_and_others_need_a_rule(tmp_path: Path) -> None:
    async with node_with(tmp_path, **BY_RULES) as node:
        assert REFUSED.isdisjoint(await codes_of_answer(node, "admin", follower_fetch()))
        errors = node.metrics.errors
        for key in NODE_ONLY:
            before = errors.get(ACCESS_REFUSED, 0)
            request = Requests(1)._entity(load_request_schema(key, APIS[key].max_version))
            # An answer without an entry, because the request names nothing, or none at all has no place for the error.
            assert await codes_of_answer(node, "mallory", request) <= REFUSED, type(request).__module__
            assert errors[ACCESS_REFUSED] == before + 1, type(request).__module__
        for epoch in (-1, 0):
            codes = await codes_of_answer(node, "mallory", follower_fetch(session_epoch=epoch))
            assert codes == {ErrorCode.none, ErrorCode.topic_authorization_failed}, (
                "none is that of the whole"
            )
        assert len(node.fetch_sessions) == 0
        assert set(node.image.brokers) == {node.node_id}


async def test_a_user_who_is_no_node_cannot_end_the_session_of_a_follower(tmp_path: Path) -> None:
    """Otherwise the real follower has to begin again each time, and falls out of sync."""
    async with node_with(tmp_path, **BY_RULES) as node:
        follower, mallory = await logged_in(node, "admin", "a"), await logged_in(node, "mallory", "m")
        first = await follower.ask(follower_fetch(session_epoch=0))
        assert first.session_id
        for many in (1, 400):  # many are read in slices
            answer = await mallory.ask(follower_fetch(many, session_epoch=0))
            assert set(error_codes(answer)) == {ErrorCode.none, ErrorCode.topic_authorization_failed}
            assert answer.session_id == 0
        stolen = replace(follower_fetch(session_epoch=1), session_id=first.session_id)
        assert (await mallory.ask(stolen)).error_code is ErrorCode.fetch_session_id_not_found
        assert (await follower.ask(stolen)).error_code is ErrorCode.none
        assert len(node.fetch_sessions) == 1
        await follower.close()
        await mallory.close()


async def test_a_node_that_a_rule_allows_may_fetch_many_partitions(tmp_path: Path) -> None:
    """A consumer's fetch of this size is read in slices, where only consumers are served."""
    fetch = follower_fetch(400)
    async with node_with(tmp_path, **BY_RULES) as node:
        refused = await codes_of_answer(node, "mallory", fetch)
        assert refused == {ErrorCode.none, ErrorCode.topic_authorization_failed}
        make_node_by_rule(node, "mallory")
        codes = await codes_of_answer(node, "mallory", fetch)
        assert codes == {ErrorCode.none, ErrorCode.unknown_topic_id}
    async with node_with(tmp_path / "without rules") as node:
        assert await codes_of_answer(node, "mallory", fetch) == REFUSED
        assert sum(node.metrics.node_requests_refused.values()) == 1


@pytest.mark.parametrize("rules", [{}, BY_RULES | {"super.users": "User:admin;User:broker"}])
async def test_a_token_of_a_node_or_a_super_user_makes_no_node(tmp_path: Path, rules: dict[str, str]) -> None:
    """Without an authorizer, everybody may make a token in the name of everybody."""
    tokens = {"sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256", "delegation.token.secret.key": "k"}
    async with node_with(tmp_path, **tokens | rules) as node:
        mallory = await logged_in(node, *(("broker", "b") if rules else ("mallory", "m")))
        token = await mallory.ask(creation("User:broker"))
        assert token.error_code is ErrorCode.none
        client = await WireClient.connect(node)
        await log_in_with(client, token)
        (connection,) = (each for each in node.server.connections if each.is_open and _is_by_token(each))
        assert connection.principal == Principal("User", "broker")
        answer = await client.ask(follower_fetch(session_epoch=0))
        assert answer.error_code is ErrorCode.cluster_authorization_failed
        assert not connection.is_node
        await client.close()
        await mallory.close()


async def test_a_token_of_a_user_whom_a_rule_makes_a_node_does_not(tmp_path: Path) -> None:
    tokens = {"sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256", "delegation.token.secret.key": "k"}
    async with node_with(tmp_path, **BY_RULES | tokens) as node:
        make_node_by_rule(node, "mallory")
        mallory = await logged_in(node, "mallory", "m")
        token = await mallory.ask(creation())
        client = await WireClient.connect(node)
        await log_in_with(client, token)
        answer = await client.ask(follower_fetch(session_epoch=0))
        assert answer.error_code is ErrorCode.cluster_authorization_failed
        await client.close()
        await mallory.close()


def _is_by_token(connection: Connection) -> bool:
    return connection.authentication is not None and connection.authentication.is_by_token


@pytest.mark.parametrize(
    "settings",
    [{"super.users": "User:admin"}, BY_RULES | {"allow.everyone.if.no.acl.found": "true"}],
    ids=["no authorizer", "no rule"],
)
async def test_who_is_no_node_cannot_set_the_password_of_one(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    """Whoever knows the password of a node is one. The passwords of others are open, as in Apache Kafka."""
    tokens = {"sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256"}
    async with node_with(tmp_path, **settings | tokens) as node:
        mallory = await logged_in(node, "mallory", "m")
        results = (await mallory.ask(altered(upsertion("alice"), upsertion("broker")))).results
        assert [(each.user, each.error_code) for each in results] == [
            ("alice", ErrorCode.none),
            ("broker", ErrorCode.cluster_authorization_failed),
        ]
        assert {user for user, _ in node.image.security.credentials} == {"alice"}
        for user, password in (("broker", "b"), ("admin", "a")):
            client = await logged_in(node, user, password)
            (result,) = (await client.ask(altered(upsertion("broker")))).results
            assert result.error_code is ErrorCode.none
            await client.close()
        (result,) = (await mallory.ask(altered(deletions=(("broker", 1),)))).results
        assert result.error_code is ErrorCode.cluster_authorization_failed
        await mallory.close()


@pytest.mark.parametrize(("settings", "warnings"), [({}, 1), (BY_RULES, 0)])
async def test_a_start_without_an_authorizer_warns_that_passwords_are_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], warnings: int
) -> None:
    async with node_with(tmp_path, **settings):
        found = [
            record for record in caplog.records if "set the password of every SCRAM user" in record.message
        ]
    assert len(found) == warnings


def make_node_by_rule(node: Node, user: str) -> None:
    assert node.authorizer is not None
    cluster = (ResourceType.CLUSTER, "kafka-cluster", PatternType.LITERAL, f"User:{user}", "*")
    rule = AclBinding(*cluster, Operation.CLUSTER_ACTION, Permission.ALLOW)
    node.authorizer.update({uuid4(): rule})


@pytest.mark.parametrize(
    "limit",
    [{"penstock.request.max.bytes": "65536"}, {"penstock.request.elements.max": "1000"}],
    ids=["bytes", "elements"],
)
async def test_the_limits_of_requests_do_not_apply_to_a_node_by_rule(
    tmp_path: Path, limit: dict[str, str]
) -> None:
    many = message(load_request_schema(DESCRIBE_CONFIGS, 4), ("resources",), 1_500)
    long = tuple(replace(each, resource_name=f"{each.resource_name:x<60}") for each in many.resources)
    many = replace(many, resources=long)
    async with node_with(tmp_path, **BY_RULES | limit) as node:
        client = await logged_in(node, "mallory", "m")
        with pytest.raises(asyncio.IncompleteReadError):
            await client.ask(many)
        await client.close()
        make_node_by_rule(node, "mallory")
        client = await logged_in(node, "mallory", "m")
        assert len((await client.ask(many)).results) == 1_500
        await client.close()


async def test_a_node_by_rule_is_not_throttled_until_the_rule_is_gone(tmp_path: Path) -> None:
    listeners = {"listeners": "SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0"}
    async with node_with(tmp_path, **BY_RULES | listeners) as node:
        quota = {"consumer_byte_rate": 1.0, "request_percentage": 0.001}
        node.quotas.configure({(("user", "mallory"),): quota})
        client = await logged_in(node, "mallory", "m")
        (connection,) = (each for each in node.server.connections if each.principal.name == "mallory")

        def is_throttled() -> set[bool]:
            return {
                node.quotas.throttle(CONSUMER_BYTE_RATE, connection, None, 10_000) > 0,
                node.quotas.throttle_request(connection, None, 10.0) > 0,
            }

        assert is_throttled() == {True}
        make_node_by_rule(node, "mallory")
        assert is_throttled() == {False}
        assert node.authorizer is not None
        node.authorizer.update({})
        assert is_throttled() == {True}
        await client.close()


@pytest.mark.parametrize("topic", [AUDIT, CONSUMER_OFFSETS])
async def test_a_client_cannot_forge_records_of_internal_topics(tmp_path: Path, topic: str) -> None:
    """Not even with a rule that lets it write every topic."""
    async with node_with(tmp_path, **BY_RULES) as node:
        await create_topic(node, topic)
        assert node.authorizer is not None
        everything = (ResourceType.TOPIC, "*", PatternType.LITERAL, "User:mallory", "*")
        node.authorizer.update({uuid4(): AclBinding(*everything, Operation.WRITE, Permission.ALLOW)})
        topic_id = node.image.topics[topic].id
        batch = encode_batch([Record(0, NOW_MS, b"User:admin", b"{}")])
        request = _produce_request(topic_id, 0, bytearray(batch))
        assert await codes_of_answer(node, "mallory", request) == {ErrorCode.invalid_topic_exception}
        partition = node.partitions.led(topic, 0)
        assert partition is not None
        assert partition.log.end_offset == 0


# -- principals without a node ---------------------------------------------------------------------------


def principals(folder: Path, **settings: str) -> NodePrincipals:
    authority = Authority(folder / "authority")
    given = {
        "log.dirs": str(folder),
        "listeners": "CLIENTS://127.0.0.1:0,NODES://127.0.0.1:0",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,NODES:SSL",
        "ssl.keystore.location": str(authority.issue("node-1")),
        "ssl.truststore.location": str(authority.certificate),
        "listener.name.nodes.ssl.client.auth": "required",
    }
    return NodePrincipals(load_settings(given | settings, {}), "NODES")


def users(known: NodePrincipals, *names: str) -> list[str]:
    return [name for name in names if known.includes(Principal("User", name))]


def test_the_certificate_of_this_node_names_its_principal(tmp_path: Path) -> None:
    known = principals(tmp_path)
    assert users(known, "CN=node-1,O=Acme", "CN=alice,O=Acme", "ANONYMOUS") == ["CN=node-1,O=Acme"]
    rules = {"listener.name.nodes.ssl.principal.mapping.rules": "RULE:^CN=node-[0-9]+,.*$/broker/,DEFAULT"}
    assert users(principals(tmp_path, **rules), "broker", "CN=node-1,O=Acme") == ["broker"]


def test_a_node_whose_certificate_names_nobody_makes_no_client_a_node(tmp_path: Path) -> None:
    rules = {
        "listener.name.nodes.ssl.principal.mapping.rules": "RULE:^.*$/ANONYMOUS/",
        "listener.name.nodes.ssl.client.auth": "requested",
    }
    assert users(principals(tmp_path, **rules), "ANONYMOUS", "CN=node-1,O=Acme") == []


def test_a_renewed_certificate_may_have_another_subject(tmp_path: Path) -> None:
    location = tmp_path / "node.pem"
    authority = Authority(tmp_path / "authority")
    location.write_bytes(authority.issue("old").read_bytes())
    known = principals(tmp_path, **{"ssl.keystore.location": str(location)})
    location.write_bytes(authority.issue("new").read_bytes())
    known.refresh()
    assert users(known, "CN=old,O=Acme", "CN=new,O=Acme") == ["CN=new,O=Acme"]


def test_a_certificate_may_be_text_in_one_line(tmp_path: Path) -> None:
    pem = Authority(tmp_path / "authority").issue("node-7").read_text().replace("\n", "\\n")
    key, chain = pem.split("-----BEGIN CERTIFICATE", 1)
    text = {
        "ssl.keystore.key": key,
        "ssl.keystore.certificate.chain": "-----BEGIN CERTIFICATE" + chain,
    }
    given = {
        "listeners": "CLIENTS://127.0.0.1:0,NODES://127.0.0.1:0",
        "listener.security.protocol.map": "CLIENTS:PLAINTEXT,NODES:SSL",
        "ssl.truststore.location": str(tmp_path / "authority" / "ca.pem"),
        "listener.name.nodes.ssl.client.auth": "required",
    }
    known = NodePrincipals(load_settings(given | text, {}), "NODES")
    assert users(known, "CN=node-7,O=Acme") == ["CN=node-7,O=Acme"]


def test_super_users_count_with_an_authorizer_only(tmp_path: Path) -> None:
    super_users = {"super.users": "User:admin"}
    assert users(principals(tmp_path, **super_users), "admin") == []
    assert users(principals(tmp_path, **BY_RULES), "admin") == ["admin"]
    named = {"penstock.node.principals": "User:CN=node-2,O=Acme; User:CN=node-1,O=Acme"}
    known = principals(tmp_path, **BY_RULES, **named)
    assert users(known, "admin", "CN=node-2,O=Acme") == ["CN=node-2,O=Acme"]
    assert not known.follows_rules


def test_a_listener_that_does_not_authenticate_cannot_tell_nodes_from_clients(tmp_path: Path) -> None:
    open_to_all = {"listener.name.nodes.ssl.client.auth": "none"}
    assert users(principals(tmp_path, **open_to_all), "ANONYMOUS") == ["ANONYMOUS"]


TOKENS = {
    "listeners": "CLIENTS://127.0.0.1:0,NODES://127.0.0.1:0",
    "listener.security.protocol.map": "CLIENTS:PLAINTEXT,NODES:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "OAUTHBEARER",
    "sasl.mechanism.inter.broker.protocol": "OAUTHBEARER",
    "sasl.oauthbearer.jwks.endpoint.url": "file:///keys.json",
    "sasl.oauthbearer.token.endpoint.url": "file:///token",
}


def test_nodes_with_tokens_need_the_names_of_their_principals() -> None:
    with pytest.raises(InvalidSetting, match=r"penstock\.node\.principals"):
        load_settings(TOKENS, {})
    load_settings(TOKENS | {"penstock.node.principals": "User:broker"}, {})
    load_settings(TOKENS | BY_RULES, {})
