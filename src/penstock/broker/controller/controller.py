"""The active controller's own work: it fences brokers whose sessions expire, and runs the leader balancer.

Every node has one; it works only while the node is the active controller. Request handlers propose decisions through
it. Modules that a standalone node does not need at start are imported when they are first used.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar
from uuid import UUID

from penstock.broker.config.effective_settings import node_layers
from penstock.broker.environment import Clock, Tasks
from penstock.cluster.controller.decision import (
    ControllerConfig,
    Decision,
    DecisionOrSteps,
    UncleanElection,
)
from penstock.cluster.controller.heartbeats import BrokerSessions
from penstock.cluster.image import ClusterImage
from penstock.cluster.topic_settings import ConfigLayer
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.controller.delegation_tokens import TokenSweeper
    from penstock.broker.controller.leader_balancer import LeaderBalancer
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.connection import Connection
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.cluster.controller.brokers import BrokerRegistration
    from penstock.cluster.controller.heartbeats import BrokerHeartbeat, BrokerHeartbeatReply

logger = logging.getLogger("penstock.controller")

Reply = TypeVar("Reply")

#: Longest and shortest pause between two checks of sessions and leaders.
_CHECK_INTERVAL_S: Final = 0.5
_CHECK_INTERVAL_S_MIN: Final = 0.02


class ClockAndTasks(Clock, Tasks, Protocol):
    """What a controller uses of its process."""


class LastController(NamedTuple):
    node_id: int | None
    silent_ms: int


class Controller:
    """Exists on every node, but works only between `became_active` and `became_inactive`."""

    def __init__(
        self,
        environment: ClockAndTasks,
        settings: NodeSettings,
        metadata: MetadataLog,
        metrics: Metrics,
        *,
        own_incarnation: Callable[[], UUID],
        last_controller: Callable[[], LastController],
    ) -> None:
        """`own_incarnation` returns that of this process as a broker.

        `last_controller` returns the controller that this node has used before, and how long that is silent.
        """
        self._environment = environment
        self._settings = settings
        self._metadata = metadata
        self._metrics = metrics
        self._own_incarnation = own_incarnation
        self._last_controller = last_controller
        self._heartbeat_ms = settings.integer("broker.heartbeat.interval.ms")
        self._session_ms = settings.integer("broker.session.timeout.ms")
        #: Of a suspension, at most this much may go unnoticed, so it is short compared to a heartbeat interval.
        self._check_s = max(min(_CHECK_INTERVAL_S, self._heartbeat_ms / 4000), _CHECK_INTERVAL_S_MIN)
        self.sessions = BrokerSessions(session_timeout_ms=self._session_ms)
        self._layers: tuple[ConfigLayer, ...] | None = None
        self._rules = ControllerConfig()
        self._balancer: LeaderBalancer | None = None
        self._token_sweeper: TokenSweeper | None = None
        self._has_scram_secret = False  # as far as it was looked at in this term
        self._watching: asyncio.Task[None] | None = None
        self._ticking: asyncio.TimerHandle | None = None
        #: A tick that runs later than this tells that the process was suspended.
        self._tick_due_ms = 0
        #: The connection over which each broker sent its last heartbeat.
        self._last_connections: dict[int, Connection] = {}

    def __repr__(self) -> str:
        return f"<Controller {'active' if self._watching else 'inactive'} {self.sessions}>"

    # -- life cycle ----------------------------------------------------------------------------------

    def became_active(self) -> None:
        """Start work: this node is the active controller from now on. The metadata log calls this."""
        self.became_inactive()
        self._metrics.controller_elections += 1
        self._begin_sessions()
        self._balancer = None
        self._has_scram_secret = False
        self._schedule_tick()
        self._watching = self._environment.spawn(self._watch())

    def _begin_sessions(self) -> None:
        """Start a new session for every broker, except that the session of the previous controller has partly elapsed.

        The previous controller has been silent since its last reply to this node. It still gets the time of two
        heartbeats, in case it is alive and only now finds the new controller.
        """
        spent_ms = max(self._session_ms - 2 * self._heartbeat_ms, 0)
        last = self._last_controller()
        silent_ms = min(last.silent_ms, spent_ms)
        self.sessions = BrokerSessions(
            session_timeout_ms=self._session_ms,
            fetch_timeout_ms=silent_ms,
            heartbeat_interval_ms=self._heartbeat_ms,
        )
        self.sessions.elected(self._metadata.image, self._now_ms(), last.node_id)

    def became_inactive(self) -> None:
        """Stop work: another node is the active controller, or there is none. Also called when the node stops."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        self._last_connections.clear()

    # -- deciding ------------------------------------------------------------------------------------

    def rules(self) -> ControllerConfig:
        """Return the current settings of the cluster."""
        layers = node_layers(self._settings, self._metadata.image)
        if layers != self._layers:
            self._layers = layers
            self._rules = ControllerConfig(node=layers, heartbeat_interval_ms=self._heartbeat_ms)
        return self._rules

    async def propose(self, decide: Callable[[ClusterImage], DecisionOrSteps[Reply]]) -> Reply:
        """Commit a decision as `MetadataLog.propose` does, and report unclean elections once they are committed."""
        unclean: tuple[UncleanElection, ...] = ()

        def noting(decision: Decision[Reply]) -> Decision[Reply]:
            nonlocal unclean
            unclean = decision.unclean
            return decision

        def noting_steps(steps: Steps[Decision[Reply]]) -> Steps[Decision[Reply]]:
            return noting((yield from steps))

        def decide_and_note(image: ClusterImage) -> DecisionOrSteps[Reply]:
            decided = decide(image)
            return noting(decided) if isinstance(decided, Decision) else noting_steps(decided)

        reply = await self._metadata.propose(decide_and_note)
        for election in unclean:
            self._report(election)
        return reply

    async def propose_if_needed(self, decide: Callable[[ClusterImage], Decision[Reply]]) -> Reply:
        """Propose a decision only if it changes something now; otherwise return its reply at once."""
        decision = decide(self._metadata.image)
        return await self.propose(decide) if decision.records else decision.reply

    def _report(self, election: UncleanElection) -> None:
        self._metrics.unclean_elections += 1
        logger.warning(
            "unclean election: records that only other replicas had are lost",
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
        """Register a broker and return its epoch.

        Its last run counts as clean only if it was the incarnation that the cluster knows.
        """
        from penstock.broker.controller.features import with_feature_levels
        from penstock.cluster.controller.brokers import register_broker

        broker_id = registration.broker_id

        def decide(image: ClusterImage) -> Decision[int]:
            known = image.brokers.get(broker_id)
            was_clean = previous_epoch >= 0 and (known is None or known.epoch == previous_epoch)
            joined = register_broker(
                image,
                registration._replace(was_clean=was_clean),
                broker_epoch=self._metadata.next_offset,
                silent_ms=self._silent_ms(registration),
                rules=self.rules(),
            )
            return with_feature_levels(self._settings, image, joined, raise_them=False)

        epoch = await self.propose(decide)
        self.sessions.contacted(broker_id, epoch, self._now_ms())
        logger.info("broker registered", extra={"broker": broker_id, "epoch": epoch})
        return epoch

    async def heartbeat(
        self, beat: BrokerHeartbeat, connection: Connection | None = None
    ) -> BrokerHeartbeatReply:
        """Raises NOT_CONTROLLER, STALE_BROKER_EPOCH."""
        from penstock.cluster.controller.heartbeats import heartbeat

        if not self._metadata.is_active:
            raise ApiError(ErrorCode.not_controller)

        def decide(image: ClusterImage) -> Decision[BrokerHeartbeatReply]:
            return heartbeat(
                image,
                self.sessions,
                beat,
                committed_offset=self._metadata.applied_offset,
                rules=self.rules(),
            )

        self._contacted(beat, connection)
        return await self.propose_if_needed(decide)

    def _contacted(self, beat: BrokerHeartbeat, connection: Connection | None) -> None:
        """Renew the broker's session when its heartbeat arrives, however long decisions take."""
        broker, epoch = beat.broker_id, beat.broker_epoch
        known = self._metadata.image.brokers.get(broker)
        if known is None or known.epoch != epoch:
            return
        self.sessions.contacted(broker, epoch, self._now_ms(), metadata_offset=beat.metadata_offset)
        if connection is not None and connection.is_open:
            self._last_connections[broker] = connection
            connection.on_lost = partial(self._connection_lost, broker, epoch, connection)

    def _connection_lost(self, broker: int, epoch: int, connection: Connection) -> None:
        """End the broker's session soon, unless it has used another connection since or this node is not active."""
        if self._last_connections.get(broker) is connection:
            del self._last_connections[broker]
            self.sessions.connection_lost(broker, epoch, self._now_ms())

    def _silent_ms(self, registration: BrokerRegistration) -> int | None:
        """Return how long the previous incarnation has been silent.

        None: it is known to have ended, because this process registers, and holds the lock of its data directory.
        A copy of that directory has the same directory id, but it is not this process that registers then.
        """
        if registration.incarnation == self._own_incarnation():
            return None
        self._extend_sessions_after_pause()
        return self.sessions.silent_ms(registration.broker_id, self._now_ms()) or 0

    # -- watching ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s())
            try:
                await self._fence_silent()
                await self._leaders().look(self._now_ms())
                if self._metadata.image.security.tokens:
                    await self._tokens().sweep(self._environment.now_ms())
                await self._make_scram_secret()
            except ApiError as error:
                # Nothing has changed, or another node is the active controller by now: the next check will tell.
                logger.info("decision not made", extra={"reason": error.message or error.code.name})
            except Exception:
                # No other node makes these checks while this one is active, so a failure must not end them.
                logger.exception("the check of brokers and leaders failed")

    async def _make_scram_secret(self) -> None:
        """Make the secret of a cluster whose first credential was stored by an older version."""
        if self._has_scram_secret or not self._metadata.image.security.credentials:
            return
        from penstock.cluster.scram_secret import (
            SCRAM_SECRET_BYTES,
            missing_scram_secret,
            stored_scram_secret,
        )

        if stored_scram_secret(self._metadata.image) is None:
            random = secrets.token_bytes(SCRAM_SECRET_BYTES)
            await self.propose(lambda image: Decision(missing_scram_secret(image, random), None))
        self._has_scram_secret = True

    def _leaders(self) -> LeaderBalancer:
        """Return the balancer, created once per term: a new controller does not know which brokers have just joined."""
        if self._balancer is None:
            from penstock.broker.controller.leader_balancer import LeaderBalancer

            self._balancer = LeaderBalancer(self._settings, self._metadata, self)
        return self._balancer

    def _tokens(self) -> TokenSweeper:
        if self._token_sweeper is None:
            # Imported here, because few clusters have delegation tokens.
            from penstock.broker.controller.delegation_tokens import TokenSweeper

            self._token_sweeper = TokenSweeper(self._settings, self._metadata)
        return self._token_sweeper

    def _pause_s(self) -> float:
        deadline_ms = self.sessions.next_deadline_ms()
        if deadline_ms is None:
            return self._check_s
        return min(max((deadline_ms - self._now_ms()) / 1000, _CHECK_INTERVAL_S_MIN), self._check_s)

    def _schedule_tick(self) -> None:
        self._tick_due_ms = self._now_ms() + round(self._check_s * 1000)
        self._ticking = asyncio.get_running_loop().call_later(self._check_s, self._tick)

    def _tick(self) -> None:
        """Notice that this process was suspended, also while `_watch` waits for a decision to be committed."""
        self._extend_sessions_after_pause()
        self._schedule_tick()

    def _extend_sessions_after_pause(self) -> None:
        """While this process was suspended, it received no heartbeats, even from live brokers: that is no silence.

        After a suspension other callbacks may run before the late tick, so whatever judges a session calls this first.
        """
        now_ms = self._now_ms()
        late_ms = now_ms - self._tick_due_ms
        if late_ms <= 0:
            return
        self._tick_due_ms = now_ms
        self.sessions.paused(late_ms, now_ms)
        if late_ms > self._heartbeat_ms:
            logger.warning("this node was suspended", extra={"ms": late_ms})

    async def _fence_silent(self) -> None:
        from penstock.cluster.controller.heartbeats import fence_brokers

        def decide(image: ClusterImage) -> Decision[None]:
            silent = self._silent_brokers(image)
            return fence_brokers(image, silent, rules=self.rules()) if silent else Decision((), None)

        silent = self._silent_brokers(self._metadata.image)
        if silent:
            logger.warning("fencing brokers that are silent", extra={"brokers": silent})
            await self.propose(decide)
            self._metrics.brokers_fenced += len(silent)

    def _silent_brokers(self, image: ClusterImage) -> list[int]:
        self._extend_sessions_after_pause()
        return self.sessions.expired(image, self._now_ms())

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000)
