"""Ends transactions in partitions that are led here: what coordinators ask by WriteTxnMarkers, and our own directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.transactions.outbox import Outcomes
from penstock.cluster.names import CONSUMER_OFFSETS, TRANSACTION_STATE, is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import EndMarker
from penstock.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node

#: Less than a coordinator waits for an answer.
_COMMIT_S_MAX: Final = 8.0
#: How many elections of a coordinator this node may not have heard of yet.
_EPOCHS_AHEAD_MAX: Final = 100


class End(NamedTuple):
    """A marker, and where it is to be written."""

    marker: EndMarker
    #: Of the protocol by which the transaction ran.
    transaction_version: int
    partitions: Sequence[TopicPartition]


class _Appended(NamedTuple):
    """A marker that is in the log; it counts when it is committed."""

    outcomes: Outcomes
    place: TopicPartition
    committed: Awaitable[None]


async def end_here(node: Node, ends: Sequence[End]) -> list[Outcomes]:
    """What became of each partition, when that is final. All are appended, in their order, before any is waited for."""
    told: list[Outcomes] = []
    waiting: list[_Appended] = []
    coordinator_epoch_max = _coordinator_epoch_max(node)
    for end in ends:
        outcomes: Outcomes = {}
        told.append(outcomes)
        if end.marker.coordinator_epoch > coordinator_epoch_max:
            # It would shut out every true coordinator of this producer.
            outcomes.update(dict.fromkeys(end.partitions, ErrorCode.invalid_request))
            continue
        for place in end.partitions:
            try:
                committed = _append(node, place, end)
            except ApiError as error:
                outcomes[place] = error.code
            else:
                outcomes[place] = ErrorCode.none
                if committed is not None:
                    waiting.append(_Appended(outcomes, place, committed))
    if waiting:
        await _await_commits(waiting)
    _count_errors(node, told)
    return told


def _coordinator_epoch_max(node: Node) -> int:
    """A coordinator's epoch is the leader epoch of its partition of the transaction state."""
    topic = node.image.topics.get(TRANSACTION_STATE)
    known = () if topic is None else topic.partitions.values()
    return max((partition.leader_epoch for partition in known), default=0) + _EPOCHS_AHEAD_MAX


def _append(node: Node, place: TopicPartition, end: End) -> Awaitable[None] | None:
    """Returns what to wait for, if anything. Raises ApiError."""
    if place.topic == CONSUMER_OFFSETS:
        return node.groups.write_marker(place.partition, end.marker, end.transaction_version)
    partition = node.partitions.find(place.topic, place.partition)
    if is_internal(place.topic):
        raise ApiError(ErrorCode.invalid_topic_exception, f"{place.topic} takes part in no transaction")
    if not partition.has_enough_replicas:
        raise ApiError(ErrorCode.not_enough_replicas)
    offset = partition.append_marker(end.marker, node.now_ms(), transaction_version=end.transaction_version)
    return None if offset < partition.high_watermark else partition.committed(offset)


async def _await_commits(waiting: list[_Appended]) -> None:
    codes = await asyncio.gather(*(_outcome(each.committed) for each in waiting))
    for each, code in zip(waiting, codes, strict=True):
        each.outcomes[each.place] = code


async def _outcome(committed: Awaitable[None]) -> ErrorCode:
    try:
        async with asyncio.timeout(_COMMIT_S_MAX):
            await committed
    except ApiError as error:
        return error.code
    except TimeoutError:
        return ErrorCode.request_timed_out
    return ErrorCode.none


def _count_errors(node: Node, told: list[Outcomes]) -> None:
    for outcomes in told:
        for code in outcomes.values():
            if code is not ErrorCode.none:
                node.metrics.count_error("write_txn_markers", code.name)
