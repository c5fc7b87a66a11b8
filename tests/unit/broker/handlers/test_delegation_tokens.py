"""Delegation tokens on a running node: who may create, see and change them, and who logs in with them."""

import base64
import io
import logging
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from kio.index import load_request_schema
from kio.schema.create_delegation_token.v3 import request as create
from kio.schema.describe_delegation_token.v3 import request as describe
from kio.schema.expire_delegation_token.v2.request import ExpireDelegationTokenRequest
from kio.schema.renew_delegation_token.v2.request import RenewDelegationTokenRequest
from kio.serial import entity_writer
from tests.unit.broker.network.test_sasl import (
    PLAINTEXT,
    SASL,
    authenticate,
    handshake,
    sasl_node,
    topics_seen,
)
from tests.unit.broker.raw_client import until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.config.listeners import SecurityProtocol
from penstock.broker.network.requests import RequestContext
from penstock.broker.node import Node
from penstock.client.errors import AuthenticationFailed
from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.sasl_client import ScramExchange
from penstock.security.delegation_tokens import TokenHmacs
from penstock.security.principal import ANONYMOUS, Principal

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
USERS = {
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        f'{MODULE} required user_carol="pw" user_dave="pw" user_admin="pw";'
    ),
    "delegation.token.secret.key": "the key of all nodes",
}
WITH_RULES = USERS | {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:admin"}
MILLISECOND = timedelta(milliseconds=1)
CAROL, DAVE = "User:carol", "User:dave"


async def client_of(node: Node, user: str) -> WireClient:
    client = await WireClient.connect(node, SASL)
    await handshake()(client)
    response = await authenticate(f"\0{user}\0pw".encode())(client)
    assert response.error_code is ErrorCode.none
    return client


async def client_with(node: Node, token: Any) -> WireClient:
    """Log in with a token, step by step, so that the connection can be used for anything."""
    client = await WireClient.connect(node, SASL)
    await log_in_with(client, token)
    return client


async def log_in_with(client: WireClient, token: Any) -> Any:
    assert (await handshake("SCRAM-SHA-256")(client)).error_code is ErrorCode.none
    password = base64.b64encode(token.hmac).decode()
    exchange = ScramExchange("sha256", token.token_id, password, nonce="once", is_token=True)
    message: bytes | None = exchange.first()
    while message is not None:
        response = await authenticate(message)(client)
        assert response.error_code is ErrorCode.none, response
        message = exchange.next(response.auth_bytes)
    return response


def creation(owner: str | None = None, renewers: tuple[str, ...] = (), lifetime_ms: int = -1) -> Any:
    kind, _, name = (owner or "").partition(":")
    return create.CreateDelegationTokenRequest(
        owner_principal_type=kind if owner is not None else None,
        owner_principal_name=name if owner is not None else None,
        renewers=tuple(
            create.CreatableRenewers(principal_type=kind, principal_name=name)
            for kind, _, name in (each.partition(":") for each in renewers)
        ),
        max_lifetime=lifetime_ms * MILLISECOND,
    )


def description(*owners: str, is_null: bool = False) -> Any:
    pairs = (each.partition(":") for each in owners)
    found = tuple(
        describe.DescribeDelegationTokenOwner(principal_type=kind, principal_name=name)
        for kind, _, name in pairs
    )
    return describe.DescribeDelegationTokenRequest(owners=None if is_null else found)


def renewal(hmac: bytes, period_ms: int = -1) -> Any:
    return RenewDelegationTokenRequest(hmac=hmac, renew_period=period_ms * MILLISECOND)


def expiry(hmac: bytes, period_ms: int = -1) -> Any:
    return ExpireDelegationTokenRequest(hmac=hmac, expiry_time_period=period_ms * MILLISECOND)


REQUESTS: tuple[Any, ...] = (creation(), renewal(b"x"), expiry(b"x"), description(is_null=True))


async def ids_seen(client: WireClient, request: Any) -> set[str]:
    response = await client.ask(request)
    assert response.error_code is ErrorCode.none
    return {token.token_id for token in response.tokens}


async def test_a_login_with_a_token_acts_as_its_owner_also_after_a_restart(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        carol = await client_of(node, "carol")
        token = await carol.ask(creation(renewers=(DAVE,)))
        assert token.error_code is ErrorCode.none
        assert (token.principal_name, token.token_requester_principal_name) == ("carol", "carol")
        assert token.max_timestamp - token.issue_timestamp == timedelta(days=7)
        assert token.expiry_timestamp - token.issue_timestamp == timedelta(days=1)
        await carol.close()
    async with sasl_node(tmp_path, **USERS) as node:
        password = base64.b64encode(token.hmac).decode()
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            given = (mechanism, token.token_id, password)
            assert await topics_seen(node, *given, **{"penstock.sasl.tokenauth": "true"}) == 1
            with pytest.raises(AuthenticationFailed):
                await topics_seen(node, *given)  # the token is no user
        client = await client_with(node, token)
        (connection,) = (each for each in node.server.connections if each.authentication is not None)
        assert str(connection.principal) == CAROL
        await client.close()
        # With another key the tokens have other passwords.
    async with sasl_node(tmp_path, **USERS | {"delegation.token.secret.key": "another"}) as node:
        with pytest.raises(AuthenticationFailed):
            await topics_seen(node, *given, **{"penstock.sasl.tokenauth": "true"})


async def test_where_everybody_may_do_what_no_rule_is_about_others_tokens_still_need_one(
    tmp_path: Path,
) -> None:
    """Otherwise everybody makes, or reads, the token of a super user."""
    async with sasl_node(tmp_path, **WITH_RULES | {"allow.everyone.if.no.acl.found": "true"}) as node:
        carol, admin = await client_of(node, "carol"), await client_of(node, "admin")
        assert (await admin.ask(creation())).error_code is ErrorCode.none
        forged = await carol.ask(creation("User:admin"))
        assert forged.error_code is ErrorCode.delegation_token_authorization_failed
        assert await ids_seen(carol, description(is_null=True)) == set()
        assert (await carol.ask(creation())).error_code is ErrorCode.none, "her own needs no rule"
        await carol.close()
        await admin.close()


async def test_a_session_ends_with_its_token(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        carol = await client_of(node, "carol")
        token = await carol.ask(creation(lifetime_ms=600_000))
        client = await WireClient.connect(node, SASL)
        response = await log_in_with(client, token)
        assert timedelta(seconds=500) < response.session_lifetime <= timedelta(seconds=600)
        for each in (carol, client):
            await each.close()


async def test_who_may_not_ask(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        carol = await client_of(node, "carol")
        token = await carol.ask(creation())
        anonymous = await WireClient.connect(node, PLAINTEXT)
        by_token = await client_with(node, token)
        for client in (anonymous, by_token):
            for request in REQUESTS:
                response = await client.ask(request)
                assert response.error_code is ErrorCode.delegation_token_request_not_allowed
        assert node.image.security.tokens.keys() == {token.token_id}
        # Not even between the handshake and the end of another login on the same connection.
        (connection,) = (each for each in node.server.connections if each.principal == Principal.parse(CAROL)
                         and each.authentication is not None and each.authentication.is_by_token)  # fmt: skip
        assert connection.authentication is not None
        connection.authentication.handshake("SCRAM-SHA-256", node.services.now_ms() + 10_000)  # type: ignore[attr-defined]
        assert connection.authentication.is_by_token
        for each in (carol, anonymous, by_token):
            await each.close()


async def test_without_a_key_there_are_no_tokens(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS | {"delegation.token.secret.key": ""}) as node:
        carol = await client_of(node, "carol")
        for request in REQUESTS:
            assert (await carol.ask(request)).error_code is ErrorCode.delegation_token_auth_disabled
        await carol.close()


@pytest.mark.parametrize(
    ("protocol", "principal", "is_by_token", "is_forwarded_by_token", "may"),
    [
        (SecurityProtocol.PLAINTEXT, ANONYMOUS, False, None, False),
        (SecurityProtocol.SSL, ANONYMOUS, False, None, False),
        (SecurityProtocol.SSL, Principal("User", "CN=carol"), False, None, True),
        (SecurityProtocol.SASL_PLAINTEXT, Principal("User", "carol"), False, None, True),
        (SecurityProtocol.SASL_SSL, Principal("User", "carol"), True, None, False),
        # Forwarded over a plaintext listener of the nodes: the first node has looked at the client's listener.
        (SecurityProtocol.PLAINTEXT, Principal("User", "carol"), False, False, True),
        (SecurityProtocol.SASL_SSL, Principal("User", "carol"), False, True, False),
    ],
)
def test_the_channel_decides(
    protocol: SecurityProtocol,
    principal: Principal,
    is_by_token: bool,
    is_forwarded_by_token: bool | None,
    may: bool,
) -> None:
    services: Any = SimpleNamespace(settings=SimpleNamespace(protocol=lambda _: protocol))
    connection: Any = SimpleNamespace(
        authentication=SimpleNamespace(is_by_token=is_by_token) if protocol.uses_sasl else None
    )
    context = RequestContext(
        services, 38, 3, None, "127.0.0.1", "L", connection, principal, is_forwarded_by_token
    )
    assert context.may_ask_about_tokens is may


async def test_renewers_renew_and_expire_and_nobody_else(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS | {"delegation.token.expiry.time.ms": "60000"}) as node:
        carol, dave, admin = [await client_of(node, name) for name in ("carol", "dave", "admin")]
        token = await carol.ask(creation(renewers=(DAVE,)))
        for request in (renewal(token.hmac), expiry(token.hmac)):
            assert (await admin.ask(request)).error_code is ErrorCode.delegation_token_owner_mismatch
        for request in (renewal(b"unknown"), expiry(b""), renewal(b"x" * 10_000)):
            assert (await carol.ask(request)).error_code is ErrorCode.delegation_token_not_found
        renewed = await dave.ask(renewal(token.hmac, 30_000))
        assert renewed.error_code is ErrorCode.none
        stored = node.image.security.tokens[token.token_id]
        assert stored.expiration_timestamp == renewed.expiry_timestamp.timestamp() * 1000
        assert (await dave.ask(expiry(token.hmac))).error_code is ErrorCode.none
        assert not node.image.security.tokens
        with pytest.raises(AuthenticationFailed):
            await topics_seen(
                node,
                "SCRAM-SHA-256",
                token.token_id,
                base64.b64encode(token.hmac).decode(),
                **{"penstock.sasl.tokenauth": "true"},
            )
        for each in (carol, dave, admin):
            await each.close()


def rule(operation: Operation, kind: ResourceType, name: str, who: str) -> AclBinding:
    return AclBinding(kind, name, PatternType.LITERAL, who, "*", operation, Permission.ALLOW)


async def test_access_to_the_tokens_of_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    async with sasl_node(tmp_path, **WITH_RULES) as node:
        assert node.authorizer is not None
        carol, dave, admin = [await client_of(node, name) for name in ("carol", "dave", "admin")]
        refused = await dave.ask(creation(CAROL))
        assert refused.error_code is ErrorCode.delegation_token_authorization_failed
        assert (refused.principal_name, refused.token_requester_principal_name) == ("carol", "dave")
        token = await admin.ask(creation(CAROL))
        assert (token.principal_name, token.token_requester_principal_name) == ("carol", "admin")
        (stored,) = node.image.security.tokens.values()
        assert (stored.owner, stored.requester) == (CAROL, "User:admin")

        everything, of_carol = description(is_null=True), description(CAROL)
        both, nothing = {token.token_id}, set[str]()
        assert await ids_seen(carol, everything) == await ids_seen(carol, of_carol) == both
        assert await ids_seen(carol, description()) == await ids_seen(carol, description(DAVE)) == nothing
        assert await ids_seen(admin, everything) == both
        assert await ids_seen(dave, everything) == nothing
        # The requester of a token is neither its owner nor a renewer.
        node.authorizer.super_users = frozenset()
        # Decisions that connections share are dropped when the rules change.
        node.authorizer.update({uuid4(): rule(Operation.READ, ResourceType.TOPIC, "t", CAROL)})
        assert await ids_seen(admin, everything) == nothing

        acls: list[Callable[[], AclBinding]] = [
            lambda: rule(Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token.token_id, DAVE),
            lambda: rule(Operation.DESCRIBE_TOKENS, ResourceType.USER, CAROL, DAVE),
        ]
        for acl in acls:
            node.authorizer.update({uuid4(): acl()})
            assert await ids_seen(dave, everything) == both
        node.authorizer.update({uuid4(): rule(Operation.CREATE_TOKENS, ResourceType.USER, CAROL, DAVE)})
        assert await ids_seen(dave, everything) == nothing
        second = await dave.ask(creation(CAROL))
        assert second.error_code is ErrorCode.none
        assert (await carol.ask(expiry(second.hmac))).error_code is ErrorCode.none
        for each in (carol, dave, admin):
            await each.close()
    trail = "\n".join(caplog.messages)
    assert "CREATE_TOKENS" in trail
    assert f"token {second.token_id} of {CAROL}" in trail
    assert '"expire_delegation_token"' in trail
    for secret in (token.hmac, second.hmac):
        assert secret.hex() not in trail
        assert base64.b64encode(secret).decode() not in trail


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (creation(renewers=("Group:x",)), ErrorCode.invalid_principal_type),
        (creation(renewers=tuple(f"User:{n}" for n in range(101))), ErrorCode.invalid_request),
        (creation("User:" + "x" * 2_000), ErrorCode.invalid_request),
    ],
)
async def test_tokens_that_are_not_created(request_: Any, error: ErrorCode, tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        client = await client_of(node, "carol")
        assert (await client.ask(request_)).error_code is error
        assert not node.image.security.tokens
        await client.close()


async def test_the_bound_of_all_tokens(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS | {"penstock.delegation.tokens.max": "2"}) as node:
        client = await client_of(node, "carol")
        errors = [(await client.ask(creation())).error_code for _ in range(3)]
        assert errors == [ErrorCode.none, ErrorCode.none, ErrorCode.policy_violation]
        await client.close()


async def test_one_owner_cannot_take_the_tokens_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    limits = {"penstock.delegation.tokens.max": "5", "penstock.delegation.tokens.per.owner.max": "2"}
    async with sasl_node(tmp_path, **WITH_RULES | limits) as node:
        carol, dave, admin = [await client_of(node, user) for user in ("carol", "dave", "admin")]

        async def error_of(client: WireClient, request: Any) -> ErrorCode:
            response = await client.ask(request)
            return ErrorCode(response.error_code)

        assert [await error_of(carol, creation()) for _ in range(3)] == [
            ErrorCode.none,
            ErrorCode.none,
            ErrorCode.policy_violation,
        ]
        assert '"resources": ["token of User:carol"], "errors": ["policy_violation"]' in caplog.text
        # A token belongs to its owner, no matter who asked for it.
        assert await error_of(admin, creation(CAROL)) is ErrorCode.policy_violation
        created = await dave.ask(creation())
        assert created.error_code is ErrorCode.none
        assert await error_of(admin, creation(DAVE)) is ErrorCode.none
        assert await error_of(dave, creation()) is ErrorCode.policy_violation
        # What expires makes room for its owner.
        assert await error_of(dave, expiry(created.hmac)) is ErrorCode.none
        assert await error_of(dave, creation()) is ErrorCode.none
        for client in (carol, dave, admin):
            await client.close()


LONG_MAX, LONG_MIN = 2**63 - 1, -(2**63)
DAY_MS = 24 * 3600 * 1000


def raw_body(request: Any, version: int, number_ms: int) -> bytes:
    """The request with its duration, the last field, replaced: kio cannot write all that the wire can carry."""
    schema = load_request_schema(request.__api_key__, version)
    body = io.BytesIO()
    entity_writer(schema)(body, request)
    tags = b"\x00" if schema.__flexible__ else b""
    return body.getvalue()[: -8 - len(tags)] + struct.pack(">q", number_ms) + tags


@pytest.mark.parametrize(
    ("lifetime_ms", "expected_ms"),
    [(LONG_MAX, 7 * DAY_MS), (LONG_MIN, 7 * DAY_MS), (-1, 7 * DAY_MS), (2**62, 7 * DAY_MS), (9_000, 9_000)],
)
async def test_lifetimes_that_no_duration_holds(lifetime_ms: int, expected_ms: int, tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        client = await client_of(node, "carol")
        for version in (1, 2, 3):
            created = await client.ask_raw(38, version, raw_body(creation(), version, lifetime_ms))
            assert created.error_code is ErrorCode.none
            assert created.max_timestamp - created.issue_timestamp == expected_ms * MILLISECOND
        await client.close()


@pytest.mark.parametrize("period_ms", [LONG_MAX, LONG_MIN, -1])
async def test_periods_that_no_duration_holds(period_ms: int, tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        client = await client_of(node, "carol")
        for version in (1, 2):
            token = await client.ask(creation())
            renewed = await client.ask_raw(39, version, raw_body(renewal(token.hmac), version, period_ms))
            assert renewed.error_code is ErrorCode.none
            assert renewed.expiry_timestamp - token.issue_timestamp >= DAY_MS * MILLISECOND
            assert renewed.expiry_timestamp < token.max_timestamp
            ended = await client.ask_raw(40, version, raw_body(expiry(token.hmac), version, period_ms))
            assert ended.error_code is ErrorCode.none
            if period_ms < 0:
                assert token.token_id not in node.image.security.tokens
            else:
                assert ended.expiry_timestamp == token.max_timestamp
        await client.close()


async def test_the_controller_removes_what_has_expired(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS | {"delegation.token.expiry.check.interval.ms": "1"}) as node:
        client = await client_of(node, "carol")
        kept = await client.ask(creation())
        await client.ask(creation(lifetime_ms=1))
        await until(lambda: node.image.security.tokens.keys() == {kept.token_id})
        await client.close()


async def test_older_versions_have_no_owner(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **USERS) as node:
        client = await client_of(node, "carol")
        for version in (1, 2):
            assert (await client.ask(creation(), version=version)).principal_name == "carol"
            response = await client.ask(description(CAROL), version=version)
            assert len(response.tokens) == version
        for version in (1, 2):
            hmac = response.tokens[version - 1].hmac
            assert (await client.ask(renewal(hmac), version=version)).error_code is ErrorCode.none
            assert (await client.ask(expiry(hmac), version=version)).error_code is ErrorCode.none
        assert not node.image.security.tokens
        await client.close()


def test_hmacs_find_the_tokens_that_exist() -> None:
    hmacs = TokenHmacs("key")
    tokens = dict.fromkeys(("a", "b"))
    assert [hmacs.find(tokens.keys(), hmacs.of(each)) for each in "abc"] == ["a", "b", None]
    del tokens["a"]
    tokens["c"] = None
    assert [hmacs.find(tokens.keys(), hmacs.of(each)) for each in "abc"] == [None, "b", "c"]
    assert "key" not in repr(hmacs)
    assert not TokenHmacs("").is_enabled
    assert not TokenHmacs(None).is_enabled
