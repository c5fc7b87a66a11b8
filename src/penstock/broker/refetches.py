"""What followers fetch again and again: damage that only they notice, as a leader serves its files as they are.

A follower refuses a batch whose checksum does not hold, and can do no more than ask for it again. So when one is
served the same offset for the third time in a row, the leader reads there as a follower does. A damaged copy goes the
way of an unreadable one, where another replica is in sync and has the same records; the last one stays as it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.log.validation import check_served
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.log.log import Log

logger = logging.getLogger("penstock.replication")

#: A lost answer or two are no reason to read files.
_SUSPICIOUS_COUNT: Final = 3


class Refetches:
    """Of one partition, in one leader epoch."""

    __slots__ = ("_is_looking", "_offsets", "_repeats", "_told_offset")

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}  # by follower: from where it was last served
        self._repeats: dict[int, int] = {}  # by follower: how often since then
        self._is_looking = False
        self._told_offset = -1

    def served(self, replica: int, offset: int) -> bool:
        """Records went to a follower. True: so often from the same offset that it seems to refuse them."""
        if self._offsets.get(replica) != offset:
            self._offsets[replica] = offset
            self._repeats.pop(replica, None)
            return False
        repeats = self._repeats.get(replica, 1) + 1
        self._repeats[replica] = repeats % _SUSPICIOUS_COUNT
        return repeats == _SUSPICIOUS_COUNT

    async def look(self, node: Node, partition: Partition, offset: int, size: int) -> None:
        """Read in a thread what was served, and see whether it is what was written."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            await node.in_thread(_check, partition.log, offset, size)
        except ApiError as error:
            # Of a log that has been closed or handed on meanwhile this says nothing.
            is_current = partition.leading is not None and partition.leading.refetches is self
            if is_current and error.code in (ErrorCode.kafka_storage_error, ErrorCode.corrupt_message):
                self._found_damage(node, partition, offset, error)
        finally:
            self._is_looking = False

    def _found_damage(self, node: Node, partition: Partition, offset: int, error: ApiError) -> None:
        if partition.isr_size > 1:
            node.partitions.unreadable(partition, error)
        elif offset != self._told_offset:
            self._told_offset = offset
            node.partitions.survey(partition, offset)
            logger.error(
                "the only replica in sync is damaged",
                extra={
                    "partition": f"{partition.topic}-{partition.index}",
                    "offset": offset,
                    "reason": error.message,
                },
            )


def _check(log: Log, offset: int, size: int) -> None:
    """Blocking. Raises CORRUPT_MESSAGE for damage, and what else reading may raise."""
    records = log.read(offset, size, log.end).data
    try:
        check_served(records)
    except ApiError as error:
        message = f"damaged at or after offset {offset}: {error.message}"
        raise ApiError(ErrorCode.corrupt_message, message) from None
