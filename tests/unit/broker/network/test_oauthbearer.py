"""OAUTHBEARER on a running node: keys that are read and rotated, logins that wait for them, sessions, refusals."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.metadata.v13.request import MetadataRequest
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from tests import tokens
from tests.tokens import AUDIENCE, ISSUER, Issuer, key_set, new_key
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.config.node_settings import InvalidSetting, load_settings
from penstock.broker.environment import StartFailed
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.sasl_client import OauthBearerExchange

URL = "sasl.oauthbearer.jwks.endpoint.url"
LISTENER = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "OAUTHBEARER",
    "sasl.oauthbearer.expected.audience": AUDIENCE,
    "sasl.oauthbearer.expected.issuer": ISSUER,
    "connection.failed.authentication.delay.ms": "1",
}
METADATA = MetadataRequest(
    topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False
)


@contextlib.asynccontextmanager
async def node_with(tmp_path: Path, **settings: str) -> AsyncIterator[Node]:
    node = Node(load_settings({"log.dirs": str(tmp_path / "data")} | LISTENER | settings, {}))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with tokens.serve(Issuer()) as serving:
        yield serving


async def log_in(node: Node, token: str) -> tuple[WireClient, Any]:
    client = await WireClient.connect(node)
    await client.ask(SaslHandshakeRequest(mechanism="OAUTHBEARER"))
    message = OauthBearerExchange(token).first()
    return client, await client.ask(SaslAuthenticateRequest(auth_bytes=message))


async def is_let_in(node: Node, token: str) -> bool:
    client, response = await log_in(node, token)
    assert response.error_code is ErrorCode.none
    if response.auth_bytes:
        assert response.auth_bytes == b'{"status":"invalid_token"}'
        response = await client.ask(SaslAuthenticateRequest(auth_bytes=b"\x01"))
        assert response.error_code is ErrorCode.sasl_authentication_failed
        assert token not in str(response)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.ask(METADATA)
        return False
    assert len((await client.ask(METADATA)).brokers) == 1
    await client.close()
    return True


async def is_refused(node: Node, token: str) -> bool:
    return not await is_let_in(node, token)


async def test_keys_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, key = tmp_path / "keys.json", new_key()
    path.write_bytes(key_set(one=key))
    async with node_with(tmp_path, **{URL: path.as_uri()}) as node:
        good = tokens.token(key)
        client, response = await log_in(node, good)
        assert response.error_code is ErrorCode.none
        assert 290_000 < response.session_lifetime.total_seconds() * 1000 <= 300_000
        assert "User:alice" in {str(each.principal) for each in node.server.connections}
        await client.close()
        refused = tokens.token(key, aud="payments")
        assert not await is_let_in(node, refused)
        assert not await is_let_in(node, tokens.token(new_key()))
        logged = str([vars(record) for record in caplog.records])
        assert "its audience 'payments' is not in sasl.oauthbearer.expected.audience" in logged
        for token in (good, refused):
            assert token.rpartition(".")[2] not in logged


async def test_a_rotated_key_is_read_for_the_first_token_that_it_signs(
    tmp_path: Path, issuer: Issuer
) -> None:
    settings = {URL: f"{issuer.url}/keys", "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": "1"}
    async with node_with(tmp_path, **settings) as node:
        assert await is_let_in(node, issuer.token())
        old = issuer.token()
        issuer.keys = {"two": new_key()}
        new = issuer.token()
        requests = issuer.key_requests
        assert await is_let_in(node, old)  # the key set is read only when a key is unknown
        assert issuer.key_requests == requests
        assert await is_let_in(node, new)
        assert issuer.key_requests == requests + 1
        issuer.status = 500  # an issuer that is down locks out no tokens whose key is known
        assert not await is_let_in(node, tokens.token(new_key(), kid="three"))
        assert await is_let_in(node, new)


async def test_unknown_keys_cause_one_reading(tmp_path: Path, issuer: Issuer) -> None:
    async with node_with(tmp_path, **{URL: f"{issuer.url}/keys"}) as node:
        assert await is_let_in(node, issuer.token())
        for number in range(20):
            assert not await is_let_in(node, tokens.token(new_key(), kid=f"unknown-{number}"))
        assert issuer.key_requests == 1


async def test_keys_are_read_regularly_and_withdrawn_ones_forgotten(tmp_path: Path, issuer: Issuer) -> None:
    settings = {URL: f"{issuer.url}/keys", "sasl.oauthbearer.jwks.endpoint.refresh.ms": "1000"}
    async with node_with(tmp_path, **settings) as node:
        old = issuer.token()
        assert await is_let_in(node, old)
        issuer.keys = {"two": new_key()}
        await eventually_async(lambda: is_refused(node, old))
        assert await is_let_in(node, issuer.token())


async def test_an_issuer_that_is_down_at_the_start(tmp_path: Path, issuer: Issuer) -> None:
    issuer.status = 503
    async with node_with(tmp_path, **{URL: f"{issuer.url}/keys"}) as node:
        assert not await is_let_in(node, issuer.token())
        issuer.status = 200
        await eventually_async(lambda: is_let_in(node, issuer.token()))


async def test_redirections_are_refused(tmp_path: Path, issuer: Issuer) -> None:
    async with node_with(tmp_path, **{URL: f"{issuer.url}/moved"}) as node:
        assert not await is_let_in(node, issuer.token())
        assert issuer.key_requests == 0


async def test_a_session_is_over_with_its_token(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.json", new_key()
    path.write_bytes(key_set(one=key))
    settings = {URL: path.as_uri(), "connections.max.reauth.ms": "1500"}
    async with node_with(tmp_path, **settings) as node:
        client, response = await log_in(node, tokens.token(key))
        assert response.session_lifetime.total_seconds() == 1.5
        await client.ask(SaslHandshakeRequest(mechanism="OAUTHBEARER"))
        message = OauthBearerExchange(tokens.token(key, sub="bob")).first()
        response = await client.ask(SaslAuthenticateRequest(auth_bytes=message))
        assert response.error_code is ErrorCode.sasl_authentication_failed
        assert "Cannot change principals" in response.error_message


@pytest.mark.parametrize("content", [None, b"", b'{"keys": []}', b'{"keys": [{"kty": "oct", "k": "eA"}]}'])
async def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartFailed, match=URL):
        async with node_with(tmp_path, **{URL: path.as_uri()}):
            pass


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({}, f"OAUTHBEARER needs the keys with which tokens are signed: {URL}"),
        ({URL: "keys.json"}, "must begin with https://, http:// or file://"),
        ({URL: "ftp://host/keys"}, "must begin with"),
        ({URL: "file:keys.json"}, "must be file:///PATH"),
        ({URL: "https://"}, "has no host"),
        ({URL: "https://user:secret@host/keys"}, "must not contain a user name"),
        ({URL: "https://host:x/keys"}, "is no URL"),
        ({"listener.name.sasl_plaintext.plain." + URL: "https://host/keys"}, "Unknown setting"),
        ({URL: "file:///keys", "sasl.oauthbearer.clock.skew.seconds": "-1"}, "clock.skew"),
    ],
)
def test_settings_that_are_refused(others: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        load_settings(LISTENER | others, {})


def test_a_key_set_of_one_listener() -> None:
    name = "listener.name.sasl_plaintext.oauthbearer." + URL
    settings = load_settings(LISTENER | {name: "file:///keys"}, {})
    assert settings.listener_value("SASL_PLAINTEXT", URL, "OAUTHBEARER") == "file:///keys"
