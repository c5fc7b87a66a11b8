"""A broker's membership in the cluster: registration, heartbeats, fencing and controlled shutdown.

A broker that cannot reach a controller keeps serving reads, and writes that its in-sync replicas acknowledge. It is
safe to fail open: the cluster elects only replicas that are known to have every committed record, and a leader that
has been replaced finds no replica that acknowledges its writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from penstock.broker.controller.channel import HEARTBEATS
from penstock.broker.controller.features import SUPPORTED_FEATURES, with_feature_levels
from penstock.broker.environment import StartFailed
from penstock.cluster.controller.brokers import BrokerRegistration, restart_sole_broker
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import BrokerEndpoint, BrokerFeature
from penstock.log.data_directory import BrokerRun, current_boot_id, note_run, previous_broker_epoch
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.listeners import Listener
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.controller.channel import ControllerChannel
    from penstock.broker.controller.controller import Controller
    from penstock.broker.environment import Environment
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.broker.quorum.quorum import Quorum
    from penstock.cluster.controller.heartbeats import BrokerHeartbeat, BrokerHeartbeatReply
    from penstock.log.checkpoints import TopicPartition
    from penstock.log.log_manager import LogManager


def lost_replicas_request(broker_id: int, broker_epoch: int, replicas: Iterable[tuple[UUID, int]]) -> Any:
    from kio.schema.assign_replicas_to_dirs.v0 import request as schema

    from penstock.cluster.controller.alter_partition import LOST_DIRECTORY

    by_topic: defaultdict[UUID, list[int]] = defaultdict(list)
    for topic_id, index in replicas:
        by_topic[topic_id].append(index)
    topics = tuple(
        schema.TopicData(
            topic_id=topic_id,
            partitions=tuple(schema.PartitionData(partition_index=index) for index in indexes),
        )
        for topic_id, indexes in by_topic.items()
    )
    return schema.AssignReplicasToDirsRequest(
        broker_id=broker_id,
        broker_epoch=broker_epoch,
        directories=(schema.DirectoryData(id_=LOST_DIRECTORY, topics=topics),),
    )


logger = logging.getLogger("penstock.lifecycle")

REGISTRATION: Final = 62
HEARTBEAT: Final = 63
ASSIGN_REPLICAS_TO_DIRS: Final = 73
_NO_EPOCH: Final = -1
#: How often a broker sends heartbeats while it waits to be unfenced or to shut down.
_SHORT_INTERVAL_S: Final = 0.05
_REGISTER_RETRY_S: Final = 0.25
_REGISTER_TIMEOUT_S: Final = 5.0
#: The cluster does not know this incarnation, or does not know it any more.
_NOT_REGISTERED: Final = frozenset({ErrorCode.stale_broker_epoch, ErrorCode.broker_id_not_registered})


class BrokerLifecycleManager:
    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        *,
        quorum: Quorum,
        metadata: MetadataLog,
        channel: ControllerChannel,
        controller: Controller,
        listeners: Callable[[], tuple[Listener, ...]],
    ) -> None:
        """`listeners` returns them as bound."""
        self._environment = environment
        self._settings = settings
        self._store = store
        self._quorum = quorum
        self._metadata = metadata
        self._channel = channel
        self._controller = controller
        self._listeners = listeners
        self._node_id = settings.node_id
        self.incarnation = uuid4()
        self.broker_epoch = _NO_EPOCH
        self.is_fenced = True
        #: Whether nothing that the last run wrote can be lost: it stopped cleanly, or the machine did not restart.
        self.was_clean = True
        self._interval_s = settings.integer("broker.heartbeat.interval.ms") / 1000
        self._session_s = settings.integer("broker.session.timeout.ms") / 1000
        self._is_ready = self._wants_shutdown = self._may_shut_down = False
        self._controller_unreachable = False
        self._last_reply_at = 0.0
        self._changed = asyncio.Event()  # wakes `unfenced` and `controlled_shutdown`
        self._heartbeat_now = asyncio.Event()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._noting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<BrokerLifecycle epoch {self.broker_epoch}{' fenced' if self.is_fenced else ''}>"

    # -- start ---------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Returns when the controller has registered this broker, fenced; from then on it sends heartbeats.

        A sole broker is registered, unfenced and leader at once. Raises StartFailed.
        """
        boot_id = current_boot_id()
        last_epoch = previous_broker_epoch(
            self._store.directory, stopped_cleanly=self._store.clean, boot_id=boot_id
        )
        self.was_clean = last_epoch >= 0
        if self._is_sole_broker():
            self.broker_epoch = await self._register_sole_broker(last_epoch)
            self._is_ready, self.is_fenced = True, False
        else:
            self.broker_epoch = await self._register_until_accepted(last_epoch)
        run = BrokerRun(boot_id, self.broker_epoch)
        self._noting = self._environment.in_thread(note_run, self._store.directory, run)
        self._last_reply_at = self._now()
        self._heartbeat_task = self._environment.spawn(self._beat())

    async def noted(self) -> None:
        """Returns when this run is recorded on disk.

        If the process ends before that, the next start counts as unclean, and nothing is lost.
        """
        if self._noting is not None:
            try:
                await self._noting
            except OSError as error:
                logger.warning("run not recorded", extra={"reason": str(error)})

    def ready(self) -> None:
        """Requests to be unfenced from now on: the logs are open and lost replicas are reported."""
        self._is_ready = True
        if self.is_fenced:
            self._heartbeat_now.set()

    async def unfenced(self) -> None:
        """Returns when clients may be sent here, and this node's own image names it to them.

        The controller's reply may come before the record that unfences the broker. A client that asked for metadata in
        between would be told that the cluster has no brokers, and librdkafka would not ask again for minutes.
        """
        while not self._is_in_service():
            await self._change()

    def _is_in_service(self) -> bool:
        known = self._metadata.image.brokers.get(self._node_id)
        return not self.is_fenced and known is not None and not known.fenced

    def is_replaced_in(self, image: ClusterImage) -> bool:
        """Whether another process was registered under this id, so that its partitions are not this process's."""
        known = image.brokers.get(self._node_id)
        if known is None or self.broker_epoch == _NO_EPOCH:
            return False
        return known.epoch > self.broker_epoch and known.incarnation != self.incarnation

    def silent_ms(self) -> int:
        """Returns how long no controller has replied to a heartbeat."""
        return int((self._now() - self._last_reply_at) * 1000) if self._heartbeat_task is not None else 0

    # -- shutdown ------------------------------------------------------------------------------------

    async def controlled_shutdown(self) -> None:
        """Returns when other brokers lead all partitions that they can lead, or after a timeout."""
        if self._heartbeat_task is None or self.is_fenced or self._is_sole_broker():
            return
        self._wants_shutdown = True
        self._heartbeat_now.set()
        seconds = self._settings.integer("penstock.controlled.shutdown.timeout.ms") / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._may_shut_down and not self._is_given_up():
                    await self._change()
        if not self._may_shut_down:
            logger.warning(
                "stopping before other brokers took over leadership", extra={"node": self._node_id}
            )

    def _is_given_up(self) -> bool:
        """Whether the session has expired: the controller then fences this broker anyway."""
        return self._now() - self._last_reply_at > self._session_s

    async def close(self) -> None:
        """Stops the heartbeats."""
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
            await asyncio.gather(self._heartbeat_task, return_exceptions=True)

    # -- lost replicas -------------------------------------------------------------------------------

    async def report_lost(self, keys: Collection[TopicPartition]) -> set[TopicPartition]:
        """Reports to the controller that these replicas are missing or damaged; returns those that it has accepted.

        Raises ApiError if no controller replies in time.
        """
        image = self._metadata.image
        known = {
            (image.topics[name].id, index): (name, index) for name, index in keys if name in image.topics
        }
        if not known:
            return set()
        request = lost_replicas_request(self._node_id, self.broker_epoch, known)
        response = await self._channel.call(ASSIGN_REPLICAS_TO_DIRS, request)
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, "the controller did not accept the report of lost replicas")
        return {
            known[topic.topic_id, partition.partition_index]
            for directory in response.directories
            for topic in directory.topics
            for partition in topic.partitions
            if partition.error_code is ErrorCode.none
        }

    # -- registration --------------------------------------------------------------------------------

    def _is_sole_broker(self) -> bool:
        """Whether this node is the only voter, the active controller and the only broker that is alive.

        No other node can then reject its registration, lead a partition or hold an in-sync replica.
        """
        return (
            self._metadata.is_active
            and self._quorum.is_only_voter
            and not any(
                broker.id != self._node_id and not broker.fenced
                for broker in self._metadata.image.brokers.values()
            )
        )

    async def _register_sole_broker(self, last_epoch: int) -> int:
        """Register and unfence the broker and elect it leader in one write. Raises StartFailed."""
        registration = self._own_registration(last_epoch)

        def decide(image: ClusterImage) -> Decision[int]:
            joined = restart_sole_broker(
                image, registration, broker_epoch=self._metadata.next_offset, rules=self._controller.rules()
            )
            return with_feature_levels(self._settings, image, joined, raise_them=True)

        try:
            return await self._controller.propose(decide)
        except ApiError as error:
            raise StartFailed(f"{self._settings.data_dir}: {error.message or error.code.name}") from None

    def _own_registration(self, last_epoch: int) -> BrokerRegistration:
        ports = {listener.name: listener.port for listener in self._listeners()}
        return BrokerRegistration(
            broker_id=self._node_id,
            incarnation=self.incarnation,
            endpoints=tuple(
                BrokerEndpoint(
                    name=advertised.name,
                    host=advertised.host,
                    port=advertised.port or ports[advertised.name],
                    security_protocol=self._settings.protocol(advertised.name),
                )
                for advertised in self._settings.advertised
            ),
            features=tuple(
                BrokerFeature(
                    name=f.name, min_supported_version=f.level_min, max_supported_version=f.level_max
                )
                for f in SUPPORTED_FEATURES
            ),
            rack=self._settings.rack,
            log_dirs=(self._store.directory_id,),
            was_clean=last_epoch >= 0,
        )

    def _registration_request(self, last_epoch: int) -> Any:
        from kio.schema.broker_registration.v4 import request as schema

        own = self._own_registration(last_epoch)
        return schema.BrokerRegistrationRequest(
            broker_id=own.broker_id,
            cluster_id=self._store.cluster_id,
            incarnation_id=own.incarnation,
            listeners=tuple(
                schema.Listener(name=e.name, host=e.host, port=e.port, security_protocol=e.security_protocol)
                for e in own.endpoints
            ),
            features=tuple(
                schema.Feature(
                    name=f.name,
                    min_supported_version=f.min_supported_version,
                    max_supported_version=f.max_supported_version,
                )
                for f in own.features
            ),
            rack=own.rack,
            log_dirs=own.log_dirs,
            previous_broker_epoch=last_epoch,
        )

    async def _register_until_accepted(self, last_epoch: int) -> int:
        seconds = self._settings.integer("initial.broker.registration.timeout.ms") / 1000
        deadline = self._now() + seconds
        while True:
            left_s = deadline - self._now()
            try:
                return await self._registered(last_epoch, max(left_s, 0.1))
            except ApiError as error:
                is_duplicate = error.code is ErrorCode.duplicate_broker_registration
                # The session of a killed predecessor must expire first, or a controller be found.
                is_retriable = is_duplicate or error.code is ErrorCode.request_timed_out
                if not is_retriable or left_s <= 0:
                    raise StartFailed(
                        f"the cluster refuses to register node {self._node_id}: "
                        f"{error.message or error.code.name}",
                        hint="--node-id gives this node an id of its own" if is_duplicate else None,
                    ) from None
                logger.info(
                    "registration refused, trying again", extra={"reason": error.message or error.code.name}
                )
            await asyncio.sleep(min(_REGISTER_RETRY_S, self._interval_s))

    async def _registered(self, last_epoch: int, timeout_s: float) -> int:
        """Registers once and returns the broker epoch. Raises ApiError."""
        request = self._registration_request(last_epoch)
        response = await self._channel.call(REGISTRATION, request, min(timeout_s, _REGISTER_TIMEOUT_S))
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, _REGISTRATION_ERRORS.get(response.error_code))
        return int(response.broker_epoch)

    async def _register_again(self) -> None:
        """Registers the same process with the same data as clean: nothing that it wrote can be lost."""
        logger.warning("registering again", extra={"node": self._node_id, "epoch": self.broker_epoch})
        self.is_fenced = True
        self.broker_epoch = await self._registered(max(self.broker_epoch, 0), _REGISTER_TIMEOUT_S)
        run = BrokerRun(current_boot_id(), self.broker_epoch)
        self._noting = self._environment.in_thread(note_run, self._store.directory, run)
        await self.noted()

    # -- heartbeats ----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        if not self.is_fenced:
            await self._rest(self._interval_s)  # the registration counts as the first heartbeat
        while True:
            started = self._now()
            try:
                await self._beat_once()
            except Exception:
                # A broker without heartbeats stays fenced, so the next heartbeat is sent whatever happened to this one.
                logger.exception("heartbeat failed")
            self._changed.set()
            await self._rest(self._pause_s() - (self._now() - started))

    async def _beat_once(self) -> None:
        try:
            self._heard(await self._heartbeat())
        except ApiError as error:
            await self._refused(error)

    async def _heartbeat(self) -> BrokerHeartbeatReply:
        from penstock.cluster.controller.heartbeats import BrokerHeartbeat, BrokerHeartbeatReply

        beat = BrokerHeartbeat(
            broker_id=self._node_id,
            broker_epoch=self.broker_epoch,
            metadata_offset=self._metadata.applied_offset,
            want_fence=not self._is_ready,
            want_shutdown=self._wants_shutdown,
        )
        if self._metadata.is_active:
            return await self._controller.heartbeat(beat)
        response = await self._channel.call(
            HEARTBEAT,
            _heartbeat_request(beat),
            max(self._session_s / 2, self._interval_s),
            purpose=HEARTBEATS,
        )
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code)
        return BrokerHeartbeatReply(response.is_caught_up, response.is_fenced, response.should_shut_down)

    def _heard(self, reply: BrokerHeartbeatReply) -> None:
        self._last_reply_at = self._now()
        if reply.is_fenced != self.is_fenced:
            logger.info("fenced" if reply.is_fenced else "unfenced", extra={"node": self._node_id})
        self.is_fenced, self._may_shut_down = reply.is_fenced, reply.should_shut_down
        if self._controller_unreachable:
            self._controller_unreachable = False
            logger.info("the controller answers again", extra={"node": self._node_id})

    async def _refused(self, error: ApiError) -> None:
        if error.code in _NOT_REGISTERED:
            with suppress(ApiError):
                await self._register_again()
        elif not self._controller_unreachable and error.code is not ErrorCode.not_controller:
            self._controller_unreachable = True
            logger.warning(
                "the controller does not answer; serving what can be served", extra={"reason": str(error)}
            )

    def _pause_s(self) -> float:
        waits = self._wants_shutdown or (self._is_ready and not self._is_in_service())
        return (
            min(_SHORT_INTERVAL_S, self._interval_s)
            if waits and not self._controller_unreachable
            else self._interval_s
        )

    async def _rest(self, seconds: float) -> None:
        self._heartbeat_now.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._heartbeat_now.wait()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


_REGISTRATION_ERRORS: Final = {
    ErrorCode.duplicate_broker_registration: "another broker with this id is registered and alive",
    ErrorCode.inconsistent_cluster_id: "the data folder belongs to another cluster",
    ErrorCode.unsupported_version: "the cluster uses features that this release does not know",
}


def _heartbeat_request(beat: BrokerHeartbeat) -> Any:
    from kio.schema.broker_heartbeat.v1.request import BrokerHeartbeatRequest

    return BrokerHeartbeatRequest(
        broker_id=beat.broker_id,
        broker_epoch=beat.broker_epoch,
        current_metadata_offset=beat.metadata_offset,
        want_fence=beat.want_fence,
        want_shut_down=beat.want_shutdown,
    )
