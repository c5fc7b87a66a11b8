"""What publishing does while the buffer of the producer is full, and the counters of what was dropped.

A message is dropped before the producer numbers it. So a drop makes no gap in the sequence of an idempotent producer,
and the messages before and after it keep their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from penstock.client.app.librdkafka import ApplicationError, Settings
from penstock.client.errors import NotPublished
from penstock.client.retry import Duration, duration_s

__all__ = (
    "BLOCK",
    "Block",
    "BufferFull",
    "Overflow",
    "PublishCounters",
    "PublishFigures",
    "Rule",
    "WaitingMessages",
    "checked_overflow",
    "drop_oldest_bounds",
)

T = TypeVar("T")

_LOG: Final = logging.getLogger("penstock.client")
DROP_OLDEST: Final = "drop-oldest"
DROP_NEWEST: Final = "drop-newest"
#: The reason why a message is not sent that still waits in the buffer when the application is closed.
CLOSED: Final = "closed"
#: Defaults of librdkafka.
_BUFFER_MESSAGES_MAX: Final = 100_000
_BUFFER_KBYTES_MAX: Final = 1_048_576
#: With drop-oldest, this part of the buffer is the queue of librdkafka, which nothing can be dropped from.
_SENDING_SHARE: Final = 10
_LOG_EVERY_S: Final = 10.0


class BufferFull(NotPublished):
    """The buffer was full, so the message was not sent. `policy` says which overflow policy decided that."""

    def __init__(self, topic: str, policy: str) -> None:
        super().__init__(f"{topic}: {_SENTENCES[policy]}")
        self.policy = policy


_SENTENCES: Final = {
    "block": "the buffer was full for as long as overflow= allows to wait; the message was not sent",
    "reject": "the buffer is full, and overflow='reject' does not wait; the message was not sent",
    DROP_OLDEST: "dropped unsent, as the oldest message in a full buffer (overflow='drop-oldest')",
    DROP_NEWEST: "dropped unsent, because the buffer is full (overflow='drop-newest')",
    CLOSED: "dropped unsent, because the application was closed while the message waited in the buffer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Wait up to `wait` for room in the buffer, then raise BufferFull. Raises ValueError for a wait of 0."""

    wait: Duration = "5m"

    def __post_init__(self) -> None:
        if duration_s(self.wait) == 0:
            raise ValueError('wait=0 does not wait: use overflow="reject"')


Overflow = Literal["block", "reject", "drop-oldest", "drop-newest"] | Block


class Rule(NamedTuple):
    """A checked overflow policy."""

    policy: str
    wait_s: float = 0.0


BLOCK: Final = Rule("block", duration_s(Block().wait))
_RULES: Final = {"block": BLOCK} | {name: Rule(name) for name in ("reject", DROP_OLDEST, DROP_NEWEST)}


def checked_overflow(overflow: object) -> Rule:
    """Raises ApplicationError."""
    if isinstance(overflow, Block):
        return Rule("block", duration_s(overflow.wait))
    rule = _RULES.get(overflow) if isinstance(overflow, str) else None
    if rule is None:
        raise ApplicationError(
            f"overflow={overflow!r} must be {', '.join(f'{name!r}' for name in _RULES)}, or Block(wait=...)"
        )
    return rule


class _Bounds(NamedTuple):
    messages: int
    bytes: int


def drop_oldest_bounds(settings: Settings) -> tuple[Settings, _Bounds]:
    """Divides the buffer into the queue of librdkafka and the messages that wait for it and may be dropped.

    Returns the producer's settings, and the bounds of what waits.
    """
    # 0 means "no bound" in librdkafka. Without a bound nothing would ever be dropped.
    messages = int(settings.get("queue.buffering.max.messages", 0)) or _BUFFER_MESSAGES_MAX
    kbytes = int(settings.get("queue.buffering.max.kbytes", _BUFFER_KBYTES_MAX))
    sending = max(messages // _SENDING_SHARE, 1)
    return (
        {**settings, "queue.buffering.max.messages": sending},
        _Bounds(max(messages - sending, 1), kbytes * 1024),
    )


class WaitingMessages(Generic[T]):
    """Messages that wait for room in the queue of librdkafka, oldest first. The caller holds a lock."""

    def __init__(self, bounds: _Bounds) -> None:
        self._bounds = bounds
        self._messages: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: T, size: int) -> list[T]:
        """Returns the messages to drop: the oldest ones, or the added one if it alone is larger than the buffer."""
        if size > self._bounds.bytes:
            return [message]
        self._messages.append((message, size))
        self._bytes += size
        dropped = []
        while len(self._messages) > self._bounds.messages or self._bytes > self._bounds.bytes:
            dropped.append(self.first())
            self.remove_first()
        return dropped

    def first(self) -> T:
        return self._messages[0][0]

    def remove_first(self) -> None:
        self._bytes -= self._messages.popleft()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFigures:
    """What became of the messages that an application has published so far, with replies, retries and dead letters.

    Their number is sent + waiting + refused + dropped_total, except while a call is in progress.
    """

    #: Given to the producer, which sends them and reports what the brokers answer.
    sent: int
    #: With drop-oldest: in the buffer, not yet given to the producer.
    waiting: int
    #: Refused by the producer at once, for example because they are too large.
    refused: int
    #: Not sent because the buffer was full, by topic and overflow policy.
    dropped: Mapping[tuple[str, str], int]

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())


class PublishCounters:
    """Counts for all publishers of an application, and logs drops of a topic at most once in 10 s."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._sent = 0
        self._refused = 0
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._unlogged: Counter[tuple[str, str]] = Counter()
        self._logged_s: dict[tuple[str, str], float] = {}

    def add_sent(self) -> None:
        with self._lock:
            self._sent += 1

    def add_refused(self) -> None:
        with self._lock:
            self._refused += 1

    def dropped(self, topic: str, policy: str) -> BufferFull:
        """Counts the drop and returns its error."""
        with self._lock:
            self._dropped[topic, policy] += 1
            self._unlogged[topic, policy] += 1
        self.log_drops()
        return BufferFull(topic, policy)

    def log_drops(self, *, now: bool = False) -> None:
        """Logs drops that were not logged yet, of each topic and policy once in 10 s, or all `now`."""
        if not self._unlogged:
            return
        now_s = self._clock_s()
        with self._lock:
            due = {
                each: count
                for each, count in self._unlogged.items()
                if now or now_s - self._logged_s.get(each, -_LOG_EVERY_S) >= _LOG_EVERY_S
            }
            for each in due:
                del self._unlogged[each]
                self._logged_s[each] = now_s
        for (topic, policy), count in due.items():
            _LOG.warning("%s: %d messages were not published (%s)", topic, count, policy)

    def figures(self, waiting: int) -> PublishFigures:
        with self._lock:
            return PublishFigures(
                sent=self._sent, waiting=waiting, refused=self._refused, dropped=dict(self._dropped)
            )
