"""Which requests this node understands, and in which versions: only those whose meaning is built.

Handlers are imported, and their schemas loaded, when the first request of their kind arrives.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

PRODUCE: Final = 0
FETCH: Final = 1
API_VERSIONS: Final = 18


class Api(NamedTuple):
    key: int
    name: str
    min_version: int
    max_version: int

    @property
    def handler(self) -> Callable[..., Any]:
        return import_module(f"penstock.broker.handlers.{self.name}").handle  # type: ignore[no-any-return]


APIS: Final = {
    api.key: api
    for api in (
        Api(PRODUCE, "produce", 3, 13),
        Api(FETCH, "fetch", 4, 18),
        Api(2, "list_offsets", 1, 11),
        Api(3, "metadata", 0, 13),
        Api(8, "offset_commit", 2, 10),
        Api(9, "offset_fetch", 1, 10),
        Api(10, "find_coordinator", 0, 6),
        Api(11, "join_group", 0, 9),
        Api(12, "heartbeat", 0, 4),
        Api(13, "leave_group", 0, 5),
        Api(14, "sync_group", 0, 5),
        Api(15, "describe_groups", 0, 6),
        Api(16, "list_groups", 0, 5),
        Api(API_VERSIONS, "api_versions", 0, 4),
        Api(19, "create_topics", 2, 7),
        Api(20, "delete_topics", 1, 6),
        Api(21, "delete_records", 0, 2),
        Api(22, "init_producer_id", 0, 5),
        Api(23, "offset_for_leader_epoch", 2, 4),
        Api(32, "describe_configs", 1, 4),
        Api(33, "alter_configs", 0, 2),
        Api(35, "describe_log_dirs", 1, 5),
        Api(37, "create_partitions", 0, 3),
        Api(42, "delete_groups", 0, 2),
        Api(44, "incremental_alter_configs", 0, 1),
        Api(47, "offset_delete", 0, 0),
        Api(43, "elect_leaders", 0, 2),
        Api(45, "alter_partition_reassignments", 0, 1),
        Api(46, "list_partition_reassignments", 0, 0),
        Api(52, "vote", 0, 2),
        Api(53, "begin_quorum_epoch", 0, 1),
        Api(54, "end_quorum_epoch", 0, 1),
        Api(55, "describe_quorum", 0, 2),
        Api(56, "alter_partition", 2, 3),
        Api(57, "update_features", 0, 2),
        Api(58, "envelope", 0, 0),
        Api(59, "fetch_snapshot", 0, 1),
        Api(60, "describe_cluster", 0, 2),
        Api(61, "describe_producers", 0, 0),
        Api(62, "broker_registration", 0, 4),
        Api(63, "broker_heartbeat", 0, 1),
        Api(64, "unregister_broker", 0, 0),
        Api(67, "allocate_producer_ids", 0, 0),
        Api(73, "assign_replicas_to_dirs", 0, 0),
        Api(75, "describe_topic_partitions", 0, 0),
        Api(80, "add_raft_voter", 0, 1),
        Api(81, "remove_raft_voter", 0, 0),
        Api(82, "update_raft_voter", 0, 0),
    )
}

#: librdkafka before 2.0 drops compression unless Produce v0 is on offer; as in Apache Kafka it is advertised
#: and then refused.
ADVERTISED_MIN: Final = {PRODUCE: 0}
