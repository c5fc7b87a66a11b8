"""The relay's side of Kafka: sends each batch of rows and its marker in one transaction, and reads the markers back.

A marker says which rows a shard published last. The markers are in a compacted topic, with one key for each shard of
each number of shards. A marker names a row by its id and by a fingerprint of its message id, so that a database which
assigns an id a second time (because it was restored or created again) does not lose the row that has it then.

The sender distinguishes what the broker refuses for good from what a retry may fix. A refusal concerns all messages
that the library put into one request for a partition; which of them caused it shows only when they are sent one by
one.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from penstock.client.app.librdkafka import checked_settings, consumer_settings, producer_settings
from penstock.client.errors import ClientError
from penstock.client.outbox.messages import (
    OutboxError,
    OutboxRow,
    RelayInterrupted,
    RowsRefused,
    fingerprint,
    row_headers,
    topic_name_error,
)
from penstock.client.wire.settings import SECURITY_PREFIXES

__all__ = (
    "MARKER_SETTINGS",
    "Marker",
    "TransactionalSender",
    "check_name",
    "client_settings",
    "ensure_marker_topic",
    "error_text",
    "is_relay_error",
    "make_consumer",
    "make_producer",
    "marker_topic",
    "read_markers",
    "retry_until_done",
    "transactional_id",
)


_TRANSACTION_TIMEOUT_MS: Final = 60_000
#: The broker limits the size of a message; the library keeps batches of several messages below `batch.size`.
_MESSAGE_BYTES_MAX: Final = 256 << 20
#: The timeout of one call; the relay repeats calls that need longer.
CALL_S: Final = 2.0
#: How long a pending call may delay the stop of a relay.
STOP_S: Final = 10.0

Settings = dict[str, Any]


def client_settings(bootstrap: str, given: Mapping[str, Any] | None) -> Settings:
    """Checks the user's settings. Raises OutboxError."""
    try:
        return {"bootstrap.servers": bootstrap, **checked_settings(given)}
    except ClientError as error:
        raise OutboxError(str(error)) from None


def make_producer(settings: Settings, transactional_id: str) -> Any:
    given = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    ours = {
        "transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS,
        "message.max.bytes": _MESSAGE_BYTES_MAX,
        "topic.metadata.propagation.max.ms": 5_000,
        # The relay sends a whole batch before it waits, so lingering would only add latency.
        "linger.ms": 0,
        **given,
    }
    made = producer_settings(settings["bootstrap.servers"], transactional_id, ours)
    timeout_ms = {"message.timeout.ms": made["transaction.timeout.ms"]}
    return _make_client(Producer, {**timeout_ms, **made, "transactional.id": transactional_id})


def make_consumer(settings: Settings, name: str, *, isolation: str) -> Any:
    """Returns a consumer for `assign`, outside of any group."""
    given = {key: value for key, value in settings.items() if key != "bootstrap.servers"}
    made = consumer_settings(settings["bootstrap.servers"], name, given, group=name)
    ours = {
        "isolation.level": isolation,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 20,
    }
    return _make_client(Consumer, {**made, **ours})


def make_admin_client(settings: Settings) -> Any:
    given = {key: value for key, value in settings.items() if key != "bootstrap.servers"}
    made = consumer_settings(settings["bootstrap.servers"], "penstock-outbox", given, group="none")
    of_clients = (*SECURITY_PREFIXES, "oauth_cb", "client.", "socket.", "logger", "broker.", "reconnect.")
    chosen = {name: value for name, value in made.items() if name.startswith(of_clients)}
    return _make_client(AdminClient, {"bootstrap.servers": settings["bootstrap.servers"], **chosen})


def _make_client(kind: Callable[[Settings], Any], settings: Settings) -> Any:
    try:
        return kind(settings)
    except (KafkaException, TypeError, ValueError) as error:
        raise OutboxError(f"the client library refuses these settings: {error_text(error)}") from None


def error_text(error: BaseException | Any) -> str:
    """Returns the library's message for an error."""
    cause: Any = error.args[0] if isinstance(error, BaseException) and error.args else error
    return str(cause.str()) if hasattr(cause, "str") else str(cause)


def retry_until_done(call: Callable[[float], Any], what: str, stopping: threading.Event) -> Any:
    """Repeats a call of the transactional producer until it has succeeded.

    Raises RelayInterrupted for errors that a restart of the relay may fix and when the relay stops, OutboxError for
    others.
    """
    stop_requested_at: float | None = None
    while True:
        try:
            return call(CALL_S)
        except KafkaException as error:
            cause = error.args[0]
            if is_relay_error(cause):
                raise OutboxError(f"{what}: {cause.str()}") from None
            if not cause.retriable() or cause.fatal() or cause.txn_requires_abort():
                raise RelayInterrupted(f"{what}: {cause.str()}", cause=cause) from None
        if stopping.is_set():
            stop_requested_at = stop_requested_at or time.monotonic()
            if time.monotonic() - stop_requested_at > STOP_S:
                raise RelayInterrupted(f"{what}: no reply before the relay stops")


