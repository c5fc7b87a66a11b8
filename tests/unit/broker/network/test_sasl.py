"""SASL on a running node: the client of this project logs in, and clients that do it wrong are refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from kio.schema.alter_user_scram_credentials.v0 import request as alter
from kio.schema.describe_configs.v4 import request as describe
from kio.schema.incremental_alter_configs.v1 import request as incremental
from kio.schema.list_config_resources.v1.request import ListConfigResourcesRequest
from kio.schema.metadata.v13.request import MetadataRequest
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from tests.outcomes import error_name
from tests.unit.broker.raw_client import until
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually

from penstock.broker.config.node_settings import load_settings
from penstock.broker.controller.bootstrap_user import BootstrapUser
from penstock.broker.environment import StartFailed
from penstock.broker.node import Node
from penstock.client.errors import AuthenticationFailed
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import ConnectionSettings
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.scram_secret import missing_scram_secret, stored_scram_secret
from penstock.protocol.errors import ErrorCode
from penstock.protocol.scram import parse_attributes, salted_password
from penstock.security import plain

SASL_LISTENERS = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_carol="pw";'
    ),
    "connection.failed.authentication.delay.ms": "1",
}
PLAINTEXT, SASL = 0, 1
SASL_HANDSHAKE = 17


@contextlib.asynccontextmanager
async def sasl_node(tmp_path: Path, **settings: str) -> AsyncIterator[Node]:
    given = {"log.dirs": str(tmp_path / "data")} | SASL_LISTENERS | settings
    node = Node(load_settings(given, {}))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def add_user(node: Node, name: str, password: str) -> None:
    client = await WireClient.connect(node, PLAINTEXT)
    upsertions = tuple(
        alter.ScramCredentialUpsertion(
            name=name,
            mechanism=number,
            iterations=4096,
            salt=b"salt",
            salted_password=salted_password(digest, password, b"salt", 4096),
        )
        for number, digest in ((1, "sha256"), (2, "sha512"))
    )
    for upsertion in upsertions:
        request = alter.AlterUserScramCredentialsRequest(deletions=(), upsertions=(upsertion,))
        response = await client.ask(request)
        assert response.results[0].error_code is ErrorCode.none
    await client.close()


def settings_of(
    node: Node, mechanism: str, username: str, password: str, **others: str
) -> ConnectionSettings:
    listener = node.listeners[SASL]
    return ConnectionSettings.parse(
        {
            "bootstrap.servers": f"{listener.host}:{listener.port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": username,
            "sasl.password": password,
            **others,
        }
    )


async def topics_seen(node: Node, *given: str, **others: str) -> int:
    """Log in and ask for metadata, which needs a login."""

    request = MetadataRequest(
        topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )

    def ask() -> int:
        settings = settings_of(node, *given, **others)
        with Connection(settings.bootstrap[0], settings) as connection:
            return len(connection.call(request).brokers)

    return await asyncio.to_thread(ask)


async def test_every_mechanism(tmp_path: Path) -> None:
    async with sasl_node(tmp_path) as node:
        await add_user(node, "a=l,i", "s,e=c")
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            assert await topics_seen(node, mechanism, "a=l,i", "s,e=c") == 1
        assert await topics_seen(node, "PLAIN", "carol", "pw") == 1
        refused = [
            ("SCRAM-SHA-256", "a=l,i", "wrong"),
            ("SCRAM-SHA-512", "nobody", "x"),
            ("PLAIN", "carol", "wrong"),
            ("PLAIN", "a=l,i", "s,e=c"),
        ]
        for given in refused:
            with pytest.raises(AuthenticationFailed, match="invalid credentials with SASL mechanism"):
                await topics_seen(node, *given)


async def test_plain_with_scram_credentials(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **{"penstock.sasl.plain.scram.credentials": "true"}) as node:
        await add_user(node, "alice", "pw")
        assert await topics_seen(node, "PLAIN", "alice", "pw") == 1
        with pytest.raises(AuthenticationFailed):
            await topics_seen(node, "PLAIN", "alice", "no")


async def salt_shown(node: Node, name: str) -> str:
    client = await WireClient.connect(node, SASL)
    await client.ask(SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))
    answer = await client.ask(SaslAuthenticateRequest(auth_bytes=f"n,,n={name},r=x".encode()))
    await client.close()
    return (parse_attributes(answer.auth_bytes) or {})["s"]


async def test_the_salt_of_a_user_who_does_not_exist_outlives_a_restart(tmp_path: Path) -> None:
    """A salt that changes, or that differs between nodes, belongs to nobody."""
    async with sasl_node(tmp_path) as node:
        await add_user(node, "alice", "pw")
        salts = [await salt_shown(node, name) for name in ("alice", "nobody")]
        await add_user(node, "bob", "pw")
        assert [await salt_shown(node, name) for name in ("alice", "nobody")] == salts
    async with sasl_node(tmp_path) as node:
        assert [await salt_shown(node, name) for name in ("alice", "nobody")] == salts


async def test_the_controller_makes_the_secret_of_a_cluster_with_users_from_an_older_version(
    tmp_path: Path,
) -> None:
    async with sasl_node(tmp_path) as node:
        await add_user(node, "alice", "pw")
        (made,) = missing_scram_secret(ClusterImage(), b"x")
        await node.controller.propose(lambda image: Decision((replace(made, value=None),), None))
        assert stored_scram_secret(node.image) is None
    async with sasl_node(tmp_path) as node:
        await until(lambda: stored_scram_secret(node.image) is not None)
        salt = await salt_shown(node, "nobody")
    async with sasl_node(tmp_path) as node:
        assert await salt_shown(node, "nobody") == salt


async def test_no_request_reads_or_changes_the_secret(tmp_path: Path) -> None:
    async with sasl_node(tmp_path) as node:
        await add_user(node, "alice", "pw")
        secret = stored_scram_secret(node.image)
        assert secret is not None
        (made,) = missing_scram_secret(ClusterImage(), b"x")
        client = await WireClient.connect(node, PLAINTEXT)
        kind, name = made.resource_type, made.resource_name
        asked = describe.DescribeConfigsResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        (described,) = (await client.ask(describe.DescribeConfigsRequest(resources=(asked,)))).results
        assert (described.error_code, described.configs) == (ErrorCode.invalid_request, ())
        listed = await client.ask(ListConfigResourcesRequest(resource_types=(kind,)))
        assert listed.config_resources == ()
        value = incremental.AlterableConfig(name=made.name, config_operation=0, value="00")
        changed = incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=(value,))
        request = incremental.IncrementalAlterConfigsRequest(resources=(changed,), validate_only=False)
        (refused,) = (await client.ask(request)).responses
        assert refused.error_code is ErrorCode.invalid_request
        assert stored_scram_secret(node.image) == secret
        await client.close()


async def test_librdkafka_takes_a_lost_connection_for_a_refusal(tmp_path: Path) -> None:
    """Campaigns count refusals, and must tell the two apart."""

    def first_error(node: Node, password: str) -> str:
        names: list[str] = []
        properties = {
            "bootstrap.servers": f"127.0.0.1:{node.listeners[SASL].port}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "carol",
            "sasl.password": password,
        }

        def note(error: KafkaError) -> None:
            if error.code() != KafkaError._ALL_BROKERS_DOWN:
                names.append(error_name(error))

        producer = Producer(properties | {"error_cb": note})
        eventually(lambda: (producer.poll(0.01), names)[1], within_s=30, what="an error")
        return names[0]

    async with sasl_node(tmp_path) as node:
        assert await asyncio.to_thread(first_error, node, "wrong") == "_AUTHENTICATION"

        def lose(context: Any, connection: Any, *_: Any) -> bool:
            if context.api_key == SASL_HANDSHAKE:
                connection.close()
                return True
            return False

        node.dispatcher.faults = lose
        lost = await asyncio.to_thread(first_error, node, "pw")
        assert lost == "connection lost during SaslHandshake"


Step = Callable[[WireClient], Awaitable[Any]]


def handshake(mechanism: str = "PLAIN", version: int = 1) -> Step:
    return lambda client: client.ask(SaslHandshakeRequest(mechanism=mechanism), version=version)


def authenticate(message: bytes = b"\0carol\0pw") -> Step:
    return lambda client: client.ask(SaslAuthenticateRequest(auth_bytes=message))


async def is_closed(client: WireClient) -> bool:
    try:
        await client.ask(SaslHandshakeRequest(mechanism="PLAIN"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return True
    return False


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ((authenticate(),), "illegal_sasl_state"),
        ((handshake("GSSAPI"),), "unsupported_sasl_mechanism"),
        ((handshake(""),), "unsupported_sasl_mechanism"),
        ((handshake(), handshake()), "illegal_sasl_state"),
        ((handshake(version=0),), "unsupported_version"),
        ((handshake(), authenticate(b"")), "sasl_authentication_failed"),
        ((handshake(), authenticate(b"\0carol\0no")), "sasl_authentication_failed"),
        ((handshake("SCRAM-SHA-256"), authenticate(b"x" * 100_000)), "sasl_authentication_failed"),
    ],
)
async def test_whoever_does_it_wrong_is_answered_and_cut_off(
    steps: tuple[Step, ...], error: str, tmp_path: Path
) -> None:
    async with sasl_node(tmp_path) as node:
        client = await WireClient.connect(node, SASL)
        for step in steps:
            response = await step(client)
        assert response.error_code is ErrorCode[error]
        assert await is_closed(client)
        await client.close()


async def test_a_login_again_on_the_same_connection(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **{"connections.max.reauth.ms": "60000"}) as node:
        client = await WireClient.connect(node, SASL)
        assert (await handshake()(client)).error_code is ErrorCode.none
        assert (await authenticate()(client)).session_lifetime.total_seconds() == 60
        assert (await handshake()(client)).error_code is ErrorCode.none
        assert (await authenticate()(client)).session_lifetime.total_seconds() == 60
        now_ms = node.services.now_ms()
        node.services.now_ms = lambda: now_ms  # the next one would be within a second
        assert (await handshake()(client)).error_code is ErrorCode.illegal_sasl_state
        assert (await authenticate()(client)).error_code is ErrorCode.illegal_sasl_state
        (connection,) = (each for each in node.server.connections if each.authentication is not None)
        assert str(connection.principal) == "User:carol"
        await client.close()


async def test_without_sasl_there_is_nothing_to_do(tmp_path: Path) -> None:
    async with sasl_node(tmp_path) as node:
        client = await WireClient.connect(node, PLAINTEXT)
        for step in (handshake(), authenticate()):
            assert (await step(client)).error_code is ErrorCode.illegal_sasl_state
        await client.close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sasl.enabled.mechanisms": "GSSAPI"}, "GSSAPI"),
        ({"listener.name.sasl_plaintext.plain.sasl.jaas.config": "x"}, "LoginModule"),
        ({"listener.name.sasl_plaintext.plain.sasl.jaas.config": "x.PlainLoginModule required;"}, "no user"),
    ],
)
async def test_settings_with_which_nobody_could_log_in(
    settings: dict[str, str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(StartFailed, match=named):
        async with sasl_node(tmp_path, **settings):
            pass


async def test_the_first_user_of_a_cluster(tmp_path: Path) -> None:
    async def started(user: BootstrapUser, ask: Callable[[Node], Awaitable[object]]) -> None:
        node = Node(load_settings({"log.dirs": str(tmp_path / "data")} | SASL_LISTENERS, {}))
        node.bootstrap_user = user
        await node.start()
        try:
            await ask(node)
        finally:
            await node.stop()

    async def log_in(node: Node) -> None:
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            assert await topics_seen(node, mechanism, "admin", "first") == 1

    await started(BootstrapUser("admin", "first"), log_in)
    # The cluster has users: neither another one, nor another password.
    await started(BootstrapUser("admin", "second"), log_in)
    assert "second" not in repr(BootstrapUser("admin", "second"))


async def test_a_first_user_that_cannot_be(tmp_path: Path) -> None:
    node = Node(load_settings({"log.dirs": str(tmp_path / "data")} | SASL_LISTENERS, {}))
    node.bootstrap_user = BootstrapUser("", "x")
    with pytest.raises(StartFailed, match="Username must not be empty"):
        await node.start()


async def test_logins_that_take_long_compute_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that nobody knows must not occupy all threads, and with them the cores and the disks of a node."""
    computing, most = 0, 0
    matches = plain.password_matches

    def counted(*args: Any) -> bool:
        nonlocal computing, most
        computing += 1
        most = max(most, computing)
        try:
            return matches(*args)
        finally:
            computing -= 1

    monkeypatch.setattr(plain, "password_matches", counted)
    async with sasl_node(tmp_path, **{"penstock.sasl.plain.scram.credentials": "true"}) as node:
        await add_user(node, "alice", "pw")  # as long as there is no user, nothing is computed

        async def log_in() -> ErrorCode:
            client = await WireClient.connect(node, SASL)
            await handshake()(client)
            response = await authenticate(b"\0nobody\0pw")(client)
            await client.close()
            return response.error_code

        assert set(await asyncio.gather(*(log_in() for _ in range(20)))) == {
            ErrorCode.sasl_authentication_failed
        }
        assert most == 1
        assert await topics_seen(node, "PLAIN", "carol", "pw") == 1


