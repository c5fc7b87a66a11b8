"""Describes and changes a cluster: brokers, metadata quorum, features, reassignments, and sizes on disk.

Each function sends one request to one broker, which forwards it to the controller where needed, and raises Refused
or Unavailable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.errors import raise_for_error
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import TopicPartition, by_topic
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

#: As long as the broker that forwards a request waits for a controller, so that a controller change is survived.
CONTROLLER_TIMEOUT_MS: Final = 15_000
_CONTROLLER_TIMEOUT: Final = timedelta(milliseconds=CONTROLLER_TIMEOUT_MS)
_BROKER_ENDPOINTS: Final = 1
_METADATA_TOPIC: Final = "__cluster_metadata"
_PREFERRED_LEADER: Final = 0
_UPGRADE, _SAFE_DOWNGRADE = 1, 2
_NO_DIRECTORY: Final = UUID(int=0)


class BrokerDescription(NamedTuple):
    id: int
    host: str
    port: int
    rack: str | None
    fenced: bool


class ClusterInfo(NamedTuple):
    cluster_id: str
    controller_id: int  # -1 if there is none at present
    brokers: tuple[BrokerDescription, ...]


class QuorumReplica(NamedTuple):
    id: int
    end_offset: int
    caught_up_ms: int  # by the leader's clock; -1: never
    directory: UUID = _NO_DIRECTORY  # of its metadata log: a node with another disk is another voter


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


class FeatureLevels(NamedTuple):
    """The level of a feature in this cluster (0: disabled), and the range of levels that the broker supports."""

    level: int
    level_min: int
    level_max: int


def describe_cluster(connection: Connection) -> ClusterInfo:
    """Includes fenced brokers, if the broker reports them."""
    request = schema_class("describe_cluster.v2.request:DescribeClusterRequest")(
        include_cluster_authorized_operations=False,
        endpoint_type=_BROKER_ENDPOINTS,
        include_fenced_brokers=True,
    )
    response = connection.call(request)
    _raise_if_refused(response, "the cluster")
    brokers = (
        BrokerDescription(
            int(broker.broker_id),
            str(broker.host),
            int(broker.port),
            None if broker.rack is None else str(broker.rack),
            bool(getattr(broker, "is_fenced", False)),
        )
        for broker in response.brokers
    )
    return ClusterInfo(
        str(response.cluster_id),
        int(response.controller_id),
        tuple(sorted(brokers, key=lambda each: each.id)),
    )


def describe_quorum(connection: Connection, *, timeout_ms: float = CONTROLLER_TIMEOUT_MS) -> QuorumInfo:
    """Raises UnsupportedVersion if the cluster has no KRaft quorum."""
    module = "describe_quorum.v2.request"
    partition = schema_class(f"{module}:PartitionData")(partition_index=0)
    topic = schema_class(f"{module}:TopicData")(topic_name=_METADATA_TOPIC, partitions=(partition,))
    request = schema_class(f"{module}:DescribeQuorumRequest")(topics=(topic,))
    response = connection.call(request, timeout_ms=timeout_ms)
    _raise_if_refused(response, "the quorum")
    found = response.topics[0].partitions[0]
    _raise_if_refused(found, "the quorum")
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
        getattr(state, "replica_directory_id", None) or _NO_DIRECTORY,
    )


def remove_raft_voter(connection: Connection, cluster_id: str, voter: QuorumReplica) -> None:
    request = schema_class("remove_raft_voter.v0.request:RemoveRaftVoterRequest")(
        cluster_id=cluster_id, voter_id=voter.id, voter_directory_id=voter.directory
    )
    _raise_if_refused(connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS), f"voter {voter.id}")


def unregister_broker(connection: Connection, broker_id: int) -> None:
    request = schema_class("unregister_broker.v0.request:UnregisterBrokerRequest")(broker_id=broker_id)
    _raise_if_refused(connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS), f"broker {broker_id}")


def list_reassignments(connection: Connection) -> dict[TopicPartition, PartitionReassignment]:
    """All ongoing reassignments."""
    request = schema_class("list_partition_reassignments.v0.request:ListPartitionReassignmentsRequest")(
        timeout=_CONTROLLER_TIMEOUT, topics=None
    )
    response = connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS)
    _raise_if_refused(response, "reassignments")
    return {
        (str(topic.name), int(found.partition_index)): _reassignment(found)
        for topic in response.topics
        for found in topic.partitions
    }


def _reassignment(found: Any) -> PartitionReassignment:
    removing = tuple(map(int, found.removing_replicas))
    target = tuple(int(replica) for replica in found.replicas if int(replica) not in removing)
    return PartitionReassignment(target, tuple(map(int, found.adding_replicas)), removing)


def alter_reassignments(
    connection: Connection, targets: Mapping[TopicPartition, Sequence[int] | None]
) -> dict[TopicPartition, str]:
    """Requests these replicas; None cancels a reassignment. Returns the refused partitions, each with the reason."""
    module = "alter_partition_reassignments.v0.request"
    partition_class = schema_class(f"{module}:ReassignablePartition")
    topic_class = schema_class(f"{module}:ReassignableTopic")
    topics = tuple(
        topic_class(
            name=name,
            partitions=tuple(
                partition_class(partition_index=index, replicas=None if replicas is None else tuple(replicas))
                for index, replicas in parts
            ),
        )
        for name, parts in by_topic(targets.items()).items()
    )
    request = schema_class(f"{module}:AlterPartitionReassignmentsRequest")(
        timeout=_CONTROLLER_TIMEOUT, topics=topics
    )
    response = connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS)
    _raise_if_refused(response, "reassignments")
    return {
        (str(topic.name), int(found.partition_index)): str(
            found.error_message or found.error_code.name.replace("_", " ")
        )
        for topic in response.responses
        for found in topic.partitions
        if found.error_code is not ErrorCode.none
    }


def elect_preferred_leaders(connection: Connection) -> None:
    """Makes in-sync preferred replicas leaders where another replica leads."""
    request = schema_class("elect_leaders.v2.request:ElectLeadersRequest")(
        election_type=_PREFERRED_LEADER, topic_partitions=None, timeout=_CONTROLLER_TIMEOUT
    )
    _raise_if_refused(connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS), "preferred leaders")


def describe_features(connection: Connection) -> dict[str, FeatureLevels]:
    """The features that this broker supports; empty if it reports none."""
    # Before version 4, the response omits features whose minimum level is 0.
    request = schema_class("api_versions.v4.request:ApiVersionsRequest")(
        client_software_name="penstock-admin", client_software_version="1"
    )
    response = connection.call(request)
    levels = {str(entry.name): int(entry.max_version_level) for entry in response.finalized_features}
    return {
        str(entry.name): FeatureLevels(
            levels.get(str(entry.name), 0), int(entry.min_version), int(entry.max_version)
        )
        for entry in response.supported_features
    }


def update_features(connection: Connection, levels: Mapping[str, int], lowered: Iterable[str]) -> None:
    """Updates all of the features or none."""
    module = "update_features.v2.request"
    update = schema_class(f"{module}:FeatureUpdateKey")
    request = schema_class(f"{module}:UpdateFeaturesRequest")(
        timeout=_CONTROLLER_TIMEOUT,
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
    _raise_if_refused(connection.call(request, timeout_ms=CONTROLLER_TIMEOUT_MS), "features")


def replica_sizes(connection: Connection) -> dict[TopicPartition, int]:
    """The bytes on disk of each partition on this broker."""
    request = schema_class("describe_log_dirs.v4.request:DescribeLogDirsRequest")(topics=None)
    return {
        (str(topic.name), int(partition.partition_index)): int(partition.partition_size)
        for directory in connection.call(request).results
        for topic in directory.topics
        for partition in topic.partitions
    }


def _raise_if_refused(response: Any, subject: str) -> None:
    """Responses of old versions may have no error code."""
    raise_for_error(
        getattr(response, "error_code", ErrorCode.none), subject, getattr(response, "error_message", None)
    )
