"""How many records of a topic its overflow policy and shedding have dropped, by all nodes of a Penstock cluster."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from penstock.client.errors import ClientError
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.topic_drops import TOPIC_DROPS, PartitionDrops, decode_drops, encode_drops_request

#: For one node, which may have just stopped.
_ANSWER_MS_MAX: Final = 5_000


class TopicDrops(NamedTuple):
    #: Records by (policy, reason).
    counts: Counter[tuple[str, str]]
    #: Nodes that did not answer: what they have dropped is missing.
    silent_nodes: tuple[int, ...]


def topic_drops(cluster: Cluster, topic: str) -> TopicDrops:
    """Ask every node. Only for clusters of Penstock: others close the connection."""

    def ask(connection: Connection) -> list[PartitionDrops]:
        return decode_drops(connection.call_raw(TOPIC_DROPS, 0, [encode_drops_request([topic])]))

    counts: Counter[tuple[str, str]] = Counter()
    silent = []
    for node_id in sorted(cluster.nodes()):
        try:
            rows = cluster.call_node(node_id, ask, deadline=Deadline(_ANSWER_MS_MAX))
        except (ClientError, MalformedFrame):
            silent.append(node_id)
            continue
        for row in rows:
            for policy, reason, count in row.counts:
                counts[policy, reason] += count
    return TopicDrops(counts, tuple(silent))
