"""Settings of the client library: what a user gives, and what a contract needs whatever the user gives."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from penstock.client.errors import ClientError

__all__ = [
    "Acks",
    "ApplicationError",
    "Settings",
    "admin_settings",
    "consumer_settings",
    "producer_settings",
    "share_settings",
]

Settings = dict[str, Any]
#: Whose confirmation a publish waits for: nobody's, the leader's, or that of all replicas in sync.
Acks = Literal[0, 1, "all"]

#: Decided by the contract; a user who sets one of them would break it without being told.
_OURS: Final = {
    "acks": "acks= of Penstock and publish",
    "request.required.acks": "acks= of Penstock and publish",
    "enable.idempotence": 'acks=: producers are idempotent with "all", and cannot be with less',
    "bootstrap.servers": "the first argument of Penstock",
    "enable.auto.commit": "delivery=",
    "enable.auto.offset.store": "delivery=",
    "auto.offset.reset": "start=",
    "group.id": "group=",
    "isolation.level": "delivery=",
    "transactional.id": "delivery='exactly-once'",
    "partitioner": "the partitioner that Java clients have, so that all writers agree",
}
#: Known to one kind of client only; the other would say that it does not know them.
_PRODUCER_ONLY: Final = (
    "batch.",
    "compression.",
    "delivery.timeout.ms",
    "linger.ms",
    "message.send.max.retries",
    "message.timeout.ms",
    "queue.buffering.",
    "request.timeout.ms",
    "retries",
    "sticky.partitioning.linger.ms",
    "transaction.timeout.ms",
)
_CONSUMER_ONLY: Final = (
    "check.crcs",
    "fetch.",
    "group.",
    "heartbeat.interval.ms",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
    "queued.",
    "session.timeout.ms",
)
#: Of those that other consumers have, what a member of a share group has too; brokers decide the rest.
_SHARED: Final = (
    "check.crcs",
    "fetch.max.bytes",
    "fetch.min.bytes",
    "fetch.wait.max.ms",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
)
#: What Java clients and kafka-python do; keyless messages are spread.
_PARTITIONER: Final = "murmur2_random"
#: As much as the library can: what is too large is for brokers to say, whose topics differ.
_BYTES_MAX: Final = 1_000_000_000
#: How soon a reader fetches again whose queue was full. The library's own second is longer than the queue lasts: a
#: handler that takes less than some microseconds would wait most of the time.
_QUEUE_BACKOFF_MS: Final = 50
#: Librdkafka's default of 45 s is for clients whose heartbeats stop while they collect garbage. Here a thread of the
#: library sends them, which needs no lock of the interpreter: only a process that gets no CPU at all is late. One that
#: is taken for dead by mistake keeps its contract (it commits nothing any more); the price is a rebalance.
_SESSION_MS: Final = 15_000
_SAY_AGAIN_S: Final = 10.0
#: What differs between two reports of the same failure.
_PASSED: Final = re.compile(r" \(after \d+ms in state \w+.*\)$")
_LOG: Final = logging.getLogger("penstock.client")
_LOGGER: Final = logging.getLogger("penstock.client.librdkafka")


class FailureFilter(logging.Filter):
    """Lets a failure of a connection through once in a while: the library tells of every attempt, 20 in a second."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._said_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # The library gives the kind of event, the name of the client, and the text.
        if not isinstance(record.args, tuple) or len(record.args) != 3 or record.args[0] != "FAIL":
            return True
        failure = f"{record.args[1]} {_PASSED.sub('', str(record.args[2]))}"
        now_s = self._clock_s()
        self._said_s = {each: at_s for each, at_s in self._said_s.items() if now_s - at_s < _SAY_AGAIN_S}
        if failure in self._said_s:
            return False
        self._said_s[failure] = now_s
        return True


_LOGGER.addFilter(FailureFilter())


class ApplicationError(ClientError):
    """A declaration that cannot work: a sentence for whoever wrote it."""


def checked(given: Mapping[str, Any] | None) -> Settings:
    """Raises ApplicationError for what is not the user's to set."""
    settings = dict(given or {})
    for name in settings:
        if name in _OURS:
            raise ApplicationError(f"{name} is not set here: it follows from {_OURS[name]}")
    return settings


def common(bootstrap: str, name: str) -> Settings:
    return {
        "bootstrap.servers": bootstrap,
        "client.id": name,
        "logger": _LOGGER,
        "error_cb": _BrokerErrors(bootstrap),
    }


class _BrokerErrors:
    """Says in one sentence that no broker answers, of all that the library tells about each connection."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._why = ""
        self._said_s: dict[int, float] = {}

    def __call__(self, error: Any) -> None:
        from confluent_kafka import KafkaError

        code = error.code()
        if code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self._why = f" ({error.str()})"
            return
        if code not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL):
            return
        now_s = time.monotonic()
        if now_s - self._said_s.get(code, -_SAY_AGAIN_S) < _SAY_AGAIN_S:
            return
        self._said_s[code] = now_s
        if code == KafkaError._ALL_BROKERS_DOWN:
            _LOG.warning("no broker of %s answers%s; trying again", self._bootstrap, self._why)
        else:
            _LOG.error("%s: %s", self._bootstrap, error.str())


def checked_acks(acks: object) -> Acks:
    """Raises ApplicationError."""
    if isinstance(acks, bool) or acks not in (0, 1, "0", "1", "all"):
        raise ApplicationError(f'acks={acks!r} is none of 0, 1 and "all"')
    return "all" if acks == "all" else 1 if int(str(acks)) else 0


def producer_settings(bootstrap: str, name: str, given: Settings, acks: Acks = "all") -> Settings:
    """Idempotent with acks="all", also at most once: without retries the library still sends what a leader disowns.

    A leader that loses its place does that to batches which it has written, and the next one has.
    """
    chosen = {key: value for key, value in given.items() if not key.startswith(_CONSUMER_ONLY)}
    sent = {
        "partitioner": _PARTITIONER,
        "message.max.bytes": _BYTES_MAX,
        "acks": acks,
        "enable.idempotence": acks == "all",
    }
    return {**common(bootstrap, name), **sent, **chosen}


def consumer_settings(bootstrap: str, name: str, given: Settings, *, group: str) -> Settings:
    """Positions are committed by us alone, and a position that is not there is an error, never a guess."""
    chosen = {key: value for key, value in given.items() if not key.startswith(_PRODUCER_ONLY)}
    of_classic = {
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": _SESSION_MS,
    }
    return {
        **common(bootstrap, name),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "fetch.queue.backoff.ms": _QUEUE_BACKOFF_MS,
        **({} if chosen.get("group.protocol") == "consumer" else of_classic),
        **chosen,
    }


def share_settings(bootstrap: str, name: str, given: Settings, *, group: str, taken_max: int) -> Settings:
    """For a member of a share group: each message is answered for by itself."""
    chosen = {
        key: value
        for key, value in given.items()
        if key in _SHARED or not key.startswith((*_PRODUCER_ONLY, *_CONSUMER_ONLY))
    }
    return {
        **common(bootstrap, name),
        "group.id": group,
        "share.acknowledgement.mode": "explicit",
        "max.poll.records": taken_max,
        **chosen,
    }


def admin_settings(bootstrap: str, name: str, given: Settings) -> Settings:
    of_others = (*_PRODUCER_ONLY, *_CONSUMER_ONLY)
    return {
        **common(bootstrap, name),
        **{key: value for key, value in given.items() if not key.startswith(of_others)},
    }
