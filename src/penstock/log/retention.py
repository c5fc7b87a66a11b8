"""Which segments have outlived a topic's retention. Only whole segments go, the oldest first."""

from penstock.log.config import LogConfig
from penstock.log.files import FilePool
from penstock.log.lookup import retention_timestamp
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList


def expired(
    segments: SegmentList,
    config: LogConfig,
    files: FilePool,
    *,
    now_ms: int,
    start_offset: int,
    end_offset: int,
    below: int,
) -> list[Segment]:
    """The run of segments, from the oldest on, that may go: nothing at or beyond `below` is in it.

    The last segment is in it only when all of it has expired. May read a few bytes of each index.
    """
    surplus_bytes = segments.size_bytes - config.retention_bytes
    gone: list[Segment] = []
    for segment in list(segments):
        following = end_offset if segment.next_base is None else segment.next_base
        if following > below or (segment.next_base is None and segment.size == 0):
            break
        passed = segment.next_base is not None and segment.next_base <= start_offset
        if not (passed or (config.cleanup_delete and _is_due(segment, config, files, now_ms, surplus_bytes))):
            break
        gone.append(segment)
        surplus_bytes -= segment.size
    return gone


def _is_due(segment: Segment, config: LogConfig, files: FilePool, now_ms: int, surplus_bytes: int) -> bool:
    if config.retention_bytes >= 0 and surplus_bytes >= segment.size:
        return True
    return config.retention_ms >= 0 and now_ms - retention_timestamp(segment, files) > config.retention_ms
