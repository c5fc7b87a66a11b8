"""WriteTxnMarkers (key 27), v1-2. Ends transactions in partitions led here; a coordinator's request.

Each partition is answered once its marker is committed: REQUEST_TIMED_OUT when that takes too long, and the
coordinator repeats it. Markers of an older producer epoch or coordinator epoch are refused; from v2 on a marker says
by which protocol its transaction ran, so that a late one never ends the next transaction. Committed offsets are the
group coordinator's, which ends the transaction in its log and in its state at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final

from kio.schema.write_txn_markers.v2.response import (
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersResponse,
)

from penstock.broker.context import RequestContext
from penstock.cluster.names import CONSUMER_OFFSETS, is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import EndMarker

if TYPE_CHECKING:
    from penstock.broker.node import Node

#: Less than a coordinator waits for an answer.
_COMMIT_S_MAX: Final = 8.0

#: The marker's number in the request, a topic and a partition.
_Place = tuple[int, str, int]


async def handle(ctx: RequestContext, request: Any) -> Any:
    """All are appended, in their order, before any is waited for."""
    errors: dict[_Place, ErrorCode] = {}
    waiting: dict[_Place, Awaitable[None]] = {}
    for number, marker in enumerate(request.markers):
        for topic in marker.topics:
            for index in topic.partition_indexes:
                place = (number, topic.name, index)
                try:
                    committed = _append(ctx.node, topic.name, index, marker)
                except ApiError as error:
                    errors[place] = error.code
                else:
                    if committed is not None:
                        waiting[place] = committed
    if waiting:
        outcomes = await asyncio.gather(*map(_outcome, waiting.values()))
        errors.update(zip(waiting, outcomes, strict=True))
    for code in errors.values():
        if code is not ErrorCode.none:
            ctx.node.metrics.count_error("write_txn_markers", code.name)
    return _response(request, errors)


def _append(node: Node, topic: str, index: int, marker: Any) -> Awaitable[None] | None:
    """Returns what to wait for, if anything. Raises ApiError."""
    end = EndMarker(
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        coordinator_epoch=marker.coordinator_epoch,
        committed=marker.transaction_result,
    )
    if topic == CONSUMER_OFFSETS:
        return node.groups.write_marker(index, end, marker.transaction_version)
    partition = node.partitions.find(topic, index)
    if is_internal(topic):
        raise ApiError(ErrorCode.invalid_topic_exception, f"{topic} takes part in no transaction")
    if not partition.has_enough_replicas:
        raise ApiError(ErrorCode.not_enough_replicas)
    offset = partition.append_marker(end, node.now_ms(), transaction_version=marker.transaction_version)
    return None if offset < partition.high_watermark else partition.committed(offset)


async def _outcome(committed: Awaitable[None]) -> ErrorCode:
    try:
        async with asyncio.timeout(_COMMIT_S_MAX):
            await committed
    except ApiError as error:
        return error.code
    except TimeoutError:
        return ErrorCode.request_timed_out
    return ErrorCode.none


def _response(request: Any, errors: dict[_Place, ErrorCode]) -> Any:
    return WriteTxnMarkersResponse(
        markers=tuple(
            WritableTxnMarkerResult(
                producer_id=marker.producer_id,
                topics=tuple(
                    WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=tuple(
                            WritableTxnMarkerPartitionResult(
                                partition_index=index,
                                error_code=errors.get((number, topic.name, index), ErrorCode.none),
                            )
                            for index in topic.partition_indexes
                        ),
                    )
                    for topic in marker.topics
                ),
            )
            for number, marker in enumerate(request.markers)
        )
    )
