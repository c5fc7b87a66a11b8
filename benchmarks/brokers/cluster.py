"""Three nodes of a broker as one thing to measure: started together, on loopback, broken one at a time."""

import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

from kio.schema.describe_quorum.v2 import request as quorum_request
from kio.schema.describe_quorum.v2 import response as quorum_response
from tests.chaos.network import ProxyProcess, both_ways, clients
from tests.ports import free_port

from benchmarks.brokers.broker import HOST, Broker, PenstockBroker
from benchmarks.wire.raw_client import Address, BrokerError, Connection, ask_metadata

NODES = 3
_READY_S = 120.0
_POLL_S = 0.05
_METADATA_TOPIC = "__cluster_metadata"


class Place(NamedTuple):
    """A node's id, and the address by which one of its listeners is known: its own, or a door of the proxy."""

    node_id: int
    advertised: Address


class Cluster(ABC):
    """With `cuttable` every connection goes through a proxy, which can cut a node off without closing anything."""

    name: str
    replication_factor = NODES

    def __init__(self, folder: Path, *, cuttable: bool = False) -> None:
        self.folder = folder
        self._proxy = ProxyProcess() if cuttable else None
        self.nodes = {node_id: self.make_node(node_id) for node_id in range(1, NODES + 1)}
        self.places = {
            node_id: Place(node_id, self._door(node_id, node.address)) for node_id, node in self.nodes.items()
        }
        self._running: set[int] = set()
        self.introduce()

    @abstractmethod
    def make_node(self, node_id: int) -> Broker: ...

    @abstractmethod
    def introduce(self) -> None:
        """Tell every node of all of them, as its settings file would."""

    # -- as any subject ------------------------------------------------------------------------------

    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        return self.nodes[1].flush_config(fsync=fsync)

    def topic_configs(self, *, fsync: bool) -> dict[str, str]:
        return {"min.insync.replicas": str(NODES - 1), **self.nodes[1].topic_configs(fsync=fsync)}

    def settings(self) -> Mapping[str, str]:
        return {
            **self.nodes[1].settings(),
            "nodes": f"{NODES}, each broker and controller",
            "topics": f"{NODES} replicas, min.insync.replicas {NODES - 1}",
            "flush": self.flush_policies(),
        }

    @abstractmethod
    def flush_policies(self) -> str: ...

    def start(self) -> None:
        for node_id in self.nodes:
            self.start_node(node_id)
        self.wait_until_whole()

    def connect(self, timeout_s: float = 60) -> Connection:
        return self.nodes[min(self._running)].connect(timeout_s)

    def cpu_seconds(self) -> float:
        return sum(self.nodes[node_id].cpu_seconds() for node_id in self._running)

    def memory_bytes(self) -> tuple[int, int]:
        sizes = [self.nodes[node_id].memory_bytes() for node_id in self._running]
        return sum(rss for rss, _ in sizes), sum(pss for _, pss in sizes)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        for node in self.nodes.values():
            node.folder.mkdir()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.prepare(), self.nodes.values()))
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, because a controlled shutdown of the last nodes would wait for a node that takes over their leaders.
        for node in self.nodes.values():
            node.kill()
        if self._proxy is not None:
            self._proxy.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- nodes ---------------------------------------------------------------------------------------

    def start_node(self, node_id: int) -> None:
        self.nodes[node_id].start()
        self._running.add(node_id)
        if self._proxy is not None:
            self._proxy.introduce(node_id, self.nodes[node_id].pid)

    def kill_node(self, node_id: int) -> None:
        self._running.discard(node_id)
        self.nodes[node_id].kill()

    def cut_off(self, node_id: int) -> None:
        """From the other nodes and from all clients, both ways; every connection stays open."""
        assert self._proxy is not None, "not cuttable"
        self._proxy.cut(both_ways(node_id, [*(other for other in self.nodes if other != node_id), clients()]))

    def heal(self) -> None:
        assert self._proxy is not None, "not cuttable"
        self._proxy.heal()

    def controller_id(self) -> int:
        """The active controller; metadata may name any broker."""
        topic = quorum_request.TopicData(
            topic_name=_METADATA_TOPIC, partitions=(quorum_request.PartitionData(partition_index=0),)
        )
        request = quorum_request.DescribeQuorumRequest(topics=(topic,))
        with self.connect() as connection:
            response = connection.call(request, quorum_response.DescribeQuorumResponse)
        if response.error_code.value:
            raise BrokerError(f"{self.name} does not tell its controller: {response.error_code.name}")
        return int(response.topics[0].partitions[0].leader_id)

    def wait_until_whole(self, *topics: str) -> None:
        """All nodes know all nodes, and all replicas of these topics are in sync."""
        deadline = time.monotonic() + _READY_S
        for node in self.nodes.values():
            while not self._is_whole(node, topics):
                if time.monotonic() > deadline:
                    raise BrokerError(f"{self.name} is not whole after {_READY_S:.0f} s")
                time.sleep(_POLL_S)

    def _is_whole(self, node: Broker, topics: Sequence[str]) -> bool:
        with contextlib.suppress(OSError, BrokerError), node.connect() as connection:
            # A node that is still starting may cut off what it cannot answer yet.
            known = ask_metadata(connection, *topics)
            partitions = [partition for topic in known.topics for partition in topic.partitions]
            return (
                len(known.brokers) == NODES
                and all(not topic.error_code.value for topic in known.topics)
                and all(len(partition.isr_nodes) == NODES for partition in partitions)
            )
        return False

    def _door(self, node_id: int, address: Address) -> Address:
        if self._proxy is None:
            return address
        host = f"127.0.0.{10 + node_id}"
        return host, self._proxy.open(node_id, host, address)


class PenstockNode(PenstockBroker):
    """One of several."""

    place: Place
    #: Where the other nodes reach it.
    peer: Place
    voters: str

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peer_port = free_port()

    def flags(self) -> list[str]:
        (host, port), (peer_host, peer_port) = self.place.advertised, self.peer.advertised
        return [
            *("--node-id", str(self.place.node_id), "--voters", self.voters),
            *("--listen", f"NODES://{HOST}:{self.peer_port}"),
            *("--advertise", f"{host}:{port}", "--advertise", f"NODES://{peer_host}:{peer_port}"),
        ]


class PenstockCluster(Cluster):
    name = "penstock"

    def make_node(self, node_id: int) -> PenstockNode:
        return PenstockNode(self.folder / f"node-{node_id}")

    def introduce(self) -> None:
        nodes = {i: node for i, node in self.nodes.items() if isinstance(node, PenstockNode)}
        for node_id, node in nodes.items():
            node.place = self.places[node_id]
            node.peer = Place(node_id, self._door(node_id, (HOST, node.peer_port)))
        voters = ",".join(listed(node.peer) for node in nodes.values())
        for node in nodes.values():
            node.voters = voters

    def flush_policies(self) -> str:
        return "as shipped: penstock.flush=ack (synced on every in-sync replica); page cache: penstock.flush=never"


def listed(place: Place) -> str:
    """As controller.quorum.voters has it."""
    host, port = place.advertised
    return f"{place.node_id}@{host}:{port}"


assert HOST == "127.0.0.1", "the doors of the proxy are other addresses of the same host"
