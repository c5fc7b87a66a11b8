"""A broker's place in the cluster: it registers, reports to the controller, and leaves in good order.

A broker that cannot reach a controller keeps serving what it can: reads, and writes that its in-sync replicas
confirm. It fails open, because the cluster elects others only where they are known to have everything, and a leader
that has been replaced finds nobody who confirms its writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from penstock.broker.channel import HEARTBEATS
from penstock.broker.registration import (
    is_sole_broker,
    lost_request,
    own_registration,
    register_alone,
    registration_request,
)
from penstock.log.boot import Run, current_boot_id, note_run, safe_epoch
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.cluster.controller.heartbeats import Heartbeat, HeartbeatReply
    from penstock.cluster.image import ClusterImage
    from penstock.log.checkpoints import PartitionKey

logger = logging.getLogger("penstock.lifecycle")

REGISTRATION: Final = 62
HEARTBEAT: Final = 63
ASSIGN_REPLICAS_TO_DIRS: Final = 73
_NO_EPOCH: Final = -1
#: How often a broker that waits to be unfenced, or to leave, asks.
_IMPATIENT_S: Final = 0.05
_REGISTER_AGAIN_S: Final = 0.25
_REGISTER_ATTEMPT_S: Final = 5.0
#: The cluster does not know this incarnation, or no longer.
_FORGOTTEN: Final = frozenset({ErrorCode.stale_broker_epoch, ErrorCode.broker_id_not_registered})


class BrokerLifecycle:
    def __init__(self, node: Node) -> None:
        self._node = node
        settings = node.settings
        self.incarnation = uuid4()
        self.broker_epoch = _NO_EPOCH
        self.is_fenced = True
        #: Nothing that the last run wrote can have been lost with the machine.
        self.was_clean = True
        self._interval_s = settings.integer("broker.heartbeat.interval.ms") / 1000
        self._session_s = settings.integer("broker.session.timeout.ms") / 1000
        self._is_ready = self._wants_out = self._may_leave = False
        self._cut_off = False
        self._heard_at = 0.0
        self._changed = asyncio.Event()  # what `unfenced` and `hand_over` wait for may have come
        self._hurry = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._noting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<BrokerLifecycle epoch {self.broker_epoch}{' fenced' if self.is_fenced else ''}>"

    # -- coming --------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Returns when the controller has let this broker in, fenced; from then on heartbeats are sent.

        A lone node is in, unfenced and leading at once. Raises StartFailed.
        """
        node = self._node
        boot_id = current_boot_id()
        last_epoch = safe_epoch(node.store.directory, stopped_cleanly=node.store.clean, boot_id=boot_id)
        self.was_clean = last_epoch >= 0
        if is_sole_broker(node):
            self.broker_epoch = await register_alone(
                node, own_registration(node, self.incarnation, last_epoch)
            )
            self._is_ready, self.is_fenced = True, False
        else:
            self.broker_epoch = await self._let_in(last_epoch)
        self._noting = node.in_thread(note_run, node.store.directory, Run(boot_id, self.broker_epoch))
        self._heard_at = self._now()
        self._beating = node.spawn(self._beat())

    async def noted(self) -> None:
        """This run is written down: if the process ends before, the next start is doubted, and nothing is lost."""
        if self._noting is not None:
            try:
                await self._noting
            except OSError as error:
                logger.warning("run not written down", extra={"reason": str(error)})

    def ready(self) -> None:
        """The logs are open and losses are reported: ask to be unfenced from now on."""
        self._is_ready = True
        if self.is_fenced:
            self._hurry.set()

    async def unfenced(self) -> None:
        """Returns when clients may be sent here."""
        while self.is_fenced:
            await self._change()

    def is_replaced_in(self, image: ClusterImage) -> bool:
        """Another process was let in under this id, so what the cluster gives to the id is not this one's."""
        known = image.brokers.get(self._node.node_id)
        if known is None or self.broker_epoch == _NO_EPOCH:
            return False
        return known.epoch > self.broker_epoch and known.incarnation != self.incarnation

    def silent_ms(self) -> int:
        """How long no controller has answered a heartbeat."""
        return int((self._now() - self._heard_at) * 1000) if self._beating is not None else 0

    # -- leaving -------------------------------------------------------------------------------------

    async def hand_over(self) -> None:
        """Controlled shutdown: returns when others lead all that they can, or it has taken too long."""
        if self._beating is None or self.is_fenced or is_sole_broker(self._node):
            return
        self._wants_out = True
        self._hurry.set()
        seconds = self._node.settings.integer("penstock.controlled.shutdown.timeout.ms") / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._may_leave and not self._is_given_up():
                    await self._change()
        if not self._may_leave:
            logger.warning(
                "leaving without having handed over leadership", extra={"node": self._node.node_id}
            )

    def _is_given_up(self) -> bool:
        """A broker that the controller has not heard of for so long is fenced anyway."""
        return self._now() - self._heard_at > self._session_s

    async def close(self) -> None:
        """Send no more heartbeats."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)

    # -- losses --------------------------------------------------------------------------------------

    async def report_lost(self, keys: Collection[PartitionKey]) -> set[PartitionKey]:
        """Tell the controller that these copies are gone or damaged; returns those it has taken note of.

        Raises ApiError when no controller answers in time.
        """
        image = self._node.image
        known = {
            (image.topics[name].id, index): (name, index) for name, index in keys if name in image.topics
        }
        if not known:
            return set()
        request = lost_request(self._node.node_id, self.broker_epoch, known)
        response = await self._node.channel.call(ASSIGN_REPLICAS_TO_DIRS, request)
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, "the controller did not take note of lost replicas")
        return {
            known[topic.topic_id, partition.partition_index]
            for directory in response.directories
            for topic in directory.topics
            for partition in topic.partitions
            if partition.error_code is ErrorCode.none
        }

    # -- registration --------------------------------------------------------------------------------

    async def _let_in(self, last_epoch: int) -> int:
        from penstock.broker.node import StartFailed

        seconds = self._node.settings.integer("initial.broker.registration.timeout.ms") / 1000
        deadline = self._now() + seconds
        while True:
            left_s = deadline - self._now()
            try:
                return await self._registered(last_epoch, max(left_s, 0.1))
            except ApiError as error:
                if not _may_change(error) or left_s <= 0:
                    raise StartFailed(
                        f"the cluster does not let node {self._node.node_id} in: "
                        f"{error.message or error.code.name}",
                        hint=_hint(error),
                    ) from None
                logger.info("not let in yet", extra={"reason": error.message or error.code.name})
            await asyncio.sleep(min(_REGISTER_AGAIN_S, self._interval_s))

    async def _registered(self, last_epoch: int, timeout_s: float) -> int:
        """The broker epoch. Raises ApiError."""
        node = self._node
        request = registration_request(node, self.incarnation, last_epoch)
        response = await node.channel.call(REGISTRATION, request, min(timeout_s, _REGISTER_ATTEMPT_S))
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, _SAID.get(response.error_code))
        return int(response.broker_epoch)

    async def _register_again(self) -> None:
        """The same process with the same data: nothing of what it wrote can be lost."""
        logger.warning("registering again", extra={"node": self._node.node_id, "epoch": self.broker_epoch})
        self.is_fenced = True
        self.broker_epoch = await self._registered(max(self.broker_epoch, 0), _REGISTER_ATTEMPT_S)
        run = Run(current_boot_id(), self.broker_epoch)
        self._noting = self._node.in_thread(note_run, self._node.store.directory, run)
        await self.noted()

    # -- heartbeats ----------------------------------------------------------------------------------

    async def _beat(self) -> None:
        if not self.is_fenced:
            await self._rest(self._interval_s)  # what is registered and unfenced has just been heard of
        while True:
            started = self._now()
            try:
                await self._beat_once()
            except Exception:
                # Whoever stops reporting is fenced for good, so the next beat comes whatever happened to this one.
                logger.exception("heartbeat failed")
            self._changed.set()
            await self._rest(self._pause_s() - (self._now() - started))

    async def _beat_once(self) -> None:
        try:
            self._heard(await self._heartbeat())
        except ApiError as error:
            await self._refused(error)

    async def _heartbeat(self) -> HeartbeatReply:
        from penstock.cluster.controller.heartbeats import Heartbeat, HeartbeatReply

        node = self._node
        beat = Heartbeat(
            broker_id=node.node_id,
            broker_epoch=self.broker_epoch,
            metadata_offset=node.metadata.applied_offset,
            want_fence=not self._is_ready,
            want_shutdown=self._wants_out,
        )
        if node.metadata.is_active:
            return await node.controller.heartbeat(beat)
        response = await node.channel.call(
            HEARTBEAT,
            _heartbeat_request(beat),
            max(self._session_s / 2, self._interval_s),
            purpose=HEARTBEATS,
        )
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code)
        return HeartbeatReply(response.is_caught_up, response.is_fenced, response.should_shut_down)

    def _heard(self, reply: HeartbeatReply) -> None:
        self._heard_at = self._now()
        if reply.is_fenced != self.is_fenced:
            logger.info("fenced" if reply.is_fenced else "unfenced", extra={"node": self._node.node_id})
        self.is_fenced, self._may_leave = reply.is_fenced, reply.should_shut_down
        if self._cut_off:
            self._cut_off = False
            logger.info("the controller answers again", extra={"node": self._node.node_id})

    async def _refused(self, error: ApiError) -> None:
        if error.code in _FORGOTTEN:
            with suppress(ApiError):
                await self._register_again()
        elif not self._cut_off and error.code is not ErrorCode.not_controller:
            self._cut_off = True
            logger.warning(
                "the controller does not answer; serving what can be served", extra={"reason": str(error)}
            )

    def _pause_s(self) -> float:
        waits = self._wants_out or (self._is_ready and self.is_fenced)
        return min(_IMPATIENT_S, self._interval_s) if waits and not self._cut_off else self._interval_s

    async def _rest(self, seconds: float) -> None:
        self._hurry.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._hurry.wait()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


_SAID: Final = {
    ErrorCode.duplicate_broker_registration: "another broker with this id is registered and alive",
    ErrorCode.inconsistent_cluster_id: "the data folder belongs to another cluster",
    ErrorCode.unsupported_version: "the cluster uses features that this release does not know",
}


def _may_change(error: ApiError) -> bool:
    """A killed predecessor must first expire, and a controller be found."""
    return error.code in (ErrorCode.duplicate_broker_registration, ErrorCode.request_timed_out)


def _hint(error: ApiError) -> str | None:
    if error.code is ErrorCode.duplicate_broker_registration:
        return "--node-id gives this node an id of its own"
    return None


def _heartbeat_request(beat: Heartbeat) -> Any:
    from kio.schema.broker_heartbeat.v1.request import BrokerHeartbeatRequest

    return BrokerHeartbeatRequest(
        broker_id=beat.broker_id,
        broker_epoch=beat.broker_epoch,
        current_metadata_offset=beat.metadata_offset,
        want_fence=beat.want_fence,
        want_shut_down=beat.want_shutdown,
    )