def is_relay_error(error: Any) -> bool:
    """Whether the error concerns the relay and its rights, and not a row."""
    return error.code() in (
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.UNSUPPORTED_VERSION,
    )


MARKER_SETTINGS: Final = {"cleanup.policy": "compact"}
SHARDS_MAX: Final = 256
_OUTBOX_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


def check_name(name: str) -> str:
    if not _OUTBOX_NAME.fullmatch(name):
        raise OutboxError(
            f"{name!r} is not an outbox name: use 1 to 100 letters, digits, full stops, hyphens and underscores"
        )
    return name


def marker_topic(name: str) -> str:
    return f"penstock.outbox.{name}"


def transactional_id(name: str, shards: int, shard: int) -> str:
    return f"penstock-outbox-{name}-{shards}-{shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The rows of one batch, with the database and the shard that they come from."""

    #: The id of the database.
    identity: str
    shards: int
    shard: int
    #: Fingerprints by row id.
    rows: Mapping[int, str]

    @classmethod
    def of(cls, rows: Iterable[OutboxRow], *, identity: str, shards: int, shard: int) -> Marker:
        row_fingerprint = {row.id: fingerprint(row.message_id) for row in rows}
        return cls(identity=identity, shards=shards, shard=shard, rows=row_fingerprint)

    @property
    def key(self) -> bytes:
        return b"%d/%d" % (self.shards, self.shard)

    def to_bytes(self) -> bytes:
        document = {
            "version": 1,
            "identity": self.identity,
            "shards": self.shards,
            "shard": self.shard,
            "rows": {str(number): row_fingerprint for number, row_fingerprint in self.rows.items()},
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Marker:
        """Raises ValueError."""
        document: Any = json.loads(data)
        try:
            if document["version"] != 1:
                raise ValueError(f"marker version {document['version']!r} is newer than this program")
            rows = {int(number): str(row_fingerprint) for number, row_fingerprint in document["rows"].items()}
            shards, shard = int(document["shards"]), int(document["shard"])
            return cls(identity=str(document["identity"]), shards=shards, shard=shard, rows=rows)
        except (TypeError, KeyError, AttributeError) as flaw:
            raise ValueError(f"not a marker: {flaw!r}") from None


_CLEANUP_POLICY: Final = "cleanup.policy"
_ADMIN_TIMEOUT_S: Final = 10.0
#: Another relay's open transaction blocks read_committed readers until it ends or times out.
_READ_TIMEOUT_S: Final = 180.0


def ensure_marker_topic(settings: Settings, name: str) -> None:
    """Creates the marker topic if it is missing.

    Raises OutboxError if the topic exists and is not compacted, RelayInterrupted if no broker answers.
    """
    topic, admin = marker_topic(name), make_admin_client(settings)
    wanted = NewTopic(topic, num_partitions=1, config=dict(MARKER_SETTINGS))
    made = admin.create_topics([wanted], request_timeout=_ADMIN_TIMEOUT_S)
    try:
        made[topic].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise _marker_topic_error(error, f"topic {topic}") from None
        _check_cleanup_policy(admin, topic)


def _check_cleanup_policy(admin: Any, topic: str) -> None:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        policy = (
            admin.describe_configs([resource], request_timeout=_ADMIN_TIMEOUT_S)[resource]
            .result()[_CLEANUP_POLICY]
            .value
        )
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return  # the user may not have the right to describe configs
        raise _marker_topic_error(error, f"topic {topic}") from None
    if policy != MARKER_SETTINGS[_CLEANUP_POLICY]:
        raise OutboxError(
            f"topic {topic} has {_CLEANUP_POLICY}={policy}, which would delete markers: set it to compact"
        )


def read_markers(settings: Settings, name: str, stopping: threading.Event) -> list[Marker]:
    """Returns the last committed marker of every shard, for this and earlier numbers of shards.

    Reads up to the log end offset. The last stable offset is not enough, because open transactions of other shards in
    the same partition hold it back. Raises RelayInterrupted, OutboxError.
    """
    end = _log_end_offset(settings, name)
    latest: dict[bytes, bytes] = {}
    reader = make_consumer(settings, f"penstock-outbox-{name}", isolation="read_committed")
    try:
        reader.assign([_marker_partition(name)])
        deadline = time.monotonic() + _READ_TIMEOUT_S
        position = 0
        while position < end:
            if time.monotonic() > deadline or stopping.is_set():
                raise RelayInterrupted(f"{marker_topic(name)} could not be read to its end offset, {end}")
            message = reader.poll(0.1)
            if message is not None:
                position = _apply_message(message, latest, position)
    finally:
        reader.close()
    return [_decode_marker(name, value) for _, value in sorted(latest.items())]


def _apply_message(message: Any, latest: dict[bytes, bytes], position: int) -> int:
    """Applies a marker, and returns the position after it."""
    if message.error() is None:
        latest.pop(message.key(), None)
        if message.value() is not None:
            latest[message.key()] = message.value()
        return int(message.offset()) + 1
    if message.error().code() == KafkaError._PARTITION_EOF:
        return int(message.offset())
    if message.error().retriable() or message.error().code() == KafkaError._TRANSPORT:
        return position
    raise _marker_topic_error(message.error(), f"topic {message.topic()}")


def _log_end_offset(settings: Settings, name: str) -> int:
    reader = make_consumer(settings, f"penstock-outbox-{name}", isolation="read_uncommitted")
    try:
        return int(reader.get_watermark_offsets(_marker_partition(name), timeout=2 * CALL_S)[1])
    except KafkaException as error:
        raise _marker_topic_error(error, f"topic {marker_topic(name)}") from None
    finally:
        reader.close()


def _marker_partition(name: str) -> Any:
    # Offset 0 needs no request. If it was deleted, the consumer resets to the log start offset.
    return confluent_kafka.TopicPartition(marker_topic(name), 0, 0)


def _decode_marker(name: str, value: bytes) -> Marker:
    try:
        return Marker.from_bytes(value)
    except ValueError as flaw:
        raise OutboxError(
            f"topic {marker_topic(name)} contains a record that is not a marker: {flaw}"
        ) from None


def _marker_topic_error(error: Any, what: str) -> OutboxError | RelayInterrupted:
    cause = error if isinstance(error, KafkaError) else error.args[0]
    forbidden = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    kind = OutboxError if cause.code() in (*forbidden, KafkaError.POLICY_VIOLATION) else RelayInterrupted
    return kind(f"{what}: {error_text(cause)}")


_QUEUE_FULL_WAIT_S: Final = 0.05
_FLUSH_S: Final = 0.1
#: Every broker knows a newly created topic within this time.
_UNKNOWN_TOPIC_S: Final = 5.0
_UNKNOWN_TOPIC_WAIT_S: Final = 0.1
_INIT_TIMEOUT_S: Final = 30.0


class TransactionalSender:
    """The transactional producer of one transactional id. `open` fences earlier producers of this id."""

    def __init__(
        self, settings: Settings, transactional_id: str, topic: str, stopping: threading.Event
    ) -> None:
        """`topic` is the marker topic."""
        self._settings = settings
        self.transactional_id = transactional_id
        self._topic = topic
        self._stopping = stopping
        self._producer: Any = None
        self._partitions: dict[str, int] = {}
        self._failures: list[Any] = []

    def open(self) -> None:
        """Ends the open transaction of an earlier producer with this id. Raises RelayInterrupted, OutboxError."""
        self.close()
        self._producer = make_producer(self._settings, self.transactional_id)
        deadline = time.monotonic() + _INIT_TIMEOUT_S

        def init(timeout_s: float) -> None:
            if time.monotonic() > deadline:
                raise RelayInterrupted(
                    f"the producer {self.transactional_id} was not initialised within {_INIT_TIMEOUT_S:g} s"
                )
            self._producer.init_transactions(timeout_s)

        retry_until_done(init, "initialising the producer", self._stopping)

    def close(self) -> None:
        """Drops the producer. The next `open` of this id ends a transaction that is still open."""
        self._producer = None
        self._partitions.clear()

    def send(self, rows: Sequence[OutboxRow], markers: Mapping[bytes, bytes | None]) -> None:
        """Sends rows and markers (by key) in a transaction that `commit` then commits.

        Raises RowsRefused after it has aborted the transaction, RelayInterrupted if a restart has to settle it.
        """
        self._check_partitions(rows)
        self._failures = []
        retry_until_done(
            lambda _: self._producer.begin_transaction(), "beginning the transaction", self._stopping
        )
        try:
            for row in rows:
                self._produce_row(row)
            for key, marker in markers.items():
                self._produce(self._topic, marker, key)
            self._await_reports()
        except RowsRefused:
            self._abort()
            raise

    def commit(self) -> None:
        """Raises RowsRefused as `send` does, RelayInterrupted if the outcome is unknown; the marker shows it later."""
        try:
            retry_until_done(self._producer.commit_transaction, "committing the transaction", self._stopping)
        except RelayInterrupted as error:
            if error.cause is None or not error.cause.txn_requires_abort():
                raise
            refusals = [each for each, _ in self._failures if is_permanent_error(each)]
            if not refusals and not is_permanent_error(error.cause):
                raise
            self._abort()
            raise RowsRefused(error_text(refusals[0] if refusals else error.cause)) from None

    def _abort(self) -> None:
        retry_until_done(self._producer.abort_transaction, "aborting the transaction", self._stopping)
        # After a refusal the library continues with a sequence number that the broker does not expect.
        self.open()

    def _produce_row(self, row: OutboxRow) -> None:
        try:
            partition_argument = {} if row.partition is None else {"partition": row.partition}
            self._produce(row.topic, row.value, row.key, headers=row_headers(row), **partition_argument)
        except (KafkaException, ValueError, TypeError) as error:
            reason = error_text(error)
            if isinstance(error, KafkaException) and not is_permanent_error(error.args[0]):
                raise RelayInterrupted(f"{row.topic}: {reason}") from None
            raise RowsRefused(reason, {row.id: reason}) from None

    def _produce(self, topic: str, value: bytes | None, key: bytes | None, **more: Any) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, on_delivery=self._report, **more)
                return
            except BufferError:
                self._call_library(self._producer.poll, _QUEUE_FULL_WAIT_S)

    def _call_library(self, call: Callable[[float], Any], timeout_s: float) -> Any:
        """Raises RelayInterrupted for errors of the library, most likely because another relay has taken over."""
        try:
            return call(timeout_s)
        except KafkaException as error:
            raise RelayInterrupted(error_text(error), cause=error.args[0]) from None

    def _report(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failures.append((error, message.topic()))

    def _await_reports(self) -> None:
        """Waits a short time for delivery reports; `commit` waits for the others. Stops at the first failure."""
        deadline = time.monotonic() + CALL_S
        while (
            self._call_library(self._producer.flush, _FLUSH_S)
            and not self._failures
            and time.monotonic() < deadline
        ):
            pass
        for error, topic in self._failures:
            if is_permanent_error(error):
                raise RowsRefused(f"{topic}: {error.str()}")
        for error, topic in self._failures:
            raise RelayInterrupted(f"{topic}: {error.str()}", cause=error)

    # Check topics and partitions first, because the library takes long to report an unknown topic.

    def _check_partitions(self, rows: Sequence[OutboxRow]) -> None:
        missing = {row.topic for row in rows if row.topic not in self._partitions}
        flaws = {topic: flaw for topic in sorted(missing) if (flaw := self._look_up(topic))}
        for row in rows:
            if row.partition is not None and row.partition >= self._partitions.get(row.topic, 1 << 31):
                self._look_up(row.topic)  # it may have more partitions now
        if culprits := {row.id: flaw for row in rows if (flaw := self._flaw(row, flaws))}:
            raise RowsRefused("; ".join(sorted(set(culprits.values()))), culprits)

    def _flaw(self, row: OutboxRow, flaws: dict[str, str]) -> str | None:
        if row.topic in flaws:
            return flaws[row.topic]
        if row.partition is not None and not 0 <= row.partition < self._partitions[row.topic]:
            return f"{row.topic} has no partition {row.partition}"
        return None

    def _look_up(self, topic: str) -> str | None:
        """Stores the number of partitions, or returns why the topic cannot be written to."""
        if (flaw := topic_name_error(topic)) is not None:
            return flaw
        deadline = time.monotonic() + _UNKNOWN_TOPIC_S
        while True:
            found = self._metadata(topic)
            if found.error is None and found.partitions:
                self._partitions[topic] = len(found.partitions)
                return None
            if found.error is not None and not _is_unknown_topic(found.error):
                return f"{topic}: {found.error.str()}"
            if time.monotonic() > deadline or self._stopping.wait(_UNKNOWN_TOPIC_WAIT_S):
                break
        if self._stopping.is_set():
            raise RelayInterrupted(f"topic {topic} was not found before the relay stops")
        return f"topic {topic} does not exist"

    def _metadata(self, topic: str) -> Any:
        """Fetches metadata; this creates the topic if the broker creates topics automatically."""
        try:
            return self._producer.list_topics(topic, timeout=CALL_S).topics[topic]
        except KafkaException as error:
            raise RelayInterrupted(f"{topic}: {error_text(error)}") from None


def is_permanent_error(error: Any) -> bool:
    """Whether a retry cannot help: the message, the topic or the relay's rights have to change."""
    return error.code() in (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._INVALID_ARG,
    )


def _is_unknown_topic(error: Any) -> bool:
    return error.code() in (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError._WAIT_CACHE,
    )
