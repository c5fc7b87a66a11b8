"""A broker's life in the cluster: register, open what is its own, report what is lost, heartbeat, leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration
from penstock.cluster.controller.heartbeats import BrokerHeartbeat, BrokerHeartbeatReply
from penstock.cluster.metadata_records import BrokerEndpoint
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.replica import Key


class LostAsk(NamedTuple):
    broker_id: int
    broker_epoch: int
    keys: tuple[Key, ...]


class Lifecycle:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.broker_epoch = -1
        self.is_open = False
        self.is_fenced = True
        self.is_leaving = False
        self._lost: dict[Key, None] = {}

    def __repr__(self) -> str:
        return (
            f"epoch {self.broker_epoch}{' open' if self.is_open else ''}{' fenced' if self.is_fenced else ''}"
        )

    def start(self) -> None:
        self.node.after(self.node.world.between(1, 10), self._beat)

    def follows_image(self) -> bool:
        """Whether this incarnation may act on the image; it opens its partitions the first time that it may."""
        if self.is_open or self.broker_epoch < 0:
            return self.is_open
        broker = self.node.image.brokers.get(self.node.id)
        if broker is not None and broker.epoch == self.broker_epoch:
            self.is_open = True
            self.node.open_partitions()
            return False  # all of it is followed already
        return False

    def report_lost(self, key: Key) -> None:
        self._lost[key] = None

    def leave(self) -> None:
        """Stop cleanly: leaders first move away."""
        self.is_leaving = True

    def _beat(self) -> None:
        node = self.node
        node.after(node.timings.heartbeat_ms, self._beat)
        if node.metadata.leader_id < 0:
            return
        if self.broker_epoch < 0:
            node.call_controller("register", self.registration(), self._registered)
            return
        self._report()
        beat = BrokerHeartbeat(
            broker_id=node.id,
            broker_epoch=self.broker_epoch,
            metadata_offset=node.metadata.applied - 1,
            want_fence=not self.is_open or bool(self._lost),
            want_shutdown=self.is_leaving,
        )
        node.call_controller("heartbeat", beat, self._beaten)

    def registration(self) -> BrokerRegistration:
        node = self.node
        return BrokerRegistration(
            broker_id=node.id,
            incarnation=node.incarnation,
            endpoints=(BrokerEndpoint(name="NODES", host=f"host{node.id}", port=9092, security_protocol=0),),
            rack=node.machine.rack,
            log_dirs=(node.machine.disk.directory,),
            was_clean=node.was_clean,
        )

    def _registered(self, reply: Any) -> None:
        if isinstance(reply, int) and not isinstance(reply, ErrorCode):
            self.broker_epoch = reply
            self.node.note_boot()
            self.follows_image()

    def _beaten(self, reply: Any) -> None:
        if reply in (ErrorCode.stale_broker_epoch, ErrorCode.broker_id_not_registered):
            self.node.fail("another incarnation has taken its place")
        elif isinstance(reply, BrokerHeartbeatReply):
            self.is_fenced = reply.is_fenced
            if self.is_leaving and reply.should_shut_down:
                self.node.cluster.stop_cleanly(self.node.machine)

    def _report(self) -> None:
        image = self.node.image
        for key in tuple(self._lost):
            topic = image.topics_by_id.get(key.topic_id)
            state = None if topic is None else topic.partitions.get(key.partition)
            if state is None or self.node.id not in (*state.isr, *state.elr):
                del self._lost[key]
        if self._lost and self.is_open:
            ask = LostAsk(self.node.id, self.broker_epoch, tuple(self._lost))
            self.node.call_controller("lost", ask, lambda _: None)


def fresh_directory(number: int) -> UUID:
    return UUID(int=(1 << 80) + number)
