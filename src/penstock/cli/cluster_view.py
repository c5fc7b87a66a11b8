"""A cluster as it is at one moment: quorum, brokers and partitions, gathered for the verbs that look at it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.broker.internal_topics import INTERNAL_TOPICS
from penstock.cli.client import REQUEST_TIMEOUT_S, Cluster, Place
from penstock.cli.cluster_requests import (
    Broker,
    Moving,
    Quorum,
    an_address,
    brokers,
    is_reachable,
    quorum,
    reassignments,
)
from penstock.cli.wire import Address, NotUnderstood

NO_LEADER = -1
MIN_ISR = "min.insync.replicas"
#: What the setting that sizes each internal topic is called.
INTERNAL_SETTINGS = {name: topic.replication_factor for name, topic in INTERNAL_TOPICS.items()}


class PartitionView(NamedTuple):
    place: Place
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    isr_min: int
    moving: Moving | None = None

    @property
    def settled(self) -> tuple[int, ...]:
        """Its replicas once what is under way has ended."""
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
        """As its leader sees it: replicas that are being added are not asked for yet, those to be removed still are."""
        newcomers = 0 if self.moving is None else len(self.moving.adding)
        return len(self.in_sync) < min(self.isr_min, len(self.replicas) - newcomers)

    @property
    def is_led_by_other(self) -> bool:
        return not self.is_offline and self.leader != self.settled[0]

    @property
    def troubles(self) -> list[str]:
        return [
            text
            for applies, text in (
                (self.is_offline, "offline"),
                (self.is_under_min_isr, "under min ISR"),
                (self.is_under_replicated, "under-replicated"),
                (self.is_led_by_other, "not led by its preferred replica"),
                (self.moving is not None, "being reassigned"),
            )
            if applies
        ]


class ClusterView(NamedTuple):
    """`quorum` is None where no controller answers; `internal_replicas` are those wanted, by internal topic."""

    cluster_id: str
    quorum: Quorum | None
    brokers: tuple[Broker, ...]
    partitions: tuple[PartitionView, ...]
    internal_replicas: Mapping[str, int]
    tells_quorum: bool = True
    unreachable: frozenset[int] = frozenset()  # brokers that do not answer from here

    def rack_or_host(self, broker_id: int) -> str:
        return next((broker.rack or broker.host for broker in self.brokers if broker.id == broker_id), "")


def look(cluster: Cluster, *, quorum_timeout_s: float) -> ClusterView:
    """Raises Failure when no broker answers."""
    metadata = cluster.metadata()
    address = an_address(cluster)
    known, tells = _quorum(address, quorum_timeout_s)
    # Without a controller nobody could say, and asking would take as long as waiting for one.
    moving = {} if known is None and tells else _moving(address, metadata)
    there = brokers(address)
    isr_min = _settings(cluster, "TOPIC", metadata.topics, MIN_ISR)
    return ClusterView(
        cluster_id=str(metadata.cluster_id),
        quorum=known,
        brokers=tuple(there),
        unreachable=_unreachable(there),
        partitions=tuple(
            PartitionView(
                Place(name, index),
                int(partition.leader),
                tuple(partition.replicas),
                tuple(partition.isrs),
                int(isr_min.get(name) or 1),
                moving.get(Place(name, index)),
            )
            for name, topic in sorted(metadata.topics.items())
            for index, partition in sorted(topic.partitions.items())
        ),
        internal_replicas=_internal_replicas(cluster, metadata),
        tells_quorum=tells,
    )


def _quorum(address: Address, timeout_s: float) -> tuple[Quorum | None, bool]:
    """And whether such a broker could tell at all: a Kafka with another way of finding its controller cannot."""
    try:
        return quorum(address, timeout_s=timeout_s), True
    except NotUnderstood:
        return None, False
    except OSError:
        return None, True


def _unreachable(known: Sequence[Broker]) -> frozenset[int]:
    """All at once: one that is cut off is waited for, and there may be many."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(is_reachable, known))
    return frozenset(broker.id for broker, answers_us in zip(known, answers, strict=True) if not answers_us)


def _moving(address: Address, metadata: Any) -> Mapping[Place, Moving]:
    """Asked of the controller only where a cluster has more than one broker to move between."""
    if len(metadata.brokers) < 2:
        return {}
    try:
        return reassignments(address)
    except OSError:
        return {}


def _settings(cluster: Cluster, kind: str, names: Iterable[str], setting: str) -> dict[str, str | None]:
    """The value that each of these resources has for a setting."""
    from confluent_kafka.admin import ConfigResource, ResourceType

    asked = {name: ConfigResource(ResourceType[kind], name) for name in names}
    if not asked:
        return {}
    futures = cluster.admin.describe_configs(list(asked.values()), request_timeout=REQUEST_TIMEOUT_S)
    found = cluster.wait_each({resource.name: future for resource, future in futures.items()})
    return {
        name: entries[setting].value if isinstance(entries, dict) and setting in entries else None
        for name, entries in found.items()
    }


def _internal_replicas(cluster: Cluster, metadata: Any) -> dict[str, int]:
    asked = str(min(metadata.brokers))
    wanted = {}
    for name, setting in INTERNAL_SETTINGS.items():
        if name in metadata.topics:
            value = _settings(cluster, "BROKER", [asked], setting).get(asked)
            wanted[name] = int(value or 1)
    return wanted
