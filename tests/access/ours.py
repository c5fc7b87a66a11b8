"""Plays the matrix at a node in this process, whose client is made to be the principal of the rules."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from kio.serial.errors import OutOfBoundValue
from tests.access.matrix import (
    CLIENT,
    HIDDEN,
    MADE,
    TOPIC,
    Ask,
    Case,
    commit_request,
    coordinator_request,
    deletion_request,
    play,
)
from tests.unit.broker.raw_client import create_topic, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.network.apis import APIS
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.security.principal import Principal

TIMEOUT_S = 120.0
ADMIN = "User:admin"
SETTINGS = {"authorizer_class_name": "StandardAuthorizer", "super_users": ADMIN}


class Client:
    """A connection of the principal, opened again when the node has closed it."""

    def __init__(self, node: Node, *, is_node: bool = False, principal: str = CLIENT) -> None:
        self._node, self._is_node, self._principal = node, is_node, principal
        self._wire: WireClient | None = None

    async def ask(self, request: Any) -> Any:
        if self._wire is None:
            before = set(self._node.server.connections)
            self._wire = await WireClient.connect(self._node)
            await until(lambda: self._node.server.connections.keys() - before)
            (connection,) = self._node.server.connections.keys() - before
            connection.principal = Principal.parse(self._principal)
            connection.is_inter_broker = self._is_node
        try:
            return await asyncio.wait_for(self._wire.ask(request), TIMEOUT_S)
        except OutOfBoundValue as error:
            return error
        except (asyncio.IncompleteReadError, ConnectionError):
            self._wire = None
            return None


async def set_up(admin: Ask) -> None:
    """See to it that there are coordinators, and a group with a committed offset."""
    while True:
        answer = await admin(commit_request())
        if answer.topics[0].partitions[0].error_code is ErrorCode.none:
            return
        for key_type in (0, 1):
            await admin(coordinator_request(key_type))
        await asyncio.sleep(0.05)


async def play_here(folder: Path, wanted: Iterable[Case] | None = None) -> dict[str, Any]:
    async with running(folder, **SETTINGS) as node:
        client, peer = Client(node), Client(node, is_node=True)
        admin = Client(node, principal=ADMIN)

        async def ask(request: Any) -> Any:
            is_of_nodes = request.__version__ >= APIS[request.__api_key__].inter_broker_from
            return await (peer if is_of_nodes else client).ask(request)

        made = False

        async def prepare(case: Case) -> UUID:
            nonlocal made
            if made:  # in the background
                await until(lambda: MADE in node.image.topics)
            made = case.variant.name == "missing" and (case.name == "allowed" or case.name.endswith("prefix"))
            for name in (TOPIC, HIDDEN):
                if name not in node.image.topics:
                    await create_topic(node, name)
            if MADE in node.image.topics:
                await admin.ask(deletion_request())
            await set_up(admin.ask)
            assert node.authorizer is not None
            node.authorizer.update({uuid4(): acl for acl in case.rules})
            return node.image.topics[TOPIC].id

        return await play(ask, prepare, wanted)
