"""Three nodes of Apache Kafka, each broker and controller, with the settings it ships with."""

from collections.abc import Mapping

from benchmarks.brokers.broker import HOST
from benchmarks.brokers.cluster import Cluster, Place, listed
from benchmarks.brokers.kafka import KafkaBroker


class KafkaNode(KafkaBroker):
    place: Place
    #: Where its controller is reached by the others.
    controller: Place
    voters: str

    def place_lines(self) -> tuple[str, ...]:
        (host, port), (controller_host, controller_port) = self.place.advertised, self.controller.advertised
        return (
            f"node.id={self.place.node_id}",
            f"controller.quorum.voters={self.voters}",
            f"advertised.listeners=PLAINTEXT://{host}:{port},CONTROLLER://{controller_host}:{controller_port}",
        )

    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        """Left to the kernel in either case: that is its default, and replicas are its answer to a crash."""
        return {}


class KafkaCluster(Cluster):
    name = "kafka"

    def make_node(self, node_id: int) -> KafkaNode:
        return KafkaNode(self.folder / f"node-{node_id}")

    def introduce(self) -> None:
        nodes = {i: node for i, node in self.nodes.items() if isinstance(node, KafkaNode)}
        for node_id, node in nodes.items():
            node.place = self.places[node_id]
            node.controller = Place(node_id, self._door(node_id, (HOST, node.controller_port)))
        voters = ",".join(listed(node.controller) for node in nodes.values())
        for node in nodes.values():
            node.voters = voters

    def flush_policies(self) -> str:
        return "Kafka's default in either case: no flush, the kernel writes back"
