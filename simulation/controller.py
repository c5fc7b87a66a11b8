"""What the active controller does: answers brokers and operators with decisions, fences who is silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.cluster.controller.alter_partition import (
    LOST_DIRECTORY,
    AlterPartition,
    AlterPartitionResult,
    DirectoryAssignment,
    IsrMember,
    alter_partitions,
    assign_replicas_to_dirs,
)
from penstock.cluster.controller.brokers import BrokerRegistration, BrokerSessions, register_broker
from penstock.cluster.controller.create_topics import NewTopic, Randomness, TopicDefaults, create_topics
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.elect_leaders import (
    ElectionType,
    balance_leaders,
    elect_leaderless_partitions,
    elect_leaders,
)
from penstock.cluster.controller.heartbeats import BrokerHeartbeat, fence_brokers, heartbeat
from penstock.cluster.controller.reassignment import Reassignment, alter_reassignments
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ErrorCode
from simulation.isr import IsrAsk
from simulation.lifecycle import LostAsk
from simulation.network import Respond

if TYPE_CHECKING:
    from simulation.node import Node

_TOPIC_RULES: Final = TopicDefaults(partitions=1, replication_factor=3, partitions_max=10_000)
_BALANCED_AT_ONCE: Final = 8


class Controller:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.rules = node.cluster.rules
        #: Who led before this node, as far as it knows.
        self.deposed: int | None = None
        timings = node.timings
        self.sessions = BrokerSessions(
            session_timeout_ms=timings.session_ms, fetch_timeout_ms=timings.raft.fetch_timeout_ms
        )
        self._term = 0

    def became_active(self) -> None:
        node = self.node
        node.world.note("active controller", node.id, "epoch", node.quorum.core.epoch)
        self.sessions.elected(node.image, node.now_ms(), self.deposed)
        self._term += 1
        self._watch_sessions(self._term)
        node.after(node.timings.session_ms, self._balance, self._term)

    def became_inactive(self) -> None:
        self._term += 1

    def receive(self, kind: str, request: Any, respond: Respond) -> None:
        metadata = self.node.metadata
        if not metadata.is_active:
            respond(ErrorCode.not_controller)
            return
        match kind:
            case "add_voter":
                self.node.quorum.add_voter(request, lambda reply: respond(reply.error))
            case "remove_voter":
                self.node.quorum.remove_voter(request, lambda reply: respond(reply.error))
            case "heartbeat":
                now_ms = self.node.now_ms()
                self.sessions.contacted(
                    request.broker_id, request.broker_epoch, now_ms, metadata_offset=request.metadata_offset
                )
                self.node.invariants.heartbeat_accepted(self.node, request.broker_id, request.broker_epoch)
                metadata.propose(lambda image, _: self._heartbeat(image, request), respond)
            case "alter_partition":
                metadata.propose(
                    lambda image, _: self._alter_partition(image, request),
                    lambda reply: respond(_isr_reply(reply)),
                )
            case _:
                metadata.propose(lambda image, offset: self._decide(kind, image, offset, request), respond)

    def _decide(self, kind: str, image: ClusterImage, offset: int, request: Any) -> Decision[Any]:
        match kind:
            case "register":
                return self._register(image, offset, request)
            case "lost":
                return self._lost(image, request)
            case "create_topics":
                return self._create_topics(image, request)
            case "reassign":
                wanted: tuple[Reassignment, ...] = request
                return alter_reassignments(image, wanted, rules=self.rules)
            case "elect":
                return elect_leaders(image, request, election=ElectionType.PREFERRED, rules=self.rules)
        raise AssertionError(f"nobody answers {kind}")

    def _register(self, image: ClusterImage, offset: int, request: BrokerRegistration) -> Decision[int]:
        self.node.invariants.registration_decided(request.broker_id, request.incarnation)
        silent_ms = self.sessions.silent_ms(request.broker_id, self.node.now_ms())
        return register_broker(image, request, broker_epoch=offset, silent_ms=silent_ms, rules=self.rules)

    def _heartbeat(self, image: ClusterImage, beat: BrokerHeartbeat) -> Decision[Any]:
        committed = self.node.metadata.applied - 1
        return heartbeat(image, self.sessions, beat, committed_offset=committed, rules=self.rules)

    def _alter_partition(self, image: ClusterImage, ask: IsrAsk) -> Decision[Any]:
        item = AlterPartition(
            topic_id=ask.key.topic_id,
            partition=ask.key.partition,
            leader_epoch=ask.proposal.leader_epoch,
            partition_epoch=ask.proposal.partition_epoch,
            isr=tuple(IsrMember(*member) for member in ask.proposal.isr),
        )
        return alter_partitions(
            image, (item,), broker_id=ask.broker_id, broker_epoch=ask.broker_epoch, rules=self.rules
        )

    def _lost(self, image: ClusterImage, ask: LostAsk) -> Decision[Any]:
        items = [DirectoryAssignment(key.topic_id, key.partition, LOST_DIRECTORY) for key in ask.keys]
        return assign_replicas_to_dirs(
            image, items, broker_id=ask.broker_id, broker_epoch=ask.broker_epoch, rules=self.rules
        )

    def _create_topics(self, image: ClusterImage, topics: tuple[NewTopic, ...]) -> Decision[Any]:
        world = self.node.world
        chance = Randomness(draw=world.draw, fresh_id=lambda: UUID(int=world.random.getrandbits(100) + 1000))
        return create_topics(image, topics, rules=_TOPIC_RULES, chance=chance)

    # --- unasked ---

    def _watch_sessions(self, term: int) -> None:
        node = self.node
        if term != self._term or not node.metadata.is_active:
            return
        if self.sessions.expired(node.image, node.now_ms()):
            node.metadata.propose(lambda image, _: self._fence(image), lambda _: None)
        node.after(max(5, node.timings.heartbeat_ms // 4), self._watch_sessions, term)

    def _fence(self, image: ClusterImage) -> Decision[None]:
        silent = self.sessions.expired(image, self.node.now_ms())
        if silent:
            self.node.world.note("fencing", *silent)
        return fence_brokers(image, silent, rules=self.rules) if silent else Decision((), None)

    def _balance(self, term: int) -> None:
        node = self.node
        if term != self._term or not node.metadata.is_active:
            return
        node.metadata.propose(
            lambda image, _: elect_leaderless_partitions(
                image, rules=self.rules, partitions_max=_BALANCED_AT_ONCE
            ),
            lambda _: None,
        )
        node.metadata.propose(
            lambda image, _: balance_leaders(image, rules=self.rules, partitions_max=_BALANCED_AT_ONCE),
            lambda _: None,
        )
        node.after(node.timings.session_ms, self._balance, term)


def _isr_reply(reply: Any) -> Any:
    """An error code, or the partition epoch."""
    if isinstance(reply, ErrorCode):
        return reply
    result: AlterPartitionResult = reply[0]
    if result.error is not ErrorCode.none or result.state is None:
        return result.error
    return result.state.partition_epoch
