"""WriteTxnMarkers (key 27), v1-2. A coordinator ends transactions in partitions that this broker leads.

Each partition gets its result once its marker is committed, or REQUEST_TIMED_OUT if that takes too long; the
coordinator then retries. Markers of an older producer epoch or coordinator epoch are refused. From v2 on a marker
names the transaction protocol, so that a late marker never ends the next transaction. For committed offsets the group
coordinator ends the transaction, in its log and its state at the same time.
"""

from __future__ import annotations

from typing import Any

from kio.schema.write_txn_markers.v2.response import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersResponse,
)

from penstock.broker.coordinators.transactions.markers import TxnMarkerEntry
from penstock.broker.coordinators.transactions.request_queue import PartitionErrors
from penstock.broker.network.requests import RequestContext
from penstock.protocol.record_batch import EndMarker
from penstock.transactions.messages import TopicPartition


async def handle(ctx: RequestContext, request: Any) -> Any:
    appender = ctx.services.transactions.marker_appender
    errors = await appender.append([_marker_entry(marker) for marker in request.markers])
    return WriteTxnMarkersResponse(
        markers=tuple(
            _result(marker, outcomes) for marker, outcomes in zip(request.markers, errors, strict=True)
        )
    )


def _marker_entry(marker: Any) -> TxnMarkerEntry:
    return TxnMarkerEntry(
        EndMarker(
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
            coordinator_epoch=marker.coordinator_epoch,
            committed=marker.transaction_result,
        ),
        marker.transaction_version,
        [TopicPartition(topic.name, index) for topic in marker.topics for index in topic.partition_indexes],
    )


def _result(marker: Any, outcomes: PartitionErrors) -> Any:
    return WritableTxnMarkerResult(
        producer_id=marker.producer_id,
        topics=tuple(
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=tuple(
                    WritableTxnMarkerPartitionResult(
                        partition_index=index, error_code=outcomes[TopicPartition(topic.name, index)]
                    )
                    for index in topic.partition_indexes
                ),
            )
            for topic in marker.topics
        ),
    )
