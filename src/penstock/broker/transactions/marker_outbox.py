"""Markers on their way to one broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from penstock.broker.group_requests import by_topic
from penstock.broker.transactions.outbox import Outbox, Outcomes, Told
from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import Markers, TopicPartition

#: Markers in one request; answers wait for the slowest of them.
_MARKERS_MAX: Final = 500


class _Entry(NamedTuple):
    markers: Markers
    coordinator_epoch: int
    partitions: tuple[TopicPartition, ...]
    is_over: Callable[[], bool]
    outcomes: asyncio.Future[Outcomes]

    @property
    def key(self) -> int:
        return self.markers.producer_id


class MarkerOutbox(Outbox[_Entry]):
    _API_KEY = 27
    _PURPOSE = "markers"  # an answer waits until they are committed
    _TIMEOUT_S = 10.0

    async def write(
        self,
        markers: Markers,
        coordinator_epoch: int,
        partitions: tuple[TopicPartition, ...],
        is_over: Callable[[], bool],
    ) -> Outcomes:
        """What became of each partition's marker. They are not sent any more once `is_over` says so."""
        outcomes: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        return await self.ask(_Entry(markers, coordinator_epoch, partitions, is_over, outcomes))

    def _take(self) -> list[_Entry]:
        entries, self._waiting = self._waiting[:_MARKERS_MAX], self._waiting[_MARKERS_MAX:]
        self._answer([entry for entry in entries if entry.is_over()], {}, ErrorCode.network_exception)
        return [entry for entry in entries if not entry.outcomes.done()]

    def _request(self, entries: list[_Entry]) -> Any:
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

    def _told(self, response: Any) -> Told:
        return {
            (marker.producer_id, TopicPartition(topic.name, partition.partition_index)): partition.error_code
            for marker in response.markers
            for topic in marker.topics
            for partition in topic.partitions
        }
