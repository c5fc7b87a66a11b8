"""A cluster of shipped nodes on virtual machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.broker.node import Node
from penstock.cluster.image import ClusterImage, PartitionState
from simulation.engine.loop import VirtualLoop
from simulation.engine.machine import CLIENT_PORT, NODE_PORT, Machine
from simulation.engine.network import Network

#: Short timeouts, so that little virtual time holds many elections, sessions and retries.
SETTINGS: Final[Mapping[str, str]] = {
    "controller.quorum.election.timeout.ms": "150",
    "controller.quorum.fetch.timeout.ms": "300",
    "controller.quorum.request.timeout.ms": "250",
    "controller.quorum.election.backoff.max.ms": "100",
    "broker.session.timeout.ms": "500",
    "broker.heartbeat.interval.ms": "100",
    "replica.lag.time.max.ms": "500",
    "replica.fetch.wait.max.ms": "200",
    "replica.fetch.backoff.ms": "50",
    "replica.socket.timeout.ms": "300",
    "replica.high.watermark.checkpoint.interval.ms": "400",
    "metadata.log.max.record.bytes.between.snapshots": "2000",
    "leader.imbalance.check.interval.seconds": "2",
    "penstock.controlled.shutdown.timeout.ms": "500",
    "penstock.disk.reserve.bytes": "0",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "penstock.schedule.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.commit.timeout.ms": "500",
    "min.insync.replicas": "2",
    "default.replication.factor": "3",
}

_VOTERS_MAX: Final = 3


class TopicShape(NamedTuple):
    name: str
    partitions: int = 1
    replication_factor: int = 3
    configs: tuple[tuple[str, str], ...] = ()


class Cluster:
    """The first three nodes are controllers and brokers, the others are brokers."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        folder: Path,
        *,
        nodes: int = 3,
        settings: Mapping[str, str] | None = None,
        timeouts: Mapping[str, str] = SETTINGS,
        racks: int | None = None,
    ) -> None:
        """`timeouts` replaces the short ones; without `racks`, every node has a rack of its own."""
        self.loop = loop
        self.network = network
        voter_ids = range(1, min(nodes, _VOTERS_MAX) + 1)
        voters = ",".join(f"{number}@10.0.0.{number}:{NODE_PORT}" for number in voter_ids)
        bootstrap = ",".join(f"10.0.0.{number}:{NODE_PORT}" for number in voter_ids)
        #: The rack of each node.
        self.racks = {number: f"rack{(number - 1) % (racks or nodes) + 1}" for number in range(1, nodes + 1)}
        self.machines: dict[int, Machine] = {}
        self._newest = (-1, ClusterImage())
        for number in range(1, nodes + 1):
            own = {
                **timeouts,
                **(settings or {}),
                "listeners": f"PLAINTEXT://10.0.0.{number}:{CLIENT_PORT},NODES://10.0.0.{number}:{NODE_PORT}",
                "broker.rack": self.racks[number],
            }
            if number in voter_ids:
                own["controller.quorum.voters"] = voters
            else:
                own["process.roles"] = "broker"
                own["controller.quorum.bootstrap.servers"] = bootstrap
            self.machines[number] = Machine(loop, network, folder / str(number), node_id=number, settings=own)

    def start(self) -> None:
        for machine in self.machines.values():
            machine.start()

    @property
    def hosts(self) -> list[str]:
        return [machine.host for machine in self.machines.values()]

    def serving(self) -> list[Node]:
        return [node for machine in self.machines.values() if (node := machine.serving) is not None]

    def active_controller(self) -> Node | None:
        active = [node for node in self.serving() if node.metadata.is_active]
        return max(active, key=lambda node: node.quorum.epoch, default=None)

    @property
    def image(self) -> ClusterImage:
        """The newest image that a node has published, even if only nodes with older images serve now."""
        for node in self.serving():
            if node.metadata.applied_offset > self._newest[0]:
                self._newest = node.metadata.applied_offset, node.metadata.image
        return self._newest[1]

    def in_process_of(self, node: Node, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call in the process of a node, which then owns the files that the call opens."""
        process = self.machines[node.node_id].process
        return call(*args) if process is None else process.context.copy().run(call, *args)

    def partitions(self) -> Iterator[tuple[str, int, PartitionState]]:
        for topic in self.image.topics.values():
            for index, state in topic.partitions.items():
                yield topic.name, index, state

    def find(self, accept: Callable[[Node], bool]) -> Node | None:
        return next((node for node in self.serving() if accept(node)), None)

    def leader_hint(self, topic: str, index: int) -> int:
        """The leader that some serving node believes in, as a client's metadata would; -1 if it knows none."""
        nodes = self.serving()
        if not nodes:
            return -1
        node = nodes[self.loop.draw(len(nodes))]
        state = node.metadata.image.partition(topic, index)
        return -1 if state is None else state.leader

    def unhealthy(self) -> str | None:
        """A node that does not serve, or a partition whose replicas are not all in sync, if there is one."""
        if len(self.serving()) < len(self.machines):
            return f"not all nodes serve: {list(self.machines.values())}"
        for topic, index, state in self.partitions():
            if state.adding_replicas or state.removing_replicas:
                return f"{topic}-{index} is still being reassigned: {state}"
            if not state.has_leader or set(state.isr) != set(state.replicas):
                return f"{topic}-{index} has leader {state.leader} and in-sync set {state.isr} of {state.replicas}"
        return None
