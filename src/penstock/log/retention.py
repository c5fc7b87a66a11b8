"""Retention: which segments a topic no longer keeps, by time, by size, or because they are below the log start
offset. Only whole segments are deleted, the oldest first.
"""

from penstock.log.config import LogConfig
from penstock.log.index_files import retention_timestamp
from penstock.log.segment import LogSegment, LogSegments
from penstock.log.segment_files import FilePool


def expired_segments(
    segments: LogSegments,
    config: LogConfig,
    files: FilePool,
    *,
    now_ms: int,
    start_offset: int,
    end_offset: int,
    below: int,
) -> list[LogSegment]:
    """Returns the oldest segments that may be deleted; they contain nothing at or beyond `below`.

    They include the last segment only if all of it has expired. May read a few bytes of each index.
    """
    surplus_bytes = segments.size_bytes - config.retention_bytes
    gone: list[LogSegment] = []
    for segment in list(segments):
        following = end_offset if segment.next_base is None else segment.next_base
        if following > below or (segment.next_base is None and segment.size == 0):
            break
        passed = segment.next_base is not None and segment.next_base <= start_offset
        if not (
            passed or (config.cleanup_delete and _is_expired(segment, config, files, now_ms, surplus_bytes))
        ):
            break
        gone.append(segment)
        surplus_bytes -= segment.size
    return gone


def _is_expired(
    segment: LogSegment, config: LogConfig, files: FilePool, now_ms: int, surplus_bytes: int
) -> bool:
    if config.retention_bytes >= 0 and surplus_bytes >= segment.size:
        return True
    return config.retention_ms >= 0 and now_ms - retention_timestamp(segment, files) > config.retention_ms
