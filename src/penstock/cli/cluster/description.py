"""A description of the cluster for `cluster status`, `rebalance` and `voters`: quorum, brokers (also fenced ones),
partitions and ongoing reassignments at one moment.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from penstock.broker.config.internal_topics import INTERNAL_TOPICS
from penstock.cli.connection.offsets import PartitionName
from penstock.client.admin import cluster as admin
from penstock.client.admin.cluster import BrokerDescription, PartitionReassignment, QuorumInfo
from penstock.client.errors import ClientError, UnsupportedVersion
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import NO_LEADER, TopicPartition
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import ConfigResourceType, broker_settings, describe_config

REACHABLE_TIMEOUT_MS = 2_000
MIN_ISR = "min.insync.replicas"


class PartitionDescription(NamedTuple):
    name: PartitionName
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    isr_min: int
    moving: PartitionReassignment | None = None

    @property
    def target_replicas(self) -> tuple[int, ...]:
        """The replicas of the partition after the ongoing reassignment."""
        return self.replicas if self.moving is None else self.moving.target

    @property
    def is_offline(self) -> bool:
        return self.leader == NO_LEADER

    @property
    def is_under_replicated(self) -> bool:
        newcomers = () if self.moving is None else self.moving.adding
        return not set(self.replicas) - set(newcomers) <= set(self.in_sync)

    @property
    def is_under_min_isr(self) -> bool:
        """By the leader's rule: replicas that are being added are not required yet, those being removed still are."""
        newcomers = 0 if self.moving is None else len(self.moving.adding)
        return len(self.in_sync) < min(self.isr_min, len(self.replicas) - newcomers)

    @property
    def is_not_led_by_preferred(self) -> bool:
        return not self.is_offline and self.leader != self.target_replicas[0]

    @property
    def troubles(self) -> list[str]:
        return [
            text
            for applies, text in (
                (self.is_offline, "offline"),
                (self.is_under_min_isr, "under min ISR"),
                (self.is_under_replicated, "under-replicated"),
                (self.is_not_led_by_preferred, "not led by its preferred replica"),
                (self.moving is not None, "being reassigned"),
            )
            if applies
        ]


class ClusterDescription(NamedTuple):
    """`quorum` is None when no controller answers; `internal_replicas` maps internal topics to the configured
    replication factor.
    """

    cluster_id: str
    quorum: QuorumInfo | None
    brokers: tuple[BrokerDescription, ...]
    partitions: tuple[PartitionDescription, ...]
    internal_replicas: Mapping[str, int]
    knows_quorum: bool = True
    unreachable: frozenset[int] = frozenset()  # brokers that do not accept connections from this machine

    def rack_or_host(self, broker_id: int) -> str:
        return next((broker.rack or broker.host for broker in self.brokers if broker.id == broker_id), "")


def describe_cluster(cluster: Cluster, *, quorum_timeout_s: float) -> ClusterDescription:
    """Raises ClientError when no broker answers."""
    info = cluster.call_any(admin.describe_cluster)
    topics = cluster.topics()
    quorum, knows_quorum = _quorum_if_known(cluster, quorum_timeout_s)
    # Without a controller the request could only run into its timeout.
    moving = {} if quorum is None and knows_quorum else _ongoing_reassignments(cluster, info)
    isr_min = cluster.call_any(
        lambda connection: describe_config(connection, ConfigResourceType.TOPIC, topics, MIN_ISR)
    )
    return ClusterDescription(
        cluster_id=info.cluster_id,
        quorum=quorum,
        brokers=info.brokers,
        unreachable=_unreachable_brokers(info.brokers, cluster.settings),
        partitions=tuple(
            PartitionDescription(
                PartitionName(name, part.index),
                part.leader_id,
                part.replicas,
                part.in_sync,
                int(isr_min.get(name) or 1),
                moving.get((name, part.index)),
            )
            for name, topic in sorted(topics.items())
            for part in topic.partitions
        ),
        internal_replicas=_internal_topic_replicas(
            cluster, [name for name in INTERNAL_TOPICS if name in topics]
        ),
        knows_quorum=knows_quorum,
    )


def _quorum_if_known(cluster: Cluster, timeout_s: float) -> tuple[QuorumInfo | None, bool]:
    """Also returns whether the broker supports the request; a Kafka cluster without a KRaft quorum does not."""
    timeout_ms = timeout_s * 1000
    try:
        return cluster.call_any(
            lambda connection: admin.describe_quorum(connection, timeout_ms=timeout_ms),
            deadline=Deadline(timeout_ms),
        ), True
    except UnsupportedVersion:
        return None, False
    except ClientError:
        return None, True


def _ongoing_reassignments(
    cluster: Cluster, info: admin.ClusterInfo
) -> Mapping[TopicPartition, PartitionReassignment]:
    """Sends a request only if the cluster has more than one broker to move partitions between."""
    if len(info.brokers) < 2:
        return {}
    try:
        return cluster.call_any(admin.list_reassignments)
    except ClientError:
        return {}


def _unreachable_brokers(
    brokers: Sequence[BrokerDescription], settings: ConnectionSettings
) -> frozenset[int]:
    """Connects to all brokers at the same time: each unreachable one costs a timeout, and there may be many."""
    impatient = replace(settings, connect_timeout_ms=REACHABLE_TIMEOUT_MS)

    def is_reachable(broker: BrokerDescription) -> bool:
        try:
            Connection((broker.host, broker.port), impatient).close()
        except ClientError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(is_reachable, brokers))
    return frozenset(broker.id for broker, answers_us in zip(brokers, answers, strict=True) if not answers_us)


def _internal_topic_replicas(cluster: Cluster, topics: Sequence[str]) -> dict[str, int]:
    """The replication factor that a broker is configured with for each of these internal topics."""
    settings = {name: INTERNAL_TOPICS[name].replication_factor for name in topics}
    try:
        found = broker_settings(cluster, min(cluster.nodes()), settings.values()) if settings else {}
    except ClientError:
        found = {}
    return {name: int(found.get(setting) or 1) for name, setting in settings.items()}
