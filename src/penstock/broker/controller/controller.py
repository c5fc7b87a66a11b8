"""What the active controller does besides deciding on request: it watches brokers and keeps leaders in place.

What a lone node does not need in order to start is imported when it is first used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.broker.topic_settings import node_layers
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.controller.sessions import BrokerSessions
from penstock.cluster.decision import Decision, UncleanElection
from penstock.cluster.effective import Layer
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.leader_care import LeaderCare
    from penstock.broker.node import Node
    from penstock.cluster.controller.brokers import BrokerRegistration
    from penstock.cluster.controller.heartbeats import Heartbeat, HeartbeatReply

logger = logging.getLogger("penstock.controller")

Reply = TypeVar("Reply")

#: How often there is a look at what nobody asks for.
_LOOK_S: Final = 0.5
_LOOK_S_MIN: Final = 0.02


class Controller:
    """Built on every node; at work only between `became_active` and `became_inactive`."""

    def __init__(self, node: Node) -> None:
        settings = node.settings
        self._node = node
        self._heartbeat_ms = settings.integer("broker.heartbeat.interval.ms")
        self._session_ms = settings.integer("broker.session.timeout.ms")
        self.sessions = BrokerSessions(session_timeout_ms=self._session_ms)
        self._layers: tuple[Layer, ...] | None = None
        self._rules = ControllerRules()
        self._care: LeaderCare | None = None
        self._watching: asyncio.Task[None] | None = None
        #: Over which connection each broker was last heard of.
        self._heard_over: dict[int, Connection] = {}

    def __repr__(self) -> str:
        return f"<Controller {'active' if self._watching else 'inactive'} {self.sessions}>"

    # -- life ----------------------------------------------------------------------------------------

    def became_active(self) -> None:
        """This node's decisions count from now on: `node.metadata` says so, in the loop."""
        node = self._node
        self.became_inactive()
        node.metrics.controller_elections += 1
        self._begin_sessions()
        self._care = None
        self._watching = node.spawn(self._watch())

    def _begin_sessions(self) -> None:
        """Who decided before has been silent since it last answered this node; everyone else begins afresh.

        It gets the time of two heartbeats nevertheless, in case it lives and finds us only now.
        """
        node = self._node
        spent_ms = max(self._session_ms - 2 * self._heartbeat_ms, 0)
        silent_ms = min(node.lifecycle.silent_ms(), spent_ms)
        self.sessions = BrokerSessions(
            session_timeout_ms=self._session_ms,
            fetch_timeout_ms=silent_ms,
            heartbeat_interval_ms=self._heartbeat_ms,
        )
        self.sessions.elected(node.image, self._now_ms(), node.channel.last_controller_id)

    def became_inactive(self) -> None:
        """Another node decides, or nobody does; also called when the node stops."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._heard_over.clear()

    # -- deciding ------------------------------------------------------------------------------------

    def rules(self) -> ControllerRules:
        """The settings of the cluster as they are now."""
        layers = node_layers(self._node.settings, self._node.image)
        if layers != self._layers:
            self._layers = layers
            self._rules = ControllerRules(node=layers, heartbeat_interval_ms=self._heartbeat_ms)
        return self._rules

    async def propose(self, decide: Callable[[ClusterImage], Decision[Reply]]) -> Reply:
        """As `node.metadata.propose`; elections that may lose something are reported once they are committed."""
        unclean: tuple[UncleanElection, ...] = ()

        def noting(image: ClusterImage) -> Decision[Reply]:
            nonlocal unclean
            decision = decide(image)
            unclean = decision.unclean
            return decision

        reply = await self._node.metadata.propose(noting)
        for election in unclean:
            self._report(election)
        return reply

    async def propose_if_needed(self, decide: Callable[[ClusterImage], Decision[Reply]]) -> Reply:
        """What changes nothing now is not put in the queue."""
        decision = decide(self._node.image)
        return await self.propose(decide) if decision.records else decision.reply

    def _report(self, election: UncleanElection) -> None:
        self._node.metrics.unclean_elections += 1
        logger.warning(
            "unclean election: what only others had is lost",
            extra={
                "topic": election.topic,
                "partition": election.partition,
                "old_leader": election.old_leader,
                "leader": election.leader,
                "epoch": election.leader_epoch,
            },
        )

    # -- brokers -------------------------------------------------------------------------------------

    async def register(self, registration: BrokerRegistration, *, previous_epoch: int) -> int:
        """The broker's epoch. It was clean only if it ended as the incarnation that the cluster knows."""
        from penstock.broker.registration import with_feature_levels
        from penstock.cluster.controller.brokers import register_broker

        node = self._node
        broker_id = registration.broker_id

        def decide(image: ClusterImage) -> Decision[int]:
            known = image.brokers.get(broker_id)
            was_clean = previous_epoch >= 0 and (known is None or known.epoch == previous_epoch)
            joined = register_broker(
                image,
                registration._replace(was_clean=was_clean),
                broker_epoch=node.metadata.next_offset,
                silent_ms=self._silent_ms(registration),
                rules=self.rules(),
            )
            return with_feature_levels(node, image, joined, raise_them=False)

        epoch = await self.propose(decide)
        self.sessions.contacted(broker_id, epoch, self._now_ms())
        logger.info("broker registered", extra={"broker": broker_id, "epoch": epoch})
        return epoch

    async def heartbeat(self, beat: Heartbeat, connection: Connection | None = None) -> HeartbeatReply:
        """Raises NOT_CONTROLLER, STALE_BROKER_EPOCH."""
        from penstock.cluster.controller.heartbeats import heartbeat

        node = self._node
        if not node.metadata.is_active:
            raise ApiError(ErrorCode.not_controller)

        def decide(image: ClusterImage) -> Decision[HeartbeatReply]:
            return heartbeat(
                image, self.sessions, beat, committed_offset=node.metadata.applied_offset, rules=self.rules()
            )

        self._contacted(beat, connection)
        return await self.propose_if_needed(decide)

    def _contacted(self, beat: Heartbeat, connection: Connection | None) -> None:
        """It is alive from its arrival on, however long decisions take."""
        broker, epoch = beat.broker_id, beat.broker_epoch
        known = self._node.image.brokers.get(broker)
        if known is None or known.epoch != epoch:
            return
        self.sessions.contacted(broker, epoch, self._now_ms(), metadata_offset=beat.metadata_offset)
        if connection is not None and connection.is_open:
            self._heard_over[broker] = connection
            connection.on_lost = partial(self._connection_lost, broker, epoch, connection)

    def _connection_lost(self, broker: int, epoch: int, connection: Connection) -> None:
        """Unless it has been heard of over another one since, or by another controller."""
        if self._heard_over.get(broker) is connection:
            del self._heard_over[broker]
            self.sessions.connection_lost(broker, epoch, self._now_ms())

    def _silent_ms(self, registration: BrokerRegistration) -> int | None:
        """None: the incarnation before is known to be gone, because this very process holds its folder's lock."""
        node = self._node
        own_folder = registration.log_dirs == (node.store.directory_id,)
        if registration.broker_id == node.node_id and own_folder:
            return None
        return self.sessions.silent_ms(registration.broker_id, self._now_ms()) or 0

    # -- watching ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            pause_s = self._pause_s()
            started_ms = self._now_ms()
            await asyncio.sleep(pause_s)
            try:
                self._forgive_own_pause(self._now_ms() - started_ms - pause_s * 1000)
                await self._fence_silent()
                await self._leaders().look(self._now_ms())
            except ApiError as error:
                # Nothing has changed, or another node decides by now: the next look sees.
                logger.info("decision not made", extra={"reason": error.message or error.code.name})
            except Exception:
                # While this node decides nobody else watches, so one look that fails is not the last.
                logger.exception("cannot look after brokers and leaders")

    def _leaders(self) -> LeaderCare:
        """Begun anew with every term: a new controller does not know who has just come."""
        if self._care is None:
            from penstock.broker.leader_care import LeaderCare

            self._care = LeaderCare(self._node, self)
        return self._care

    def _pause_s(self) -> float:
        deadline_ms = self.sessions.next_deadline_ms()
        if deadline_ms is None:
            return _LOOK_S
        return min(max((deadline_ms - self._now_ms()) / 1000, _LOOK_S_MIN), _LOOK_S)

    def _forgive_own_pause(self, late_ms: float) -> None:
        """Who has stood still has heard nobody, whether they were alive or not."""
        if late_ms > self._heartbeat_ms:
            logger.warning("this node stood still", extra={"ms": round(late_ms)})
            self.sessions.elected(self._node.image, self._now_ms())

    async def _fence_silent(self) -> None:
        from penstock.cluster.controller.fencing import fence_brokers

        def decide(image: ClusterImage) -> Decision[None]:
            silent = self.sessions.expired(image, self._now_ms())
            return fence_brokers(image, silent, rules=self.rules()) if silent else Decision((), None)

        silent = self.sessions.expired(self._node.image, self._now_ms())
        if silent:
            logger.warning("fencing brokers that are silent", extra={"brokers": silent})
            await self.propose(decide)
            self._node.metrics.brokers_fenced += len(silent)

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)
