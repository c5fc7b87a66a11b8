"""Markers on their way to one broker: what came up while one request was under way goes with the next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.broker_calls import ask_broker
from penstock.broker.group_requests import by_topic
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import Markers, TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node

_WRITE_TXN_MARKERS: Final = 27
#: Of their own, since an answer waits until the markers are committed.
_PURPOSE: Final = "markers"
_TIMEOUT_S: Final = 10.0
#: Markers in one request; answers wait for the slowest of them.
_MARKERS_MAX: Final = 500

Outcomes = dict[TopicPartition, ErrorCode]


class _Entry(NamedTuple):
    markers: Markers
    coordinator_epoch: int
    partitions: tuple[TopicPartition, ...]
    outcomes: asyncio.Future[Outcomes]


class MarkerOutbox:
    def __init__(self, node: Node, broker_id: int) -> None:
        self._node = node
        self._broker_id = broker_id
        self._waiting: list[_Entry] = []
        self._sending: asyncio.Task[None] | None = None

    async def write(
        self, markers: Markers, coordinator_epoch: int, partitions: tuple[TopicPartition, ...]
    ) -> Outcomes:
        """What became of each partition's marker; NETWORK_EXCEPTION where nobody knows."""
        outcomes: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Entry(markers, coordinator_epoch, partitions, outcomes))
        if self._sending is None:
            self._sending = self._node.spawn(self._send())
        return await outcomes

    async def _send(self) -> None:
        try:
            while self._waiting:
                entries, self._waiting = self._waiting[:_MARKERS_MAX], self._waiting[_MARKERS_MAX:]
                await self._send_together(entries)
        finally:
            self._sending = None

    async def _send_together(self, entries: list[_Entry]) -> None:
        try:
            response = await ask_broker(
                self._node,
                self._broker_id,
                _WRITE_TXN_MARKERS,
                _request(entries),
                timeout_s=_TIMEOUT_S,
                purpose=_PURPOSE,
            )
            told = _told(response)
        except ApiError as error:
            told, default = {}, error.code
        else:
            default = ErrorCode.unknown_topic_or_partition
        for entry in entries:
            if not entry.outcomes.done():
                producer_id = entry.markers.producer_id
                entry.outcomes.set_result(
                    {each: told.get((producer_id, each), default) for each in entry.partitions}
                )


def _request(entries: list[_Entry]) -> Any:
    from kio.schema.write_txn_markers.v2 import request as schema

    return schema.WriteTxnMarkersRequest(
        markers=tuple(
            schema.WritableTxnMarker(
                producer_id=entry.markers.producer_id,
                producer_epoch=entry.markers.epoch,
                transaction_result=entry.markers.committed,
                topics=tuple(
                    schema.WritableTxnMarkerTopic(name=topic, partition_indexes=tuple(indexes))
                    for topic, indexes in by_topic(sorted(entry.partitions))
                ),
                coordinator_epoch=entry.coordinator_epoch,
                transaction_version=entry.markers.transaction_version,
            )
            for entry in entries
        )
    )


def _told(response: Any) -> dict[tuple[int, TopicPartition], ErrorCode]:
    return {
        (marker.producer_id, TopicPartition(topic.name, partition.partition_index)): partition.error_code
        for marker in response.markers
        for topic in marker.topics
        for partition in topic.partitions
    }
