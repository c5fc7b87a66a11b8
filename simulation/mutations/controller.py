"""Bugs of the controller's decisions, of the brokers' sessions, and of the way to the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.controller.channel import ControllerChannel
from penstock.broker.controller.controller import Controller
from penstock.broker.partition import partition as broker_partition
from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.cluster import image as cluster_image
from penstock.cluster import topic_settings
from penstock.cluster.controller import alter_partition, brokers, election, heartbeats
from penstock.cluster.controller.partition_change import PartitionChangeBuilder, registered_broker
from penstock.replication.leader import LeaderRules
from simulation.mutation import Mutation, Patch, Traps

# -- decisions -----------------------------------------------------------------------------------------


def _same_epoch(old: Any, record: Any) -> Any:
    return _changed_partition(old, record)._replace(leader_epoch=old.leader_epoch)


def _take_no_answer_for_final(self: LeaderRules, *, final: bool) -> None:
    _isr_refused(self, final=True)


_changed_partition = cluster_image.changed_partition
_isr_refused = LeaderRules.isr_refused

# -- sessions and channels -----------------------------------------------------------------------------


def _keep_sessions(self: Controller) -> None:
    if self.sessions.next_deadline_ms() is None:
        _begin_sessions(self)


def _no_grace(self: Controller) -> None: ...


def _any_epoch(image: Any, broker_id: int, broker_epoch: int) -> Any:
    return registered_broker(image, broker_id)


async def _ask_the_last(
    self: ControllerChannel, here: Callable[[], Awaitable[Any]], there: Any, left_s: float
) -> Any:
    if self.last_controller_id is None or self._metadata.is_active:
        return await _ask_once(self, here, there, left_s)
    return await there(self.last_controller_id, left_s)


async def _registered_and_ready(self: BrokerLifecycleManager, last_epoch: int, timeout_s: float) -> int:
    epoch = await _registered(self, last_epoch, timeout_s)
    self._is_ready = True
    return epoch


async def _keep_old_epoch(self: BrokerLifecycleManager) -> None:
    epoch = self.broker_epoch
    await _register_again(self)
    self.broker_epoch = epoch


async def _stop_beating(self: BrokerLifecycleManager) -> None:
    if not self.is_fenced:
        await self._rest(self._interval_s)
    while True:
        await self._beat_once()
        self._changed.set()
        if self._controller_unreachable:
            return
        await self._rest(self._pause_s())


async def _propose_twice(self: Controller, decide: Callable[[Any], Any]) -> Any:
    decision = decide(self._metadata.image)
    return await self.propose(lambda image: decision) if decision.records else decision.reply


async def _fence_what_was_silent(self: Controller) -> None:
    from penstock.cluster.controller.heartbeats import fence_brokers

    image = self._metadata.image
    silent = self.sessions.expired(image, self._now_ms())
    if silent:
        decision = fence_brokers(image, silent, rules=self.rules())
        await self.propose(lambda image: decision)


_begin_sessions = Controller._begin_sessions
_ask_once = ControllerChannel._ask_once
_registered = BrokerLifecycleManager._registered
_register_again = BrokerLifecycleManager._register_again

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="image-waited-for-for-ever",
        sentence="A leader whose request for another in-sync set was lost, or cut off, waits for its image for ever.",
        trap=Traps.LOST_DECISION,
        faults=("late requests", "kill", "cut", "suspend"),
        apis=(56,),
        patches=(
            Patch(LeaderRules, "isr_refused", _take_no_answer_for_final),
            Patch(LeaderRules, "_awaits_image", lambda self: self._announced_ms is not None),
        ),
    ),
    Mutation(
        name="elect-anyone",
        sentence="The controller elects a live replica, in sync or not.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(election, "is_complete", lambda candidates, replica: candidates.is_active(replica)),),
    ),
    Mutation(
        name="unclean-restart-trusted",
        sentence="A replica that lost power without syncing stays in sync by the book.",
        trap=Traps.UNCLEAN_RESTART,
        faults=("power loss", "power loss everywhere"),
        # The broker itself reports a replica that is still eligible, so that guard goes too.
        patches=(
            Patch(PartitionChangeBuilder, "doubt", lambda self, broker: None),
            Patch(ReplicaManager, "_may_lack_tail", lambda self, log, state: False),
        ),
    ),
    Mutation(
        name="lost-disk-trusted",
        sentence="A replica that comes back with another disk stays in sync by the book.",
        trap=Traps.CORRUPTION,
        faults=("disk lost",),
        patches=(Patch(brokers, "has_other_directory", lambda change, registration: False),),
    ),
    Mutation(
        name="leader-epoch-not-raised",
        sentence="A new leader begins no new leader epoch.",
        trap=Traps.FENCE,
        patches=(Patch(cluster_image, "changed_partition", _same_epoch),),
    ),
    Mutation(
        name="stale-partition-epoch-accepted",
        sentence="The controller takes an ISR change that was decided on an older state.",
        trap=Traps.FENCE,
        faults=("late requests", "kill", "suspend", "reassignment"),
        apis=(56,),
        patches=(Patch(alter_partition, "refuse_other_epochs", lambda partition, item, broker_id: None),),
    ),
    Mutation(
        name="stale-broker-epoch-accepted",
        sentence="A replica enters the ISR on fetches of its earlier life.",
        trap=Traps.FENCE,
        patches=(
            Patch(alter_partition, "is_eligible", lambda image, member: True),
            Patch(LeaderRules, "_is_heard", lambda self, follower: True),
            Patch(AlterPartitionManager, "_is_eligible", lambda self, broker_id, broker_epoch: True),
        ),
    ),
    Mutation(
        name="eligible-though-left-behind",
        sentence="Who leaves the ISR stays eligible to lead although the high watermark goes on without it.",
        trap=Traps.MAXIMAL_ISR,
        # Leaders hold still while anyone else is eligible, so that guard goes too.
        patches=(
            Patch(PartitionChangeBuilder, "_below_min_isr", lambda self: True),
            Patch(topic_settings, "isr_floor", lambda partition: 1),
            Patch(broker_partition, "isr_floor", lambda partition: 1),
        ),
    ),
    Mutation(
        name="second-broker-accepted",
        sentence="A second broker takes the id of one that lives.",
        trap=Traps.TWO_BROKERS,
        faults=("second broker with one id", "kill", "suspend"),
        patches=(
            Patch(brokers, "refuse_second_incarnation", lambda known, registration, silent_ms, rules: None),
        ),
    ),
    Mutation(
        name="copied-controller-accepted",
        sentence="A copy of the controller's own data folder counts as the controller's process.",
        trap=Traps.TWO_BROKERS,
        faults=("second broker with one id", "kill", "suspend"),
        patches=(Patch(Controller, "_silent_ms", lambda self, registration: None),),
    ),
    Mutation(
        name="sessions-of-an-earlier-term",
        sentence="A controller that is elected again fences brokers by the sessions of its last term.",
        trap=Traps.FENCE,
        patches=(Patch(Controller, "_begin_sessions", _keep_sessions),),
    ),
    Mutation(
        name="suspended-controller-fences",
        sentence="A controller that was suspended takes brokers for silent that it did not hear.",
        trap=Traps.FENCE,
        faults=("suspend", "slow disk"),
        patches=(Patch(Controller, "_extend_sessions_after_pause", _no_grace),),
    ),
    Mutation(
        name="fenced-by-an-old-image",
        sentence="The controller fences brokers by a decision on the image before the last decisions.",
        trap=Traps.FENCE,
        faults=("suspend", "slow disk", "one-way cut", "reassignment"),
        patches=(Patch(Controller, "_fence_silent", _fence_what_was_silent),),
    ),
    Mutation(
        name="decided-on-an-old-image",
        sentence="A heartbeat is decided on the published image, while earlier decisions are not in it yet.",
        trap=Traps.FENCE,
        faults=("kill", "slow disk", "clean restart", "power loss everywhere"),
        patches=(Patch(Controller, "propose_if_needed", _propose_twice),),
    ),
    Mutation(
        name="heartbeat-of-an-earlier-epoch",
        sentence="The controller takes the heartbeat of an earlier incarnation for one of the current.",
        trap=Traps.TWO_BROKERS,
        faults=("late requests", "kill", "power loss", "second broker with one id"),
        apis=(63,),
        patches=(
            Patch(heartbeats, "current_broker", _any_epoch),
            Patch(heartbeats, "has_caught_up", lambda beat: True),
        ),
    ),
    Mutation(
        name="broker-ready-too-early",
        sentence="A broker asks to be unfenced before its partitions follow the image with its registration.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(BrokerLifecycleManager, "_registered", _registered_and_ready),),
    ),
    Mutation(
        name="old-broker-epoch-kept",
        sentence="A broker that registers again goes on with its old broker epoch.",
        trap=Traps.FENCE,
        faults=("broker unregistered", "suspend"),
        patches=(Patch(BrokerLifecycleManager, "_register_again", _keep_old_epoch),),
    ),
    Mutation(
        name="heartbeats-end-with-an-error",
        sentence="A broker that does not reach the controller once sends no more heartbeats.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(BrokerLifecycleManager, "_beat", _stop_beating),),
    ),
    Mutation(
        name="last-controller-for-ever",
        sentence="A node sends its requests to the controller that it knew first.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(ControllerChannel, "_ask_once", _ask_the_last),),
    ),
)
