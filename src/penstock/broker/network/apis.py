"""Which requests this node understands, and in which versions: only those whose meaning is built.

Handlers are imported, and their schemas loaded, when the first request of their kind arrives.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

from penstock.protocol.share_failures import SHARE_FAILURES

PRODUCE: Final = 0
FETCH: Final = 1
SHARE_FETCH: Final = 78
SHARE_ACKNOWLEDGE: Final = 79
API_VERSIONS: Final = 18
#: Above every version there is.
_NO_VERSION: Final = 1 << 15


class Api(NamedTuple):
    key: int
    name: str
    min_version: int
    max_version: int
    #: Answered by the active controller, whichever node is asked.
    relay: bool = False
    #: Answered before this node has its place in the cluster; all else is cut off until then.
    while_starting: bool = False
    #: Means nothing on a node that is controller only, and is not on offer there.
    broker_only: bool = False
    #: Waits for what other clients do: given up when the one who asked has gone.
    waits_for_others: bool = False
    #: Reads much, and changes nothing: where the answer comes later, a connection has one such request under way, which
    #: is given up when the one who asked has gone.
    is_costly: bool = False
    #: From this version on the request is one that only nodes send: refused on listeners for clients.
    node_only_from: int = _NO_VERSION

    def max_version_on(self, *, for_nodes: bool) -> int:
        """The newest version served on a listener; below `min_version` where the API is not served at all."""
        return self.max_version if for_nodes else min(self.max_version, self.node_only_from - 1)

    @property
    def is_local(self) -> Callable[[Any], bool] | None:
        module = import_module(f"penstock.broker.handlers.{self.name}")
        return getattr(module, "is_local", None) if self.relay else None

    @property
    def handler(self) -> Callable[..., Any]:
        return import_module(f"penstock.broker.handlers.{self.name}").handle  # type: ignore[no-any-return]


APIS: Final = {
    api.key: api
    for api in (
        Api(PRODUCE, "produce", 3, 13, broker_only=True),
        Api(FETCH, "fetch", 4, 18, while_starting=True),
        Api(2, "list_offsets", 1, 11, broker_only=True),
        Api(3, "metadata", 0, 13, is_costly=True),
        Api(8, "offset_commit", 2, 10, broker_only=True),
        Api(9, "offset_fetch", 1, 10, broker_only=True),
        Api(10, "find_coordinator", 0, 6),
        Api(11, "join_group", 0, 9, broker_only=True, waits_for_others=True),
        Api(12, "heartbeat", 0, 4, broker_only=True),
        Api(13, "leave_group", 0, 5, broker_only=True),
        Api(14, "sync_group", 0, 5, broker_only=True, waits_for_others=True),
        Api(15, "describe_groups", 0, 6, broker_only=True, is_costly=True),
        Api(16, "list_groups", 0, 5, broker_only=True, is_costly=True),
        Api(API_VERSIONS, "api_versions", 0, 4, while_starting=True),
        Api(19, "create_topics", 2, 7, relay=True),
        Api(20, "delete_topics", 1, 6, relay=True),
        Api(21, "delete_records", 0, 2, broker_only=True),
        Api(22, "init_producer_id", 0, 6, broker_only=True),
        Api(23, "offset_for_leader_epoch", 2, 4, broker_only=True),
        Api(24, "add_partitions_to_txn", 0, 5, broker_only=True, node_only_from=4),
        Api(25, "add_offsets_to_txn", 0, 4, broker_only=True),
        Api(26, "end_txn", 0, 5, broker_only=True),
        Api(27, "write_txn_markers", 1, 2, broker_only=True, node_only_from=0),
        Api(28, "txn_offset_commit", 0, 5, broker_only=True),
        Api(29, "describe_acls", 1, 3),
        Api(30, "create_acls", 1, 3),
        Api(31, "delete_acls", 1, 3),
        Api(32, "describe_configs", 1, 4, is_costly=True),
        Api(33, "alter_configs", 0, 2, relay=True),
        Api(34, "alter_replica_log_dirs", 1, 2, broker_only=True),
        Api(35, "describe_log_dirs", 1, 5, broker_only=True, is_costly=True),
        Api(37, "create_partitions", 0, 3, relay=True),
        Api(42, "delete_groups", 0, 2, broker_only=True),
        Api(43, "elect_leaders", 0, 2, relay=True),
        Api(44, "incremental_alter_configs", 0, 1, relay=True),
        Api(45, "alter_partition_reassignments", 0, 1, relay=True),
        Api(46, "list_partition_reassignments", 0, 0, relay=True),
        Api(47, "offset_delete", 0, 0, broker_only=True),
        Api(52, "vote", 0, 2, while_starting=True, node_only_from=0),
        Api(53, "begin_quorum_epoch", 0, 1, while_starting=True, node_only_from=0),
        Api(54, "end_quorum_epoch", 0, 1, while_starting=True, node_only_from=0),
        Api(55, "describe_quorum", 0, 2, relay=True, while_starting=True),
        Api(56, "alter_partition", 3, 3, while_starting=True, node_only_from=0),
        Api(57, "update_features", 0, 2, relay=True),
        Api(58, "envelope", 0, 0, while_starting=True, node_only_from=0),
        Api(59, "fetch_snapshot", 0, 1, while_starting=True, node_only_from=0),
        Api(60, "describe_cluster", 0, 2, while_starting=True),
        Api(61, "describe_producers", 0, 0, broker_only=True, is_costly=True),
        Api(62, "broker_registration", 0, 4, while_starting=True, node_only_from=0),
        Api(63, "broker_heartbeat", 0, 1, while_starting=True, node_only_from=0),
        Api(64, "unregister_broker", 0, 0, relay=True),
        Api(65, "describe_transactions", 0, 0, broker_only=True, is_costly=True),
        Api(66, "list_transactions", 0, 2, broker_only=True, is_costly=True),
        Api(67, "allocate_producer_ids", 0, 0, while_starting=True, node_only_from=0),
        Api(68, "consumer_group_heartbeat", 0, 1, broker_only=True),
        Api(69, "consumer_group_describe", 0, 1, broker_only=True, is_costly=True),
        Api(71, "get_telemetry_subscriptions", 0, 0, broker_only=True),
        Api(72, "push_telemetry", 0, 0, broker_only=True),
        Api(73, "assign_replicas_to_dirs", 0, 0, while_starting=True, node_only_from=0),
        Api(74, "list_config_resources", 0, 1, is_costly=True),
        Api(75, "describe_topic_partitions", 0, 0, is_costly=True),
        Api(76, "share_group_heartbeat", 1, 1, broker_only=True),
        Api(77, "share_group_describe", 1, 1, broker_only=True, is_costly=True),
        Api(SHARE_FETCH, "share_fetch", 1, 2, broker_only=True),
        Api(SHARE_ACKNOWLEDGE, "share_acknowledge", 1, 2, broker_only=True),
        Api(80, "add_raft_voter", 0, 1, relay=True, while_starting=True, node_only_from=0),
        Api(81, "remove_raft_voter", 0, 0, relay=True, while_starting=True),
        Api(82, "update_raft_voter", 0, 0, relay=True, while_starting=True, node_only_from=0),
        Api(83, "initialize_share_group_state", 0, 0, broker_only=True, node_only_from=0),
        Api(84, "read_share_group_state", 0, 0, broker_only=True, node_only_from=0),
        Api(85, "write_share_group_state", 0, 1, broker_only=True, node_only_from=0),
        Api(86, "delete_share_group_state", 0, 0, broker_only=True, node_only_from=0),
        Api(87, "read_share_group_state_summary", 0, 1, broker_only=True, node_only_from=0),
        Api(88, "streams_group_heartbeat", 0, 0, broker_only=True),
        Api(89, "streams_group_describe", 0, 0, broker_only=True),
        Api(90, "describe_share_group_offsets", 0, 1, broker_only=True, is_costly=True),
        Api(91, "alter_share_group_offsets", 0, 0, broker_only=True),
        Api(92, "delete_share_group_offsets", 0, 0, broker_only=True),
    )
}

#: Our own, hand packed, and not among those that ApiVersions lists: SCHEDULE is between nodes only, SHARE_FAILURES for
#: our client, which knows by a share group's settings that the brokers are ours.
SCHEDULE: Final = 30_000
PRIVATE_APIS: Final = {
    SCHEDULE: Api(SCHEDULE, "schedule", 0, 0, broker_only=True, node_only_from=0),
    SHARE_FAILURES: Api(SHARE_FAILURES, "share_failures", 0, 0, broker_only=True),
}

#: librdkafka before 2.0 drops compression unless Produce v0 is on offer; as in Apache Kafka it is advertised
#: and then refused.
ADVERTISED_MIN: Final = {PRODUCE: 0}
