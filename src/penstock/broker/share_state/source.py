"""Reading single records of a partition, wherever it is led, as they are when they become dead letters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.groups.share_state.copies import Copy, Scan, Unreadable
from penstock.groups.share_state.ranges import Range
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.cluster.state import PartitionState, TopicState

#: What is read at a time; whole batches, so one may be larger.
_PIECE_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 5.0
_NOT_A_REPLICA: Final = -1
_NO_SESSION: Final = -1
_END: Final = 1 << 62

#: Takes records as they come, and says from which offset on it wants no more, if it does.
Collect = Callable[[Iterable[Copy | Unreadable]], int | None]


class Found(NamedTuple):
    """What is wanted before `seen_upto`, and did not come, does not exist: before `start_offset` it did."""

    start_offset: int
    seen_upto: int


class _Piece(NamedTuple):
    data: BytesLike
    start_offset: int
    is_beyond_end: bool = False


async def read_records(
    node: Node, topic: TopicState, index: int, wanted: Sequence[Range], collect: Collect
) -> Found:
    """Reads as far as a piece goes, and at least one of those that are `wanted`, which are sorted.

    `collect` is called in a thread. Raises ApiError: what passes, or UNKNOWN_TOPIC_OR_PARTITION.
    """
    offset, last = wanted[0][0], wanted[-1][1]
    piece = await _read(node, topic, index, offset)
    if piece.is_beyond_end:
        # An unclean election has taken away what was delivered.
        return Found(_END, _END)
    if offset < piece.start_offset:
        return Found(piece.start_offset, min(piece.start_offset, last + 1))
    scan = Scan(piece.data, wanted, node.settings.integer("penstock.decompress.max.bytes"))
    stopped_at = await node.in_thread(collect, scan)
    seen_upto = scan.seen_upto if stopped_at is None else stopped_at
    if seen_upto <= offset:
        raise ApiError(ErrorCode.corrupt_message, f"no whole batch at {offset} of {topic.name}-{index}")
    return Found(piece.start_offset, seen_upto)


async def _read(node: Node, topic: TopicState, index: int, offset: int) -> _Piece:
    state = node.image.partition(topic.name, index)
    if state is None or node.image.topics[topic.name].id != topic.id:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"{topic.name}-{index} is gone")
    here = node.partitions.led(topic.name, index)
    piece = await (_read_here(node, here, offset) if here else _read_there(node, topic, index, state, offset))
    if not piece.data and offset >= piece.start_offset and not piece.is_beyond_end:
        raise ApiError(ErrorCode.offset_not_available, "the new leader is still finding out")
    return piece


async def _read_here(node: Node, partition: Partition, offset: int) -> _Piece:
    log, upto = partition.log, partition.high
    if offset < log.start_offset:
        return _Piece(b"", log.start_offset)
    if offset >= log.end_offset:
        return _Piece(b"", log.start_offset, is_beyond_end=True)
    if offset >= upto.offset:
        return _Piece(b"", log.start_offset)
    data = (await node.in_thread(log.read, offset, _PIECE_BYTES, upto)).data
    return _Piece(data, log.start_offset)


async def _read_there(
    node: Node, topic: TopicState, index: int, state: PartitionState, offset: int
) -> _Piece:
    from penstock.broker.peers import PeerUnreachable
    from penstock.protocol.fetch import FetchPartition
    from penstock.protocol.replica_fetch import VERSION, encode_replica_fetch, parse_fetch_response

    if not state.has_leader:
        raise ApiError(ErrorCode.leader_not_available)
    asked = FetchPartition(index, state.leader_epoch, offset, -1, -1, _PIECE_BYTES)
    body = encode_replica_fetch(
        replica_id=_NOT_A_REPLICA,
        broker_epoch=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=_PIECE_BYTES,
        session_id=0,
        session_epoch=_NO_SESSION,
        topics=[(topic.id.bytes, [asked])],
    )
    try:
        answer = await node.peers.fetch(
            state.leader, body, version=VERSION, timeout_s=_TIMEOUT_S, purpose="dead-letters"
        )
    except (PeerUnreachable, TimeoutError) as error:
        raise ApiError(ErrorCode.network_exception, str(error)) from None
    parsed = parse_fetch_response(answer)
    if parsed.error or not parsed.partitions:
        raise ApiError(ErrorCode(parsed.error) if parsed.error else ErrorCode.unknown_server_error)
    (part,) = parsed.partitions
    if part.error == ErrorCode.offset_out_of_range.value:
        return _Piece(b"", part.log_start_offset, is_beyond_end=offset >= part.log_start_offset)
    if part.error:
        raise ApiError(ErrorCode(part.error))
    return _Piece(part.records, part.log_start_offset)
