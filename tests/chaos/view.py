"""Looks at the cluster without the proxy, from the point of view of each node."""

import contextlib
import datetime
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.brokers import ClusterProcesses, NodeProcess
from tests.compat.raw import RawConnection, schema

ASK_TIMEOUT_S = 2.0
#: Opens a connection on which requests are served.
Connected = Callable[[tuple[str, int]], contextlib.AbstractContextManager[RawConnection]]
METADATA_TOPIC = "__cluster_metadata"
OF_GROUP, OF_TRANSACTION, OF_SHARE = 0, 1, 2  # kinds of coordinators


class PartitionView(NamedTuple):
    leader: int
    epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.leader in self.isr and set(self.isr) == set(self.replicas)


class View(NamedTuple):
    """What one node tells a client."""

    brokers: frozenset[int]
    partitions: dict[tuple[str, int], PartitionView]

    @property
    def freshness(self) -> int:
        return sum(partition.epoch for partition in self.partitions.values())


@contextlib.contextmanager
def in_plaintext(address: tuple[str, int]) -> Iterator[RawConnection]:
    with socket.create_connection(address, timeout=ASK_TIMEOUT_S) as connection:
        yield RawConnection(connection)


class Observer:
    def __init__(self, cluster: ClusterProcesses, connected: Connected = in_plaintext) -> None:
        self._cluster = cluster
        self._connected = connected

    def views(self) -> dict[int, View]:
        """Of every node that runs and answers."""
        found = {node.node_id: self._look(node) for node in self._awake()}
        return {node_id: view for node_id, view in found.items() if view is not None}

    def newest(self) -> View | None:
        return max(self.views().values(), key=lambda view: view.freshness, default=None)

    def leader_of(self, topic: str, partition: int) -> int:
        view = self.newest()
        return (
            view.partitions[topic, partition].leader if view and (topic, partition) in view.partitions else -1
        )

    def controller(self) -> int:
        return next((int(state.leader_id) for state in self._quorum_states() if state.leader_id > 0), -1)

    def quorum_epoch(self) -> int:
        return max((int(state.leader_epoch) for state in self._quorum_states()), default=-1)

    def _quorum_states(self) -> Iterator[Any]:
        for node in self._awake():
            answer = self._ask(node, _quorum_question())
            if answer is not None and answer.topics:
                yield answer.topics[0].partitions[0]

    def coordinator(self, kind: int, key: str) -> int:
        """Of a group or a transactional id, in the eyes of a node that knows one."""
        for node in self._awake():
            answer = self._ask(node, _coordinator_question(kind, key))
            if answer is not None and (found := answer.coordinators[0].node_id) > 0:
                return int(found)
        return -1

    def ask_each(self, question: Any) -> dict[int, Any]:
        """The answers of all nodes that run and answer."""
        answers = {node.node_id: self._ask(node, question) for node in self._awake()}
        return {node_id: answer for node_id, answer in answers.items() if answer is not None}

    def what_is_wrong(self) -> list[str]:
        """Nothing, when every node sees every broker and whole partitions."""
        views = self.views()
        wrong = [f"node {node_id} does not answer" for node_id in self._cluster.nodes if node_id not in views]
        for node_id, view in views.items():
            if missing := set(self._cluster.nodes) - view.brokers:
                wrong.append(f"node {node_id} does not see {sorted(missing)}")
            broken = (
                f"{topic}-{n} {state}" for (topic, n), state in view.partitions.items() if not state.is_whole
            )
            wrong += [f"node {node_id} sees {words}" for words in broken]
        return wrong

    def reassign(self, topic: str, partition: int, replicas: Sequence[int] | None) -> str:
        """Ask any node; returns the name of the error, or "none"."""
        for node in self._awake():
            answer = self._ask(node, _reassignment(topic, partition, replicas))
            if answer is not None:
                codes = [answer.error_code, *(p.error_code for t in answer.responses for p in t.partitions)]
                return next((code.name for code in codes if code.name != "none"), "none")
        return "no answer"

    def _awake(self) -> list[NodeProcess]:
        return [node for node in self._cluster.nodes.values() if node.is_ready and not node.is_frozen]

    def _look(self, node: NodeProcess) -> View | None:
        answer = self._ask(node, _metadata_question())
        if answer is None:
            return None
        partitions = {
            (topic.name, p.partition_index): PartitionView(
                p.leader_id, p.leader_epoch, p.replica_nodes, p.isr_nodes
            )
            for topic in answer.topics
            for p in topic.partitions
        }
        return View(frozenset(int(broker.node_id) for broker in answer.brokers), partitions)

    def _ask(self, node: NodeProcess, question: Any) -> Any:
        try:
            with self._connected(node.direct_address) as connection:
                return connection.call(question)
        except (OSError, AssertionError):
            return None


def _metadata_question() -> Any:
    return schema("metadata", 9, "MetadataRequest")(
        topics=None,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )


def _coordinator_question(kind: int, key: str) -> Any:
    return schema("find_coordinator", 4, "FindCoordinatorRequest")(key_type=kind, coordinator_keys=(key,))


def _quorum_question() -> Any:
    partition = schema("describe_quorum", 0, "PartitionData")(partition_index=0)
    topic = schema("describe_quorum", 0, "TopicData")(topic_name=METADATA_TOPIC, partitions=(partition,))
    return schema("describe_quorum", 0, "DescribeQuorumRequest")(topics=(topic,))


def _reassignment(topic: str, partition: int, replicas: Sequence[int] | None) -> Any:
    api = "alter_partition_reassignments"
    wanted = None if replicas is None else tuple(replicas)
    moved = schema(api, 0, "ReassignablePartition")(partition_index=partition, replicas=wanted)
    named = schema(api, 0, "ReassignableTopic")(name=topic, partitions=(moved,))
    timeout = datetime.timedelta(seconds=ASK_TIMEOUT_S)
    return schema(api, 0, "AlterPartitionReassignmentsRequest")(timeout=timeout, topics=(named,))
