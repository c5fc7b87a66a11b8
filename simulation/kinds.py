"""Which shard lives on which internal topic, and what its coordinator does unasked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import CONSUMER_OFFSETS, SCHEDULE, SHARE_GROUP_STATE, TRANSACTION_STATE
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.transactions.messages import TransactionConfig
from penstock.transactions.transaction_shard import TransactionCoordinatorShard
from simulation.burying import bury
from simulation.coordinator import Coordinator
from simulation.image_topics import ImageTopics
from simulation.markers import deliver_markers
from simulation.releasing import ScheduleHost, new_schedule, release

if TYPE_CHECKING:
    from simulation.replica import Replica

GROUP_SETTINGS: Final = GroupCoordinatorConfig(
    session_timeout_min_ms=50,
    initial_rebalance_delay_ms=20,
    new_member_join_timeout_ms=1_000,
    consumer_session_timeout_ms=300,
)
TRANSACTION_SETTINGS: Final = TransactionConfig(timed_out_check_interval_ms=40, two_phase_enabled=True)


class Kind(NamedTuple):
    new_shard: Callable[[Replica], Any]
    #: Called with every new coordinator: from then on it works until it is closed.
    serve: Callable[[Any], None] | None = None
    runtime: type[Coordinator] = Coordinator


def _groups(replica: Replica) -> GroupCoordinatorShard:
    return GroupCoordinatorShard(GROUP_SETTINGS, ImageTopics(replica.node))


def _transactions(replica: Replica) -> TransactionCoordinatorShard:
    cluster = replica.node.cluster
    return TransactionCoordinatorShard(
        TRANSACTION_SETTINGS, transaction_version=lambda: cluster.transaction_version
    )


def _share_state(replica: Replica) -> ShareCoordinatorShard:
    return ShareCoordinatorShard(updates_per_snapshot=20)


KINDS: Final = {
    CONSUMER_OFFSETS: Kind(_groups),
    TRANSACTION_STATE: Kind(_transactions, deliver_markers),
    SHARE_GROUP_STATE: Kind(_share_state, bury),
    SCHEDULE: Kind(new_schedule, release, ScheduleHost),
}
