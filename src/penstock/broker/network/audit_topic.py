"""The audit topic: the lines of the audit trail as records of `__penstock_audit`, written behind the requests.

No request waits for it. Lines wait in a bounded buffer; while it is full, lines are dropped and counted, and the next
record that is written says how many. A node writes to one partition, in order, under a producer id of its own, so that
a batch whose reply was lost is not written twice. Lines that wait when the node ends are only in its log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.config.internal_topics import AUDIT_TOPIC
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import NO_PRODUCER_ID, Record, encode_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, ImageView
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic
    from penstock.cluster.image import TopicState

logger = logging.getLogger("penstock.topics")

#: Lines and bytes that wait at most. With the budgets of principals this is for many principals at once, or for a
#: topic that cannot be written.
LINES_MAX: Final = 5_000
BYTES_MAX: Final = 4 << 20
#: Lines and bytes of one batch; the bytes are less than a topic accepts by default.
_BATCH_LINES_MAX: Final = 500
_BATCH_BYTES_MAX: Final = 256 << 10
_BACKOFF: Final = ExponentialBackoff(base_ms=100, cap_ms=10_000)
_SEQUENCE_MAX: Final = (1 << 31) - 1


class _Line(NamedTuple):
    at_ms: int
    principal: bytes
    text: bytes

    @property
    def size(self) -> int:
        return len(self.principal) + len(self.text)


class AuditTopicWriter:
    def __init__(
        self,
        *,
        settings: NodeSettings,
        metadata: ImageView,
        environment: Environment,
        appends: PlannedAppends,
        create_topics: Callable[[Sequence[NewTopic]], Awaitable[Sequence[CreateTopicResult]]],
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._environment = environment
        self._appends = appends
        self._create_topics = create_topics
        self._node = (("node", str(settings.node_id).encode()),)
        self._waiting: deque[_Line] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._producer_id = NO_PRODUCER_ID
        self._sequence = 0
        self.written = 0
        self.dropped = 0
        #: Of those, how many no record has reported yet.
        self._unreported = 0

    def add(self, principal: str, line: str, now_ms: int) -> None:
        """Never waits, and never raises."""
        added = _Line(now_ms, principal.encode(errors="replace"), line.encode())
        if len(self._waiting) >= LINES_MAX or self._bytes + added.size > BYTES_MAX:
            self._drop(1)
            return
        self._waiting.append(added)
        self._bytes += added.size
        if self._task is None:
            self._task = self._environment.spawn(self._write_all())

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._unreported += lines

    async def _write_all(self) -> None:
        attempt = 0
        try:
            while self._waiting:
                try:
                    await self._write_batch()
                    attempt = 0
                except (ApiError, TimeoutError, OSError) as error:
                    logger.warning(
                        "the audit topic cannot be written",
                        extra={"reason": str(error), "waiting": len(self._waiting), "dropped": self.dropped},
                    )
                    self._producer_id = NO_PRODUCER_ID  # its sequence may not fit any more
                    await asyncio.sleep(_BACKOFF.spread_ms(attempt, random) / 1000)
                    attempt += 1
        finally:
            self._task = None

    async def _write_batch(self) -> None:
        """Raises ApiError if nothing was written."""
        topic = await self._topic()
        if self._producer_id == NO_PRODUCER_ID and self._settings.is_broker:
            # A controller without a broker's role has no ids to give: after a lost reply its lines may be there twice.
            self._producer_id, self._sequence = await self._appends.new_producer_id(), 0
        lines, size = self._next_lines()
        unreported, records = (
            self._unreported,
            [self._record(place, line) for place, line in enumerate(lines)],
        )
        if unreported:
            records.append(self._record(len(records), self._report(lines[-1].at_ms, unreported)))
        has_producer = self._producer_id != NO_PRODUCER_ID
        batch = encode_batch(
            records,
            producer_id=self._producer_id,
            producer_epoch=0 if has_producer else -1,
            base_sequence=self._sequence if has_producer else -1,
        )
        partition = self._settings.node_id % len(topic.partitions)
        try:
            await self._appends.append(topic.name, partition, batch, topic_id=topic.id, purpose="audit")
        except ApiError as error:
            if error.code in (ErrorCode.message_too_large, ErrorCode.record_list_too_large):
                self._remove(lines, size)
                self._drop(len(lines))
            raise
        self._remove(lines, size)
        self._sequence = (self._sequence + len(records)) & _SEQUENCE_MAX
        self._unreported -= unreported
        self.written += len(lines)

    async def _topic(self) -> TopicState:
        """Raises ApiError if the topic does not exist and cannot be created."""
        topic = self._metadata.image.topics.get(AUDIT_TOPIC.name)
        if topic is None:
            new = AUDIT_TOPIC.new_topic(self._settings, len(self._metadata.image.active_brokers()))
            (result,) = await self._create_topics([new])
            if result.error not in (ErrorCode.none, ErrorCode.topic_already_exists):
                raise ApiError(result.error, result.message)
            topic = self._metadata.image.topics.get(AUDIT_TOPIC.name)
        if topic is None:
            raise ApiError(ErrorCode.leader_not_available, f"{AUDIT_TOPIC.name} is being created")
        return topic

    def _next_lines(self) -> tuple[list[_Line], int]:
        lines: list[_Line] = []
        size = 0
        for line in self._waiting:
            if len(lines) == _BATCH_LINES_MAX or (lines and size + line.size > _BATCH_BYTES_MAX):
                break
            lines.append(line)
            size += line.size
        return lines, size

    def _remove(self, lines: list[_Line], size: int) -> None:
        for _ in lines:
            self._waiting.popleft()
        self._bytes -= size

    def _record(self, place: int, line: _Line) -> Record:
        return Record(place, line.at_ms, line.principal, line.text, self._node)

    def _report(self, at_ms: int, lines: int) -> _Line:
        return _Line(at_ms, b"", json.dumps({"event": "dropped", "lines": lines}).encode())
