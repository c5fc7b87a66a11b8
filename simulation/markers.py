"""Markers on their way: the end of each prepared transaction, to every one of its partitions, until all have it.

As in the product: nothing is remembered here that a fail-over could lose, and what was handed out belongs to one life
of the shard. Messages are late, lost and doubled on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker
from penstock.transactions.messages import (
    EPOCH_PER_TRANSACTION,
    MarkersPosition,
    MarkersReply,
    TopicPartition,
    TransactionMarkers,
)
from simulation.disk import DiskFull
from simulation.network import IN_ORDER
from simulation.replica import Key

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator
    from simulation.network import Respond
    from simulation.node import Node

#: The marker is there, or the partition has gone on to a later transaction of the producer: this one has ended there.
_WRITTEN: Final = frozenset({ErrorCode.none, ErrorCode.invalid_producer_epoch})


class MarkerAsk(NamedTuple):
    """One marker for one partition."""

    key: Key
    marker: EndMarker
    transaction_version: int


def deliver_markers(coordinator: Coordinator) -> None:
    MarkerDelivery(coordinator).ask(None)


class MarkerDelivery:
    """For one life of a shard."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.node = coordinator.node

    def ask(self, position: MarkersPosition | None) -> None:
        if not self.coordinator.is_closed:
            self.coordinator.submit(
                lambda shard, token, _: shard.next_markers(position, token), self._handed_out
            )

    def _handed_out(self, reply: Any) -> None:
        if not isinstance(reply, MarkersReply):
            return
        self.ask(reply.position)
        for markers in reply.markers:
            if not markers.partitions:
                self._report(markers, ())
            for place in markers.partitions:
                self._deliver(markers, place)

    def _deliver(self, markers: TransactionMarkers, place: TopicPartition) -> None:
        if self.coordinator.is_closed:
            return
        state = self.node.image.partition(place.topic, place.partition)
        if state is None:
            self._report(markers, (place,))  # deleted, with everything in it
        elif not state.has_leader:
            self._again(markers, place)
        else:
            key = Key(self.node.image.topics[place.topic].id, place.partition)
            marker = EndMarker(
                markers.producer_id, markers.epoch, self.coordinator.leader_epoch, markers.committed
            )
            ask = MarkerAsk(key, marker, markers.transaction_version)
            # Without an epoch per transaction nobody can tell a late copy from the next one: so there must be none.
            is_safe = markers.transaction_version >= EPOCH_PER_TRANSACTION
            kind = "marker" if is_safe else f"marker {IN_ORDER}"
            self.node.call(state.leader, kind, ask, lambda reply, _: self._answered(markers, place, reply))

    def _answered(self, markers: TransactionMarkers, place: TopicPartition, reply: Any) -> None:
        if reply is ErrorCode.transaction_coordinator_fenced:
            return  # another coordinator ends it
        if reply in _WRITTEN:
            self._report(markers, (place,))
        else:
            self._again(markers, place)

    def _again(self, markers: TransactionMarkers, place: TopicPartition) -> None:
        world = self.node.world
        self.node.after(world.between(10, 40), self._deliver, markers, place)

    def _report(self, markers: TransactionMarkers, places: tuple[TopicPartition, ...]) -> None:
        if not self.coordinator.is_closed:
            self.coordinator.submit(
                lambda shard, token, now_ms: shard.markers_written(markers, places, token, now_ms=now_ms),
                lambda _: None,
            )


class MarkerWriting:
    """The leaders' side."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.services["marker"] = self.received

    def received(self, ask: MarkerAsk, respond: Respond) -> None:
        try:
            replica = self.node.replica(ask.key)
            replica.require_leader()
            if replica.topic == CONSUMER_OFFSETS:
                self.node.coordinator(replica).write_marker(ask.marker, ask.transaction_version, respond)
                return
            if replica.require_leader().is_below_min:
                raise ApiError(ErrorCode.not_enough_replicas)
            self.node.machine.disk.require_room()
            replica.append_marker(ask.marker, ask.transaction_version)
            self.node.world.note("marker", self.node.id, replica.topic, ask)
            replica.when_committed(replica.log.end_offset, respond)
        except ApiError as error:
            respond(error.code)
        except DiskFull:
            respond(ErrorCode.kafka_storage_error)
