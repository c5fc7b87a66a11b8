"""What the cluster verbs ask on the wire: brokers with those that are fenced, the quorum, replicas on the move."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from penstock.cli.client import Cluster, Place
from penstock.cli.failure import Failure
from penstock.cli.wire import Address, ask
from penstock.protocol.schemas import schema_class

#: The controller may be changing just now; what asks it is patient for as long as the broker in between is.
CONTROLLER_TIMEOUT_S = 15.0
REACH_TIMEOUT_S = 2.0
_BROKERS = 1
_BROKER_RESOURCE = 4
_SET, _DELETE = 0, 1
_UPGRADE, _SAFE_DOWNGRADE = 1, 2


class Broker(NamedTuple):
    id: int
    host: str
    port: int
    rack: str | None
    fenced: bool


def is_reachable(broker: Broker) -> bool:
    """From here, at the address that it advertises."""
    import socket

    try:
        socket.create_connection((broker.host, broker.port), timeout=REACH_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class QuorumReplica(NamedTuple):
    id: int
    end_offset: int
    caught_up_ms: int  # by the leader's clock; -1: never
    directory: UUID = UUID(int=0)  # of its metadata log: a node with another disk is another voter


class Quorum(NamedTuple):
    leader: int
    epoch: int
    high_watermark: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]


class Moving(NamedTuple):
    """A partition on its way: `target` is where its replicas will be."""

    target: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]


class Refused(OSError):
    """The cluster has answered, and its answer is no."""


def cluster_id(address: Address) -> str:
    return str(_describe_cluster(address).cluster_id)


def brokers(address: Address) -> list[Broker]:
    return [
        Broker(
            int(broker.broker_id),
            str(broker.host),
            int(broker.port),
            None if broker.rack is None else str(broker.rack),
            bool(getattr(broker, "is_fenced", False)),
        )
        for broker in _describe_cluster(address).brokers
    ]


def _describe_cluster(address: Address) -> Any:
    request = schema_class("describe_cluster.v2.request:DescribeClusterRequest")(
        include_cluster_authorized_operations=False, endpoint_type=_BROKERS, include_fenced_brokers=True
    )
    return ask(address, request)


def quorum(address: Address, *, timeout_s: float) -> Quorum:
    """Raises OSError when no leader answers."""
    partition = schema_class("describe_quorum.v2.request:PartitionData")(partition_index=0)
    topic = schema_class("describe_quorum.v2.request:TopicData")(
        topic_name="__cluster_metadata", partitions=(partition,)
    )
    request = schema_class("describe_quorum.v2.request:DescribeQuorumRequest")(topics=(topic,))
    answer = ask(address, request, timeout_s=timeout_s)
    _refuse_error(answer)
    found = answer.topics[0].partitions[0]
    _refuse_error(found)
    return Quorum(
        int(found.leader_id),
        int(found.leader_epoch),
        int(found.high_watermark),
        tuple(map(_replica, found.current_voters)),
        tuple(map(_replica, found.observers)),
    )


def _replica(state: Any) -> QuorumReplica:
    return QuorumReplica(
        int(state.replica_id),
        int(state.log_end_offset),
        int(getattr(state, "last_caught_up_timestamp", -1)),
        getattr(state, "replica_directory_id", None) or UUID(int=0),
    )


def reassignments(address: Address) -> dict[Place, Moving]:
    """All that are under way. Raises OSError when no controller answers."""
    request = schema_class("list_partition_reassignments.v0.request:ListPartitionReassignmentsRequest")(
        timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S), topics=None
    )
    answer = ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S)
    _refuse_error(answer)
    return {
        Place(str(topic.name), int(found.partition_index)): _moving(found)
        for topic in answer.topics
        for found in topic.partitions
    }


def _moving(found: Any) -> Moving:
    removing = tuple(map(int, found.removing_replicas))
    target = tuple(int(replica) for replica in found.replicas if int(replica) not in removing)
    return Moving(target, tuple(map(int, found.adding_replicas)), removing)


def reassign(address: Address, targets: Mapping[Place, Sequence[int] | None]) -> dict[Place, str]:
    """Ask for these replicas, or with None take back what is under way; returns what was refused, and why."""
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
    answer = ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S)
    _refuse_error(answer)
    return {
        Place(str(topic.name), int(found.partition_index)): found.error_message or found.error_code.name
        for topic in answer.responses
        for found in topic.partitions
        if found.error_code.value != 0
    }


def elect_preferred(address: Address) -> None:
    """Wherever another leads than the preferred replica and that is in sync. Raises OSError."""
    request = schema_class("elect_leaders.v2.request:ElectLeadersRequest")(
        election_type=0, topic_partitions=None, timeout=timedelta(seconds=CONTROLLER_TIMEOUT_S)
    )
    _refuse_error(ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def set_everywhere(address: Address, setting: str, value: str | None) -> None:
    """A setting of all brokers while they run; None lets each go by its own again. Raises OSError."""
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
    for response in ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S).responses:
        _refuse_error(response)


def unregister(address: Address, broker_id: int) -> None:
    """Raises OSError, also when it is refused."""
    request = schema_class("unregister_broker.v0.request:UnregisterBrokerRequest")(broker_id=broker_id)
    _refuse_error(ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def remove_voter(address: Address, cluster: str, voter: QuorumReplica) -> None:
    """Raises OSError, also when it is refused."""
    request = schema_class("remove_raft_voter.v0.request:RemoveRaftVoterRequest")(
        cluster_id=cluster, voter_id=voter.id, voter_directory_id=voter.directory
    )
    _refuse_error(ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def set_features(address: Address, levels: Mapping[str, int], lowered: Sequence[str]) -> None:
    """All of them or none. Raises OSError, also when it is refused."""
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
    _refuse_error(ask(address, request, timeout_s=CONTROLLER_TIMEOUT_S))


def _refuse_error(answer: Any) -> None:
    code = getattr(answer, "error_code", None)
    if code is not None and code.value != 0:
        raise Refused(getattr(answer, "error_message", None) or code.name.replace("_", " "))


def an_address(cluster: Cluster) -> Address:
    """Of a broker that answers. Raises Failure."""
    for found in sorted(cluster.metadata().brokers.values(), key=lambda broker: int(broker.id)):
        broker = Broker(int(found.id), str(found.host), int(found.port), None, False)
        if is_reachable(broker):
            return broker.host, broker.port
    raise Failure("no broker of the cluster can be reached at the address that it advertises")
