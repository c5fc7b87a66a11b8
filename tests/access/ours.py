"""Plays the matrix at a node in this process. Clients log in; one that sends as a node is made to be one."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.access.matrix import (
    CLIENT,
    HIDDEN,
    MADE,
    TOPIC,
    Case,
    Token,
    Variant,
    World,
    begin_transaction,
    deletion_request,
    make_tokens,
    play,
    set_up,
)
from tests.compat.raw import Unreadable
from tests.unit.broker.network.test_sasl import SASL, authenticate, handshake, sasl_node
from tests.unit.broker.raw_client import create_topic, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.security.principal import Principal

TIMEOUT_S = 120.0
ADMIN = "User:admin"
PASSWORD = "open-sesame"
USERS = " ".join(f'user_{name}="{PASSWORD}"' for name in ("alice", "bob", "admin"))
NODES = 2
OPEN = {"allow.everyone.if.no.acl.found": "true"}
SETTINGS = {
    "listeners": ",".join(f"{name}://127.0.0.1:0" for name in ("PLAINTEXT", "SASL_PLAINTEXT", "NODES")),
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,NODES:PLAINTEXT",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        f"org.apache.kafka.common.security.plain.PlainLoginModule required {USERS};"
    ),
    "authorizer.class.name": "StandardAuthorizer",
    "super.users": ADMIN,
    "delegation.token.secret.key": "secret",
}


class Client:
    """A connection of the principal, opened again when the node has closed it."""

    def __init__(
        self, node: Node, *, is_node: bool = False, principal: str = CLIENT, host: str | None = None
    ) -> None:
        self._node, self._is_node, self._principal, self._host = node, is_node, principal, host
        self._wire: WireClient | None = None

    async def ask(self, request: Any) -> Any:
        if self._wire is None:
            self._wire = await (self._connect_as_node() if self._is_node else self._log_in())
        try:
            return await asyncio.wait_for(self._wire.ask(request), TIMEOUT_S)
        except Unreadable as error:
            return error
        except (asyncio.IncompleteReadError, ConnectionError):
            self._wire = None
            return None

    async def _log_in(self) -> WireClient:
        wire = await WireClient.connect(self._node, SASL, own_host=self._host)
        await handshake()(wire)
        name = self._principal.removeprefix("User:")
        answer = await authenticate(f"\0{name}\0{PASSWORD}".encode())(wire)
        assert answer.error_code is ErrorCode.none, answer
        return wire

    async def _connect_as_node(self) -> WireClient:
        before = set(self._node.server.connections)
        wire = await WireClient.connect(self._node, NODES, own_host=self._host)
        await until(lambda: self._node.server.connections.keys() - before)
        (connection,) = self._node.server.connections.keys() - before
        connection.principal = Principal.parse(self._principal)
        return wire


async def play_here(folder: Path, wanted: Iterable[Case], **settings: str) -> dict[str, Any]:
    async with sasl_node(folder, **SETTINGS | settings) as node:
        client, peer = Client(node), Client(node, is_node=True)
        admin = Client(node, principal=ADMIN)

        async def ask(variant: Variant, request: Any) -> Any:
            return await (peer if variant.is_between_nodes else client).ask(request)

        made = False
        tokens: dict[str, Token] = {}

        async def prepare(case: Case) -> World:
            nonlocal made, tokens
            if made:  # in the background
                await until(lambda: MADE in node.image.topics)
            made = case.makes_topic
            for name in (TOPIC, HIDDEN):
                if name not in node.image.topics:
                    await create_topic(node, name)
            if MADE in node.image.topics:
                await admin.ask(deletion_request())
            await set_up(admin.ask)
            if not tokens:
                await begin_transaction(admin.ask)
                tokens = await make_tokens(admin.ask)
            assert node.authorizer is not None
            world = World(node.image.topics[TOPIC].id, tokens)
            node.authorizer.update({uuid4(): world.named(acl) for acl in case.rules})
            return world

        return await play(ask, prepare, wanted)
