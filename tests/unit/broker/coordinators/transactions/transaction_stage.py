"""A node with a topic for tests of transactions, and clients for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.unit.broker.coordinators.transactions.transactional_client import (
    OLD,
    TransactionalClient,
    Versions,
    seen,
)
from tests.unit.broker.raw_client import create_topic, new_node
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

SETTINGS: Final = {
    "penstock_flush": "never",
    "offsets_topic_num_partitions": "1",
    "transaction_state_log_num_partitions": "2",
    "transaction_abort_timed_out_transaction_cleanup_interval_ms": "20",
    "transaction_two_phase_commit_enable": "true",
    "inter_broker_listener_name": "PLAINTEXT",  # clients here also send what only nodes may
}


class Stage:
    """A node with a topic of two partitions, and as many clients as a test wants."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._clients: list[WireClient] = []

    async def client(self) -> WireClient:
        client = await WireClient.connect(self.node)
        self._clients.append(client)
        return client

    async def producer(self, versions: Versions, name: str = "tx", **fields: Any) -> TransactionalClient:
        producer = TransactionalClient(await self.client(), name, versions)
        await producer.init(**fields)
        return producer

    async def begin(self, producer: TransactionalClient, *partitions: int, topic: str = "t") -> None:
        """What the newer protocol has the leader do."""
        if producer.versions == OLD:
            assert await producer.add(*partitions, topic=topic) == [ErrorCode.none] * len(partitions)

    async def committed(self, partition: int = 0, topic: str = "t") -> list[str]:
        return (await seen(await self.client(), topic, partition)).values

    async def everything(self, partition: int = 0, topic: str = "t") -> list[str]:
        return (await seen(await self.client(), topic, partition, committed=False)).values

    async def settled(self, producer: TransactionalClient) -> str:
        """The state, once no marker is on its way."""

        async def is_settled() -> bool:
            return not (await producer.state_name()).startswith("Prepare")

        await eventually_async(is_settled)
        return await producer.state_name()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def staged(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(new_node(tmp_path, **SETTINGS))
    await stage.node.start()
    try:
        await create_topic(stage.node, "t", partitions=2)
        yield stage
    finally:
        await stage.close()
        await stage.node.stop()


async def restart(stage: Stage, tmp_path: Path, *, clean: bool = True) -> None:
    await stage.close()
    await stage.node.stop(clean=clean)
    stage.node = new_node(tmp_path, **SETTINGS)
    await stage.node.start()