@pytest.mark.parametrize(
    "limit",
    [
        "penstock.unauthenticated.connections.max",
        "max.connections",
        "listener.name.sasl_plaintext.max.connections",
    ],
)
async def test_failed_logins_that_hold_all_places_keep_nobody_out(tmp_path: Path, limit: str) -> None:
    held = {
        limit: "5",
        # None of them gets its refusal, and so its end, before the test is over.
        "listener.name.sasl_plaintext.connection.failed.authentication.delay.ms": "3600000",
    }
    async with sasl_node(tmp_path, **held) as node:
        attackers = [await WireClient.connect(node, SASL) for _ in range(5)]
        failed = []
        for attacker in attackers:
            await attacker.ask(SaslHandshakeRequest(mechanism="PLAIN"))
            request = SaslAuthenticateRequest(auth_bytes=b"\0carol\0wrong")
            failed.append(asyncio.ensure_future(attacker.ask(request)))
        await until(lambda: node.metrics.authentication_failures[("SASL_PLAINTEXT", "sasl")] == 5)
        assert node.server.unauthenticated_counts() == {"SASL_PLAINTEXT": 5}
        assert await topics_seen(node, "PLAIN", "carol", "pw") == 1
        # The first to fail has made room.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await failed[0]
        assert [each.done() for each in failed] == [True, False, False, False, False]
        for attempt in failed:
            attempt.cancel()
        for attacker in attackers:
            await attacker.close()
