"""WriteTxnMarkers (key 27), v1-2. Ends transactions in partitions led here; a coordinator's request.

Each partition is answered once its marker is committed: REQUEST_TIMED_OUT when that takes too long, and the
coordinator repeats it. Markers of an older producer epoch or coordinator epoch are refused; from v2 on a marker says
by which protocol its transaction ran, so that a late one never ends the next transaction. Committed offsets are the
group coordinator's, which ends the transaction in its log and in its state at once.
"""

from __future__ import annotations

from typing import Any

from kio.schema.write_txn_markers.v2.response import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersResponse,
)

from penstock.broker.context import RequestContext
from penstock.broker.transactions.ending import End, end_here
from penstock.broker.transactions.outbox import Outcomes
from penstock.protocol.records import EndMarker
from penstock.transactions.messages import TopicPartition


async def handle(ctx: RequestContext, request: Any) -> Any:
    told = await end_here(ctx.node, [_end(marker) for marker in request.markers])
    return WriteTxnMarkersResponse(
        markers=tuple(
            _result(marker, outcomes) for marker, outcomes in zip(request.markers, told, strict=True)
        )
    )


def _end(marker: Any) -> End:
    return End(
        EndMarker(
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
            coordinator_epoch=marker.coordinator_epoch,
            committed=marker.transaction_result,
        ),
        marker.transaction_version,
        [TopicPartition(topic.name, index) for topic in marker.topics for index in topic.partition_indexes],
    )


def _result(marker: Any, outcomes: Outcomes) -> Any:
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
