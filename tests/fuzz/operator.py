"""An operator who takes back what the attacker has set, from an address that no limit of the attacker names."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.fuzz.hostile import GROUPS, TOPICS
from tests.fuzz.settings import LIMITING, SUBSCRIPTIONS
from tests.unit.broker.config.config_requests import alter, describe
from tests.unit.broker.wire_client import WireClient

from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.errors import ErrorCode

HOST = "127.0.0.2"
MIN_ISR = "min.insync.replicas"
PAUSE_S = 0.1
_OWN_SOURCES = frozenset(
    {ConfigSource.TOPIC, ConfigSource.DYNAMIC_BROKER, ConfigSource.GROUP, ConfigSource.CLIENT_METRICS}
)
Resource = tuple[int, str]


class Operator:
    """Keeps one connection to each node, as limits count only for connections that come later."""

    def __init__(self, addresses: Mapping[int, tuple[str, int]], *, min_isr: str, patience_s: float) -> None:
        self._addresses = addresses
        self._min_isr = min_isr
        self._patience_s = patience_s
        self._clients: dict[int, WireClient] = {}
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "Operator":
        for node_id, address in self._addresses.items():
            self._clients[node_id] = await self._until(
                lambda address=address: self._connected(*address),  # type: ignore[misc]
                f"node {node_id} accepts no connection",
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    async def _connected(self, host: str, port: int) -> WireClient | None:
        """None where the connection is cut off."""
        client = WireClient(*await asyncio.open_connection(host, port, local_addr=(HOST, 0)))
        try:
            async with asyncio.timeout(self._patience_s):
                await describe(client, (ResourceType.BROKER, ""), MIN_ISR)
        except (OSError, asyncio.IncompleteReadError):
            return None
        return client

    async def _until(self, ask: Callable[[], Any], wrong: str) -> Any:
        deadline = asyncio.get_running_loop().time() + self._patience_s
        problem: object = None
        while asyncio.get_running_loop().time() < deadline:
            try:
                async with asyncio.timeout(self._patience_s):
                    if (found := await ask()) is not None:
                        return found
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                problem = error
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"{wrong}: {problem!r}")

    async def limit(self, resource: str, name: str, value: str) -> None:
        """What the node does not accept it does not have to survive."""
        client = next(iter(self._clients.values()))
        await alter(client, (ResourceType.BROKER, resource), {name: value})

    async def undo_limits(self) -> None:
        await self._undo(self._brokers(), *sorted(LIMITING))

    async def undo_everything(self) -> None:
        await self._undo([*self._brokers(), *self._others()])
        for node_id, client in self._clients.items():
            loggers = (ResourceType.BROKER_LOGGER, str(node_id))
            answer = await alter(client, loggers, {"root": "INFO"})
            assert answer == (ErrorCode.none, None), f"the level of a logger cannot be set back: {answer}"

    def _brokers(self) -> list[tuple[WireClient, Resource]]:
        own = [
            (client, (int(ResourceType.BROKER), str(node_id))) for node_id, client in self._clients.items()
        ]
        return [(client, (int(ResourceType.BROKER), "")) for client in self._clients.values()] + own

    def _others(self) -> Iterable[tuple[WireClient, Resource]]:
        for client in self._clients.values():
            for kind, names in (
                (ResourceType.TOPIC, TOPICS),
                (ResourceType.GROUP, GROUPS),
                (ResourceType.CLIENT_METRICS, SUBSCRIPTIONS),
            ):
                yield from ((client, (int(kind), name)) for name in names)

    async def _undo(self, resources: Iterable[tuple[WireClient, Resource]], *names: str) -> None:
        """Until every node shows that nothing of it is left; of all settings where no names are given."""
        async with self._turn:
            for client, resource in resources:
                await self._until(
                    lambda client=client, resource=resource: self._is_undone(client, resource, names),  # type: ignore[misc]
                    f"what was set for {resource} cannot be undone",
                )

    async def _is_undone(self, client: WireClient, resource: Resource, names: tuple[str, ...]) -> bool | None:
        """None while there was still something to undo."""
        changes = await self._set(client, resource, names)
        if not changes:
            return True
        await alter(client, resource, changes)
        return None

    async def _set(
        self, client: WireClient, resource: Resource, names: tuple[str, ...]
    ) -> dict[str, str | None]:
        """The changes that undo what a resource has of its own."""
        shown = await describe(client, resource, *names)
        if shown.error_code is not ErrorCode.none:
            assert resource[0] != ResourceType.BROKER, shown
            return {}  # no such topic
        is_default = resource == (ResourceType.BROKER, "")
        changes: dict[str, str | None] = {}
        for config in shown.configs:
            if is_default or config.config_source in _OWN_SOURCES:
                # The cluster's minimum may be changed, never removed.
                is_minimum = is_default and config.name == MIN_ISR
                if not (is_minimum and config.value == self._min_isr):
                    changes[config.name] = self._min_isr if is_minimum else None
        return changes
