"""The metadata log: what the cluster has decided, durable before anyone sees it.

Decisions are taken one at a time against the image, appended, synced, and replayed into a copy. Readers get the
copy once this node has followed it, so a topic that is seen can be written to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from penstock.cluster.decision import Decision
from penstock.cluster.delta import ImageDelta
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import RemoveTopicRecord
from penstock.cluster.serde import decode_record, encode_records
from penstock.cluster.wire import MetadataRecord
from penstock.protocol.records import Record, decode_records, encode_batch, iter_batches

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.log.log import Log

Reply = TypeVar("Reply")

_READ_BYTES = 1 << 20
_DECODED_BYTES_MAX = 1 << 30


class MetadataLog:
    def __init__(
        self, node: Node, log: Log, follow: Callable[[ImageDelta, ClusterImage], Awaitable[None]]
    ) -> None:
        self.image = ClusterImage()
        self.log = log
        #: Held by whoever changes the image or makes this node follow it.
        self.turn = asyncio.Lock()
        self._node = node
        self._follow = follow

    @property
    def committed_offset(self) -> int:
        return self.log.synced.offset - 1

    @property
    def applied_offset(self) -> int:
        """The last offset whose record is in the published image."""
        return self.committed_offset

    @property
    def is_active(self) -> bool:
        """This node is the active controller: decisions are made here."""
        return True

    async def reached(self, offset: int) -> None:
        """Returns once the published image holds the record at this offset."""
        assert offset <= self.applied_offset

    @property
    def next_offset(self) -> int:
        return self.log.end_offset

    def replay(self) -> set[UUID]:
        """Build the image from the log, at start. Returns the ids of topics that were deleted."""
        deleted: set[UUID] = set()
        offset = self.log.start_offset
        while offset < self.log.end_offset:
            piece = self.log.read(offset, _READ_BYTES, self.log.end)
            for header, batch in iter_batches(piece.data):
                if header.is_control:
                    continue
                for record in decode_records(batch, _DECODED_BYTES_MAX):
                    assert record.value is not None
                    decoded = decode_record(record.value)
                    self.image.replay(decoded)
                    if isinstance(decoded, RemoveTopicRecord):
                        deleted.add(decoded.topic_id)
            offset = piece.next_offset
        return deleted

    async def propose(self, decide: Callable[[ClusterImage], Decision[Reply]]) -> Reply:
        """Raises what `decide` raises, and ApiError when the log cannot be written: nothing has changed.

        Once the records are durable they hold, whether or not this node can follow them at once.
        """
        async with self.turn:
            decision = decide(self.image)
            if decision.records:
                await self._commit(decision.records)
            return decision.reply

    async def _commit(self, records: tuple[MetadataRecord, ...]) -> None:
        now_ms = self._node.now_ms()
        batch = encode_batch(
            [
                Record(offset=place, timestamp=now_ms, key=None, value=value)
                for place, value in enumerate(encode_records(records))
            ]
        )
        self.log.append(memoryview(batch), leader_epoch=1, now_ms=now_ms, internal=True)
        await self._node.sync(self.log)
        image = self.image.fork()
        delta = image.apply(records)
        await self._follow(delta, image)
        self.image = image
        self._node.image_changed(delta)
