"""Three real nodes in one process, which tests can kill and start again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port
from tests.unit.broker.raw_client import until

from penstock.broker.config.node_settings import load_settings
from penstock.broker.node import Node
from penstock.cluster.controller.create_topics import NewTopic
from penstock.protocol.errors import ErrorCode

_FAST = {
    "controller.quorum.election.timeout.ms": "300",
    "controller.quorum.fetch.timeout.ms": "600",
    "broker.session.timeout.ms": "800",
    "broker.heartbeat.interval.ms": "100",
    "replica.fetch.wait.max.ms": "50",
    "replica.lag.time.max.ms": "10000",
    # Leaders move when a test kills one, and not back in the middle of what it does next.
    "auto.leader.rebalance.enable": "false",
    "share.coordinator.state.topic.num.partitions": "2",
    "controlled.shutdown.enable": "false",
}
#: For tests that talk to one leader for a while: no node that lives is missed although all share one slow loop.
PATIENT = {
    "controller.quorum.election.timeout.ms": "1000",
    "controller.quorum.fetch.timeout.ms": "2000",
    "broker.session.timeout.ms": "4000",
}


class Trio:
    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._settings = {**_FAST, **(settings or {})}
        self._ports = {number: free_port() for number in (1, 2, 3)}  # of the listeners for nodes
        #: Nodes and clients use the same listeners, as in release 0.5 and before.
        self.shares_listeners = False
        self.nodes: dict[int, Node] = {}
        self._dying: dict[int, asyncio.Future[None]] = {}

    async def start(self) -> None:
        await asyncio.gather(*(self.launch(number) for number in self._ports))
        await until(lambda: all(len(node.image.active_brokers()) == 3 for node in self.nodes.values()))

    async def launch(self, number: int) -> Node:
        if number in self._dying:
            # Somebody else may have killed it, and its folder is in use until it is gone.
            await self._dying.pop(number)
        voters = ",".join(f"{other}@127.0.0.1:{port}" for other, port in self._ports.items())
        given = {
            **self._settings,
            "node.id": str(number),
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": str(self._folder / str(number)),
            "controller.quorum.voters": voters,
        }
        if self.shares_listeners:
            given["listeners"] = f"PLAINTEXT://127.0.0.1:{self._ports[number]}"
            given["inter.broker.listener.name"] = "PLAINTEXT"
        node = self.nodes[number] = Node(load_settings(given, {}))
        await node.start()
        return node

    async def kill(self, number: int) -> None:
        self._dying[number] = asyncio.ensure_future(self.nodes.pop(number).stop(clean=False))
        await asyncio.shield(self._dying[number])

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop(clean=False) for node in self.nodes.values()))

    async def separate_listeners(self) -> None:
        """Stop all, and start them with listeners for nodes at other ports."""
        await self.stop()
        self.shares_listeners = False
        self._ports = {number: free_port() for number in self._ports}
        await self.start()

    @property
    def any(self) -> Node:
        return next(iter(self.nodes.values()))

    async def create_topic(self, name: str, partitions: int = 1) -> None:
        topic = NewTopic(name, partitions, 3, configs=(("min.insync.replicas", "2"),))
        (result,) = await self.any.topic_creator.create([topic])
        assert result.error is ErrorCode.none, result
        await until(lambda: all(name in node.image.topics for node in self.nodes.values()))
        await until(lambda: all(self.leader(name, index) for index in range(partitions)))

    async def controller(self) -> Node:
        """The active one; for a moment there may be none, or an old one that does not know yet."""

        def active() -> list[Node]:
            return [node for node in self.nodes.values() if node.metadata.is_active]

        await until(lambda: len(active()) == 1)
        return active()[0]

    def leader(self, topic: str, index: int = 0) -> Node | None:
        """The node that leads, by its own word and that of the others."""
        for node in self.nodes.values():
            state = self.any.image.partition(topic, index)
            if state and state.leader == node.node_id and node.partitions.led(topic, index):
                return node
        return None
