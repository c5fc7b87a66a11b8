"""A description of the cluster for `cluster status`, `rebalance` and `voters`: quorum, brokers (also fenced ones),
partitions and ongoing reassignments at one moment.

Also the requests that collect it, and those with which the cluster verbs change something; confluent-kafka has no
calls for them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from penstock.broker.config.internal_topics import INTERNAL_TOPICS
from penstock.cli.cluster_client import (
    REQUEST_TIMEOUT_S,
    Address,
    LibrdkafkaCluster,
    PartitionName,
    UnsupportedRequest,
    send_request,
)
from penstock.cli.errors import CommandError
from penstock.protocol.schemas import schema_class

#: Leaves time for a controller change: as long as the broker that forwards the request waits for a controller.
CONTROLLER_TIMEOUT_S = 15.0
REACHABLE_TIMEOUT_S = 2.0
_BROKER_ENDPOINTS = 1
_BROKER_RESOURCE = 4
_SET, _DELETE = 0, 1
_UPGRADE, _SAFE_DOWNGRADE = 1, 2


class BrokerDescription(NamedTuple):
    id: int
    host: str
    port: int
    rack: str | None
    fenced: bool


def is_reachable(broker: BrokerDescription) -> bool:
    """Whether a connection to the broker's advertised address succeeds from this machine."""
    import socket

    try:
        socket.create_connection((broker.host, broker.port), timeout=REACHABLE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class QuorumReplica(NamedTuple):
    id: int
    end_offset: int
    caught_up_ms: int  # by the leader's clock; -1: never
    directory: UUID = UUID(int=0)  # of its metadata log: a node with another disk is another voter


class QuorumInfo(NamedTuple):
    leader: int
    epoch: int
    high_watermark: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]


class PartitionReassignment(NamedTuple):
    """An ongoing reassignment of a partition. `target` is the replicas that the partition will have."""

    target: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class RequestRefused(OSError):
    """The cluster has answered with an error code."""


def fetch_cluster_id(address: Address) -> str:
    return str(_request_describe_cluster(address).cluster_id)


def describe_brokers(address: Address) -> list[BrokerDescription]:
    return [
        BrokerDescription(
            int(broker.broker_id),
            str(broker.host),
            int(broker.port),
            None if broker.rack is None else str(broker.rack),
            bool(getattr(broker, "is_fenced", False)),
        )
        for broker in _request_describe_cluster(address).brokers
    ]


def _request_describe_cluster(address: Address) -> Any:
    request = schema_class("describe_cluster.v2.request:DescribeClusterRequest")(
        include_cluster_authorized_operations=False,
        endpoint_type=_BROKER_ENDPOINTS,
        include_fenced_brokers=True,
    )
    return send_request(address, request)


def describe_quorum(address: Address, *, timeout_s: float) -> QuorumInfo:
    """Raises OSError when no leader answers."""
    partition = schema_class("describe_quorum.v2.request:PartitionData")(partition_index=0)
    topic = schema_class("describe_quorum.v2.request:TopicData")(
        topic_name="__cluster_metadata", partitions=(partition,)
    )
    request = schema_class("describe_quorum.v2.request:DescribeQuorumRequest")(topics=(topic,))
    answer = send_request(address, request, timeout_s=timeout_s)
    _raise_if_refused(answer)
    found = answer.topics[0].partitions[0]
    _raise_if_refused(found)
    return QuorumInfo(
        int(found.leader_id),
        int(found.leader_epoch),
        int(found.high_watermark),
        tuple(map(_quorum_replica, found.current_voters)),
        tuple(map(_quorum_replica, found.observers)),
    )


def _quorum_replica(state: Any) -> QuorumReplica:
    return QuorumReplica(
        int(state.replica_id),
        int(state.log_end_offset),
        int(getattr(state, "last_caught_up_timestamp", -1)),
        getattr(state, "replica_directory_id", None) or UUID(int=0),
    )


