"""Which refusals pass, and what to do before asking again: one table for all requests."""

from enum import Enum, auto
from typing import Final

from penstock.protocol.errors import ErrorCode


class Remedy(Enum):
    ASK_AGAIN = auto()
    #: Whoever was asked is not, or no longer, in charge.
    LOOK_AROUND = auto()


REMEDIES: Final = {
    ErrorCode.broker_not_available: Remedy.LOOK_AROUND,
    ErrorCode.concurrent_transactions: Remedy.ASK_AGAIN,
    ErrorCode.coordinator_load_in_progress: Remedy.ASK_AGAIN,
    ErrorCode.coordinator_not_available: Remedy.LOOK_AROUND,
    ErrorCode.fenced_leader_epoch: Remedy.LOOK_AROUND,
    ErrorCode.inconsistent_topic_id: Remedy.LOOK_AROUND,
    ErrorCode.kafka_storage_error: Remedy.LOOK_AROUND,
    ErrorCode.leader_not_available: Remedy.LOOK_AROUND,
    ErrorCode.network_exception: Remedy.LOOK_AROUND,
    ErrorCode.not_controller: Remedy.LOOK_AROUND,
    ErrorCode.not_coordinator: Remedy.LOOK_AROUND,
    ErrorCode.not_enough_replicas: Remedy.ASK_AGAIN,
    ErrorCode.not_enough_replicas_after_append: Remedy.ASK_AGAIN,
    ErrorCode.not_leader_or_follower: Remedy.LOOK_AROUND,
    ErrorCode.offset_not_available: Remedy.ASK_AGAIN,
    ErrorCode.replica_not_available: Remedy.LOOK_AROUND,
    ErrorCode.request_timed_out: Remedy.ASK_AGAIN,
    ErrorCode.throttling_quota_exceeded: Remedy.ASK_AGAIN,
    ErrorCode.unknown_leader_epoch: Remedy.ASK_AGAIN,
    ErrorCode.unknown_topic_id: Remedy.LOOK_AROUND,
    ErrorCode.unknown_topic_or_partition: Remedy.LOOK_AROUND,
    ErrorCode.unstable_offset_commit: Remedy.ASK_AGAIN,
}

#: Brokers hear of a new topic one after the other; these pass soon (`unknown_topic_ms_max`) or not at all.
UNKNOWN_TOPIC: Final = frozenset(
    {ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id, ErrorCode.inconsistent_topic_id}
)
