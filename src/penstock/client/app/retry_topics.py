"""Retry topics: reads records when they are due, and keeps the order of keys across retries.

With `keep_order`, later messages of a failed key follow it into the retry topics. A message may be handled if no
earlier message of its key waits; otherwise it follows that message to its retry topic. Original offsets, and not retry
levels, decide which message is earlier: a message that has followed another one and then fails goes to the level of its
own attempts, which may be lower. When partitions are assigned, the member reads once which messages wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError

from penstock.client.app.failures import FailureRecord
from penstock.client.app.figures import Figures
from penstock.client.app.handler import NOT_HANDLED
from penstock.client.app.librdkafka import Settings
from penstock.client.app.membership import Membership
from penstock.client.app.message import TopicPartition, confluent_partition, topic_partition_of
from penstock.client.deadletters.headers import is_for_group, original_topic, read_origin, retry_level
from penstock.client.errors import Unavailable

__all__ = ("DueRetries", "KeyOrder", "in_key_order", "read_waiting_retries")


_CONSUME_TIMEOUT_S: Final = 1.0
_IDLE_ROUNDS_MAX: Final = 30


def read_waiting_retries(
    settings: Settings, group: str, from_offsets: Mapping[TopicPartition, int]
) -> Iterator[Any]:
    """Yields the group's records from these offsets to the end of each partition. Raises Unavailable."""
    if not from_offsets:
        return
    reader = Consumer({**settings, "group.id": f"{group}.order", "enable.partition.eof": True})
    try:
        reader.assign(
            [confluent_partition(topic_partition, offset) for topic_partition, offset in from_offsets.items()]
        )
        yield from _read_to_end(reader.consume, set(from_offsets), group)
    finally:
        reader.close()


def _read_to_end(consume: Callable[..., list[Any]], left: set[TopicPartition], group: str) -> Iterator[Any]:
    idle = 0
    while left:
        taken = consume(1_000, _CONSUME_TIMEOUT_S)
        idle = 0 if taken else idle + 1
        if idle > _IDLE_ROUNDS_MAX:
            raise Unavailable("retries cannot be read, so it is not known which keys have failed")
        for raw in taken:
            error = raw.error()
            if error is None:
                if is_for_group(raw.headers(), group):
                    yield raw
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(topic_partition_of(raw))


class DueRetries:
    """Pauses partitions of retry topics whose next record is not due yet."""

    def __init__(
        self, topics: Collection[str], group: str, figures: Figures, now_ms: Callable[[], int]
    ) -> None:
        self._topics = frozenset(topics)
        self._group = group
        self._figures = figures
        self._now_ms = now_ms
        self._due_ms: dict[TopicPartition, int] = {}

    def ready(self, batch: Sequence[Any], membership: Membership) -> Sequence[Any]:
        """Returns the messages to handle now, in order. Seeks back to the others, which are read again when due."""
        if not self._topics or self._topics.isdisjoint({raw.topic() for raw in batch}):
            return batch
        ready, back = [], {}
        for raw in batch:
            topic_partition = topic_partition_of(raw)
            if topic_partition in back:
                continue
            if topic_partition[0] not in self._topics:
                ready.append(raw)
            elif raw.timestamp()[1] > self._now_ms():
                back[topic_partition] = raw.offset()
                self._due_ms[topic_partition] = raw.timestamp()[1]
            elif is_for_group(raw.headers(), self._group):
                ready.append(raw)
            else:
                self._figures.skipped += 1
        if back:
            membership.pause(back)
            membership.rewind(back)
        return ready

    def resume(self, membership: Membership) -> None:
        """Resumes partitions whose next record is due."""
        now_ms = self._now_ms()
        due = [topic_partition for topic_partition, moment_ms in self._due_ms.items() if moment_ms <= now_ms]
        for topic_partition in due:
            del self._due_ms[topic_partition]
        if due:
            membership.resume(due)

    def wait_s(self, most_s: float) -> float:
        """The time until the next record is due, at most `most_s`."""
        if not self._due_ms:
            return most_s
        return min(most_s, max((min(self._due_ms.values()) - self._now_ms()) / 1000, 0.001))

    @property
    def held(self) -> set[TopicPartition]:
        return set(self._due_ms)

    def forget(self, topic_partitions: Sequence[TopicPartition]) -> None:
        for topic_partition in topic_partitions:
            self._due_ms.pop(topic_partition, None)


class KeyOrder:
    """Which messages wait in retry topics, by key, original offset and retry level. Pure."""

    def __init__(self) -> None:
        #: By original topic, partition and key.
        self._waiting: dict[tuple[str, int, bytes], dict[int, Counter[int]]] = {}

    def must_follow(self, raw: Any) -> int | None:
        """Returns the retry level that the message must follow to; None if it may be handled."""
        found = self._waiting.get(_order_key(raw)) if self._waiting else None
        if found is None:
            return None
        offset = _original_offset(raw)
        return max((level for other, at in found.items() if other < offset for level in at), default=None)

    def moved(self, raw: Any, record: FailureRecord | None) -> None:
        """Records that a message left its level: handled (`record` is None), dead, or waiting in another level."""
        key, level = _order_key(raw), _record_level(raw)
        if level:
            self._left(key, _original_offset(raw), level)
        if record is not None and not record.is_dead:
            self._came(key, _original_offset(raw), retry_level(record.topic) or 0)

    def found(self, raw: Any) -> None:
        """Records a message that waited when its partition was assigned."""
        self._came(_order_key(raw), _original_offset(raw), _record_level(raw))

    def forget(self, topic_partitions: Sequence[TopicPartition]) -> None:
        gone = {(original_topic(topic), partition) for topic, partition in topic_partitions}
        self._waiting = {key: at for key, at in self._waiting.items() if key[:2] not in gone}

    def _came(self, key: tuple[str, int, bytes], offset: int, level: int) -> None:
        self._waiting.setdefault(key, {}).setdefault(offset, Counter())[level] += 1

    def _left(self, key: tuple[str, int, bytes], offset: int, level: int) -> None:
        found = self._waiting.get(key, {})
        at = found.get(offset, Counter())
        at[level] -= 1
        if at[level] <= 0:
            del at[level]
        if not at:
            found.pop(offset, None)
        if not found:
            self._waiting.pop(key, None)


def in_key_order(
    call: Callable[[Any], Any], order: KeyOrder, follow: Callable[[Any, int], FailureRecord]
) -> Callable[[Any], Any]:
    """Wraps `call` so that a message that must follow an earlier one goes to a retry topic instead of the handler."""

    def handle(raw: Any) -> Any:
        level = order.must_follow(raw) if raw.key() is not None else None
        if level is not None:
            order.moved(raw, follow(raw, level))
            return NOT_HANDLED
        result = call(raw)
        if raw.key() is not None:
            order.moved(raw, None)
        return result

    return handle


def _record_level(raw: Any) -> int:
    return retry_level(raw.topic()) or 0


def _order_key(raw: Any) -> tuple[str, int, bytes]:
    return original_topic(raw.topic()), raw.partition(), raw.key() or b""


def _original_offset(raw: Any) -> int:
    """The offset of the message in its original topic."""
    if not _record_level(raw):
        return int(raw.offset())
    return read_origin(
        raw.headers(), topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    ).offset