def list_reassignments(address: Address) -> dict[PartitionName, PartitionReassignment]:
    """All ongoing reassignments. Raises OSError when no controller answers."""
    request = schema_class("list_partition_reassignments.v0.request:ListPartitionReassignmentsRequest")(
        timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S), topics=None
    )
    answer = send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S)
    _raise_if_refused(answer)
    return {
        PartitionName(str(topic.name), int(found.partition_index)): _parse_reassignment(found)
        for topic in answer.topics
        for found in topic.partitions
    }


def _parse_reassignment(found: Any) -> PartitionReassignment:
    removing = tuple(map(int, found.removing_replicas))
    target = tuple(int(replica) for replica in found.replicas if int(replica) not in removing)
    return PartitionReassignment(target, tuple(map(int, found.adding_replicas)), removing)


def alter_reassignments(
    address: Address, targets: Mapping[PartitionName, Sequence[int] | None]
) -> dict[PartitionName, str]:
    """Requests these replicas; None cancels a reassignment. Returns the refused partitions, each with the reason."""
    module = "alter_partition_reassignments.v0.request"
    partition_class, topic_class = (
        schema_class(f"{module}:ReassignablePartition"),
        schema_class(f"{module}:ReassignableTopic"),
    )
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for place, replicas in targets.items():
        wanted = None if replicas is None else tuple(replicas)
        by_topic[place.topic].append(partition_class(partition_index=place.partition, replicas=wanted))
    request = schema_class(f"{module}:AlterPartitionReassignmentsRequest")(
        timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S),
        topics=tuple(topic_class(name=name, partitions=tuple(found)) for name, found in by_topic.items()),
    )
    answer = send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S)
    _raise_if_refused(answer)
    return {
        PartitionName(str(topic.name), int(found.partition_index)): found.error_message
        or found.error_code.name
        for topic in answer.responses
        for found in topic.partitions
        if found.error_code.value != 0
    }


def elect_preferred_leaders(address: Address) -> None:
    """Makes in-sync preferred replicas leaders where another replica leads. Raises OSError."""
    request = schema_class("elect_leaders.v2.request:ElectLeadersRequest")(
        election_type=0, topic_partitions=None, timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S)
    )
    _raise_if_refused(send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def alter_default_broker_config(address: Address, setting: str, value: str | None) -> None:
    """Sets a dynamic default of all brokers; None deletes it, so that they use their own again. Raises OSError."""
    module = "incremental_alter_configs.v1.request"
    config = schema_class(f"{module}:AlterableConfig")(
        name=setting, config_operation=_DELETE if value is None else _SET, value=value
    )
    resource = schema_class(f"{module}:AlterConfigsResource")(
        resource_type=_BROKER_RESOURCE, resource_name="", configs=(config,)
    )
    request = schema_class(f"{module}:IncrementalAlterConfigsRequest")(
        resources=(resource,), validate_only=False
    )
    for response in send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S).responses:
        _raise_if_refused(response)


