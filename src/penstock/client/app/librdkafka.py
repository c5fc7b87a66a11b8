"""Settings of librdkafka: the user's own, and those that a delivery contract requires."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from confluent_kafka import KafkaError

from penstock.client.errors import ClientError
from penstock.client.wire.properties import with_config_file
from penstock.client.wire.settings import librdkafka_names

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
#: Which replicas must confirm a message: none, the leader, or all in-sync replicas.
Acks = Literal[0, 1, "all"]

#: Settings that the contract decides, and what decides them. A user who set one would break the contract unnoticed.
_RESERVED_SETTINGS: Final = {
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
#: Prefixes of settings that only producers know; a consumer would warn about an unknown setting.
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
#: The consumer settings that also apply to members of share groups; brokers decide the rest.
_SHARE_CONSUMER_SETTINGS: Final = (
    "check.crcs",
    "fetch.max.bytes",
    "fetch.min.bytes",
    "fetch.wait.max.ms",
    "max.partition.fetch.bytes",
    "max.poll.interval.ms",
)
#: The same as Java clients and kafka-python; messages without a key go to random partitions.
_PARTITIONER: Final = "murmur2_random"
#: The maximum of librdkafka: brokers decide what is too large, because topics differ.
_MESSAGE_BYTES_MAX: Final = 1_000_000_000
#: How soon a consumer fetches again after its queue was full. The default of librdkafka, one second, is longer than the
#: queue lasts: a handler that takes only microseconds would wait most of the time.
_QUEUE_BACKOFF_MS: Final = 50
#: Librdkafka's default of 45 s is for clients whose heartbeats stop during garbage collection. Here a librdkafka thread
#: sends them, which does not need the GIL: only a process that gets no CPU at all is late. A live member that times out
#: by mistake keeps its contract (its commits are refused); the price is a rebalance.
_SESSION_MS: Final = 15_000
_REPEAT_S: Final = 10.0
#: The part of the text that differs between two reports of the same failure.
_ELAPSED: Final = re.compile(r" \(after \d+ms in state \w+.*\)$")
_LOG: Final = logging.getLogger("penstock.client")
_LOGGER: Final = logging.getLogger("penstock.client.librdkafka")


class FailureFilter(logging.Filter):
    """Logs each connection failure once in 10 s: librdkafka reports every attempt, 20 times a second."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._reported_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # The arguments of librdkafka are the kind of event, the name of the client, and the text.
        if not isinstance(record.args, tuple) or len(record.args) != 3 or record.args[0] != "FAIL":
            return True
        failure = f"{record.args[1]} {_ELAPSED.sub('', str(record.args[2]))}"
        now_s = self._clock_s()
        self._reported_s = {each: at_s for each, at_s in self._reported_s.items() if now_s - at_s < _REPEAT_S}
        if failure in self._reported_s:
            return False
        self._reported_s[failure] = now_s
        return True


_LOGGER.addFilter(FailureFilter())


class ApplicationError(ClientError):
    """The application is declared or used in a way that cannot work; the message says what to change."""


def checked_settings(given: Mapping[str, Any] | None) -> Settings:
    """The settings, with those of the file that they name, for librdkafka.

    Raises ApplicationError for settings that a contract decides, and for credentials that cannot be used.
    """
    for name in given or {}:
        if name in _RESERVED_SETTINGS:
            raise ApplicationError(f"{name} cannot be set: it follows from {_RESERVED_SETTINGS[name]}")
    try:
        settings = with_config_file(given or {})
        # A file that also serves other programs has settings that the contract decides here.
        return librdkafka_names(
            {name: value for name, value in settings.items() if name not in _RESERVED_SETTINGS}
        )
    except ClientError as error:
        raise ApplicationError(str(error)) from None


def common_settings(bootstrap: str, name: str) -> Settings:
    return {
        "bootstrap.servers": bootstrap,
        "client.id": name,
        "logger": _LOGGER,
        "error_cb": _BrokerErrorReporter(bootstrap),
    }


class _BrokerErrorReporter:
    """Logs one sentence when no broker answers, instead of all that librdkafka reports about each connection."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._why = ""
        self._reported_s: dict[int, float] = {}

    def __call__(self, error: Any) -> None:
        code = error.code()
        if code in (KafkaError._TRANSPORT, KafkaError._RESOLVE):
            self._why = f" ({error.str()})"
            return
        if code not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL):
            return
        now_s = time.monotonic()
        if now_s - self._reported_s.get(code, -_REPEAT_S) < _REPEAT_S:
            return
        self._reported_s[code] = now_s
        if code == KafkaError._ALL_BROKERS_DOWN:
            _LOG.warning("no broker of %s answers%s; trying again", self._bootstrap, self._why)
        else:
            _LOG.error("%s: %s", self._bootstrap, error.str())


def checked_acks(acks: object) -> Acks:
    """Raises ApplicationError."""
    if isinstance(acks, bool) or acks not in (0, 1, "0", "1", "all"):
        raise ApplicationError(f'acks={acks!r} must be 0, 1 or "all"')
    return "all" if acks == "all" else 1 if int(str(acks)) else 0


def producer_settings(bootstrap: str, name: str, given: Settings, acks: Acks = "all") -> Settings:
    """Settings of an idempotent producer with acks="all", of a plain one otherwise.

    At-most-once needs an idempotent producer too. Even without retries librdkafka sends a batch again that a leader
    rejected because it lost its leadership, although that leader had written the batch and the next one has it.
    """
    chosen = {key: value for key, value in given.items() if not key.startswith(_CONSUMER_ONLY)}
    sent = {
        "partitioner": _PARTITIONER,
        "message.max.bytes": _MESSAGE_BYTES_MAX,
        "acks": acks,
        "enable.idempotence": acks == "all",
    }
    return {**common_settings(bootstrap, name), **sent, **chosen}


def consumer_settings(bootstrap: str, name: str, given: Settings, *, group: str) -> Settings:
    """Settings of a group member: only the contract commits, and a missing offset is an error, never reset silently."""
    chosen = {key: value for key, value in given.items() if not key.startswith(_PRODUCER_ONLY)}
    of_classic = {
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": _SESSION_MS,
    }
    return {
        **common_settings(bootstrap, name),
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
    """Settings of a share group member, which acknowledges each message by itself."""
    chosen = {
        key: value
        for key, value in given.items()
        if key in _SHARE_CONSUMER_SETTINGS or not key.startswith((*_PRODUCER_ONLY, *_CONSUMER_ONLY))
    }
    return {
        **common_settings(bootstrap, name),
        "group.id": group,
        "share.acknowledgement.mode": "explicit",
        "max.poll.records": taken_max,
        **chosen,
    }


def admin_settings(bootstrap: str, name: str, given: Settings) -> Settings:
    # Nothing polls an admin client, so its statistics would pile up.
    of_others = (*_PRODUCER_ONLY, *_CONSUMER_ONLY, "statistics.", "stats_cb")
    return {
        **common_settings(bootstrap, name),
        **{key: value for key, value in given.items() if not key.startswith(of_others)},
    }