def unregister_broker(address: Address, broker_id: int) -> None:
    """Raises OSError, also when the cluster refuses."""
    request = schema_class("unregister_broker.v0.request:UnregisterBrokerRequest")(broker_id=broker_id)
    _raise_if_refused(send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def remove_raft_voter(address: Address, cluster: str, voter: QuorumReplica) -> None:
    """Raises OSError, also when the cluster refuses."""
    request = schema_class("remove_raft_voter.v0.request:RemoveRaftVoterRequest")(
        cluster_id=cluster, voter_id=voter.id, voter_directory_id=voter.directory
    )
    _raise_if_refused(send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def update_features(address: Address, levels: Mapping[str, int], lowered: Sequence[str]) -> None:
    """Updates all of the features or none. Raises OSError, also when the cluster refuses."""
    module = "update_features.v2.request"
    update = schema_class(f"{module}:FeatureUpdateKey")
    request = schema_class(f"{module}:UpdateFeaturesRequest")(
        timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S),
        feature_updates=tuple(
            update(
                feature=name,
                max_version_level=level,
                upgrade_type=_SAFE_DOWNGRADE if name in lowered else _UPGRADE,
            )
            for name, level in levels.items()
        ),
        validate_only=False,
    )
    _raise_if_refused(send_request(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def _raise_if_refused(answer: Any) -> None:
    code = getattr(answer, "error_code", None)
    if code is not None and code.value != 0:
        raise RequestRefused(getattr(answer, "error_message", None) or code.name.replace("_", " "))


def reachable_address(cluster: LibrdkafkaCluster) -> Address:
    """The address of a broker that accepts connections. Raises CommandError when there is none."""
    for found in sorted(cluster.metadata().brokers.values(), key=lambda broker: int(broker.id)):
        broker = BrokerDescription(int(found.id), str(found.host), int(found.port), None, False)
        if is_reachable(broker):
            return broker.host, broker.port
    raise CommandError("no broker of the cluster can be reached at the address that it advertises")


NO_LEADER = -1
MIN_ISR = "min.insync.replicas"
#: The setting that gives the replication factor of each internal topic.
INTERNAL_TOPIC_SETTINGS = {name: topic.replication_factor for name, topic in INTERNAL_TOPICS.items()}


class PartitionDescription(NamedTuple):
    place: PartitionName
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


def describe_cluster(cluster: LibrdkafkaCluster, *, quorum_timeout_s: float) -> ClusterDescription:
    """Raises CommandError when no broker answers."""
    metadata = cluster.metadata()
    address = reachable_address(cluster)
    known, tells = _quorum_if_known(address, quorum_timeout_s)
    # Without a controller the request could only run into its timeout.
    moving = {} if known is None and tells else _ongoing_reassignments(address, metadata)
    there = describe_brokers(address)
    isr_min = _setting_values(cluster, "TOPIC", metadata.topics, MIN_ISR)
    return ClusterDescription(
        cluster_id=str(metadata.cluster_id),
        quorum=known,
        brokers=tuple(there),
        unreachable=_unreachable_brokers(there),
        partitions=tuple(
            PartitionDescription(
                PartitionName(name, index),
                int(partition.leader),
                tuple(partition.replicas),
                tuple(partition.isrs),
                int(isr_min.get(name) or 1),
                moving.get(PartitionName(name, index)),
            )
            for name, topic in sorted(metadata.topics.items())
            for index, partition in sorted(topic.partitions.items())
        ),
        internal_replicas=_internal_topic_replicas(cluster, metadata),
        knows_quorum=tells,
    )


def _quorum_if_known(address: Address, timeout_s: float) -> tuple[QuorumInfo | None, bool]:
    """Also returns whether the broker supports the request; a Kafka cluster without a KRaft quorum does not."""
    try:
        return describe_quorum(address, timeout_s=timeout_s), True
    except UnsupportedRequest:
        return None, False
    except OSError:
        return None, True


def _unreachable_brokers(known: Sequence[BrokerDescription]) -> frozenset[int]:
    """Checks the brokers in parallel: each unreachable one costs a timeout, and there may be many."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = list(pool.map(is_reachable, known))
    return frozenset(broker.id for broker, answers_us in zip(known, answers, strict=True) if not answers_us)


def _ongoing_reassignments(address: Address, metadata: Any) -> Mapping[PartitionName, PartitionReassignment]:
    """Asks the controller only if the cluster has more than one broker to move partitions between."""
    if len(metadata.brokers) < 2:
        return {}
    try:
        return list_reassignments(address)
    except OSError:
        return {}


def _setting_values(
    cluster: LibrdkafkaCluster, kind: str, names: Iterable[str], setting: str
) -> dict[str, str | None]:
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


def _internal_topic_replicas(cluster: LibrdkafkaCluster, metadata: Any) -> dict[str, int]:
    asked = str(min(metadata.brokers))
    wanted = {}
    for name, setting in INTERNAL_TOPIC_SETTINGS.items():
        if name in metadata.topics:
            value = _setting_values(cluster, "BROKER", [asked], setting).get(asked)
            wanted[name] = int(value or 1)
    return wanted
