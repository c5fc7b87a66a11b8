"""A member of a share group: settings of the group, messages and acknowledgements, and failure reports. For one thread.

A subscription sets its share group's settings, and brokers apply them to every member. Apache Kafka knows only some of
them: without the delay, a failed message is retried at once; without at-most-once, the members accept messages before
they handle them.

A failure report precedes an acknowledgement and has a delay for one message, or the error. Only Penstock's brokers
accept it: without it a message waits for the group's delay, and a dead letter does not name the error. A member that
cannot send a report logs a warning and acknowledges anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from penstock.client.app.failures import describe_failure
from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import ApplicationError, Settings, admin_settings
from penstock.client.app.membership import CommitLost, CommitRefused
from penstock.client.app.resources import Resources
from penstock.client.app.subscription import Delivery, Subscription
from penstock.client.deadletters.headers import dead_letter_topic
from penstock.client.errors import ClientError, raise_for_error
from penstock.client.retry import Deadline, DurationError, duration_s
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.share_failures import (
    DELAY_MS_MAX,
    GROUP_DEFAULT_DELAY,
    SHARE_FAILURES,
    ShareFailures,
    WorkerError,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures_response,
)

__all__ = (
    "ACCEPT",
    "REJECT",
    "RELEASE",
    "FailureReport",
    "FailureReporter",
    "MemberLost",
    "ShareGroup",
    "ShareMember",
    "apply_share_group_settings",
    "error_report",
    "parse_delay_ms",
    "share_group_settings",
)


_LOG: Final = logging.getLogger("penstock.client")
_ADMIN_TIMEOUT_S: Final = 20.0
_VISIBLE_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05
_LOCK_MS: Final = 30_000
_DELIVERIES_MAX: Final = 5

RESET, ISOLATION = "share.auto.offset.reset", "share.isolation.level"
LOCK, LIMIT = "share.record.lock.duration.ms", "share.delivery.count.limit"
BACKOFF, BASE, CAP, JITTER = (f"penstock.share.backoff{end}" for end in ("", ".ms", ".max.ms", ".jitter.ms"))
DELIVERY, ACQUIRE = "penstock.share.delivery", "penstock.share.acquire.mode"
DEAD_LETTER_TOPIC, DEAD_LETTER_COPIES = (
    "errors.deadletterqueue.topic.name",
    "errors.deadletterqueue.copy.record.enable",
)
_ANY_TOPIC: Final = "{topic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGroup:
    """The settings of the group that are in effect."""

    lock_s: float
    deliveries_max: int
    #: Whether brokers deliver each message at most once.
    is_at_most_once: bool
    #: Whether brokers accept delays and errors of single messages.
    takes_failure_reports: bool


def share_group_settings(subscription: Subscription) -> dict[str, str]:
    """Returns the settings to set. Without `retry` and `lock`, the group keeps its own. Pure."""
    wanted = {
        RESET: subscription.start,
        ISOLATION: "read_committed",
        DELIVERY: str(subscription.delivery),
        ACQUIRE: "record_limit",
        DEAD_LETTER_TOPIC: dead_letter_topic(_ANY_TOPIC) if subscription.dead_letters else "",
    }
    if subscription.dead_letters:
        wanted[DEAD_LETTER_COPIES] = "true"
    if subscription.lock_s is not None:
        wanted[LOCK] = str(round(subscription.lock_s * 1000))
    if subscription.retry is not None:
        wanted[LIMIT] = str(subscription.retry.attempts)
        wanted[BACKOFF] = "exponential"
        wanted[BASE] = str(round(duration_s(subscription.retry.base) * 1000))
        wanted[CAP] = str(round(duration_s(subscription.retry.cap) * 1000))
        wanted[JITTER] = "-1"
    return wanted


def apply_share_group_settings(subscription: Subscription, resources: Resources) -> ShareGroup:
    """Sets the settings that differ. Raises ApplicationError if brokers refuse, ClientError if none answers."""
    settings = _GroupSettings(
        AdminClient(admin_settings(resources.bootstrap, resources.name, resources.settings)),
        subscription.group,
    )
    wanted, known = share_group_settings(subscription), settings.described()
    if DELIVERY not in known and wanted[DEAD_LETTER_TOPIC]:
        # Only Penstock's brokers replace {topic} with the name of the topic.
        wanted[DEAD_LETTER_TOPIC] = dead_letter_topic(subscription.topics[0])
        if len(subscription.topics) > 1:
            del wanted[DEAD_LETTER_TOPIC]
    _warn_of_missing_settings(subscription, wanted, known)
    changes = {name: value for name, value in wanted.items() if known.get(name, value) != value}
    if changes:
        settings.change(changes)
        known |= changes
    return ShareGroup(
        lock_s=int(known.get(LOCK) or _LOCK_MS) / 1000,
        deliveries_max=int(known.get(LIMIT) or _DELIVERIES_MAX),
        is_at_most_once=known.get(DELIVERY) == Delivery.AT_MOST_ONCE,
        takes_failure_reports=DELIVERY in known,
    )


def _warn_of_missing_settings(
    subscription: Subscription, wanted: Mapping[str, str], known: Mapping[str, str]
) -> None:
    flaws = []
    if BACKOFF in wanted and BACKOFF not in known:
        flaws.append("failed messages are retried at once")
    if LIMIT in wanted and LIMIT not in known:
        flaws.append("the broker's setting limits the attempts")
    if subscription.dead_letters and (DEAD_LETTER_TOPIC not in wanted or DEAD_LETTER_TOPIC not in known):
        flaws.append("there are no dead letters")
    if flaws:
        _LOG.warning(
            "%s: these brokers do not support all settings of the group: %s",
            subscription.group,
            ", ".join(flaws),
        )


class _GroupSettings:
    """The settings of one group in the cluster."""

    def __init__(self, admin: Any, group: str) -> None:
        self._admin = admin
        self._group = group

    def described(self) -> dict[str, str]:
        """Returns all settings of the group that the brokers know. Raises ClientError."""
        entries = self._result(
            self._admin.describe_configs([self._resource()], request_timeout=_ADMIN_TIMEOUT_S)
        )
        return {name: entry.value or "" for name, entry in entries.items()}

    def change(self, changes: Mapping[str, str]) -> None:
        """Changes settings, and waits until they are visible. Raises ApplicationError, ClientError."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in changes.items()
        ]
        self._result(
            self._admin.incremental_alter_configs([self._resource(entries)], request_timeout=_ADMIN_TIMEOUT_S)
        )
        deadline_s = time.monotonic() + _VISIBLE_TIMEOUT_S
        while not changes.items() <= self.described().items() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _resource(self, entries: list[Any] | None = None) -> Any:
        return ConfigResource(ConfigResource.Type.GROUP, self._group, incremental_configs=entries)

    def _result(self, futures: Mapping[Any, Any]) -> Any:
        (future,) = futures.values()
        try:
            return future.result(_ADMIN_TIMEOUT_S)
        except KafkaException as error:
            cause = error.args[0]
            transient = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT)
            kind = ClientError if cause.code() in transient or cause.retriable() else ApplicationError
            raise kind(f"the settings of group {self._group}: {cause.str()}") from None
        except TimeoutError:
            raise ClientError(f"the settings of group {self._group}: no broker answers") from None


_CHUNK_MAX: Final = 50
#: Short, because the locks of the messages may expire meanwhile.
_REPORT_TIMEOUT_MS: Final = 5_000


class FailureReport(NamedTuple):
    delay_ms: int = GROUP_DEFAULT_DELAY
    error: WorkerError | None = None


def parse_delay_ms(given: Any) -> int:
    """Returns the delay in milliseconds. Raises ApplicationError."""
    try:
        delay_ms = round(duration_s(given) * 1000)
    except DurationError as flaw:
        raise ApplicationError(f"delay={given!r}: {flaw}") from None
    if delay_ms > DELAY_MS_MAX:
        raise ApplicationError(f"delay={given!r} is longer than {DELAY_MS_MAX // 86_400_000} days")
    return delay_ms


def error_report(error: BaseException) -> FailureReport:
    """Returns the report for a message that becomes a dead letter because of the error."""
    failure = describe_failure(error, "")
    return FailureReport(error=WorkerError(failure.error_class, failure.message, failure.stack))


class FailureReporter:
    """Sends failure reports of one member. For one thread."""

    def __init__(self, cluster: Callable[[], Cluster], group: str) -> None:
        self._make_cluster = cluster
        self._group = group
        self._cluster: Cluster | None = None
        self._waiting: dict[tuple[str, int], list[WorkerFailure]] = {}

    def add(self, raw: Any, report: FailureReport) -> None:
        failure = WorkerFailure(raw.offset(), raw.delivery_count() or 1, *report)
        self._waiting.setdefault((raw.topic(), raw.partition()), []).append(failure)

    def send(self) -> None:
        """Sends all reports. Logs a warning about reports that could not be sent."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        deadline = Deadline(_REPORT_TIMEOUT_MS)
        for (topic, partition), failures in waiting.items():
            try:
                if self._cluster is None:
                    self._cluster = self._make_cluster()
                for at in range(0, len(failures), _CHUNK_MAX):
                    self._send(self._cluster, topic, partition, failures[at : at + _CHUNK_MAX], deadline)
            except ClientError as error:
                _LOG.warning(
                    "%s[%d]: could not report delays and errors of %d messages to the broker: %s",
                    topic,
                    partition,
                    len(failures),
                    error,
                )

    def _send(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        failures: Sequence[WorkerFailure],
        deadline: Deadline,
    ) -> None:
        """Raises ClientError."""
        topic_id = cluster.topic(topic).id
        if topic_id is None:
            raise ClientError(f"the id of topic {topic} is not known")
        body = encode_share_failures(ShareFailures(self._group, topic_id, partition, failures))

        def send(connection: Connection) -> None:
            response = connection.call_raw(SHARE_FAILURES, 0, [body])
            raise_for_error(parse_share_failures_response(response), f"failures in {topic}[{partition}]")

        cluster.call_leader(topic, partition, send, deadline=deadline)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


#: The acknowledgement types of the protocol: handled; to be redelivered; not to be redelivered.
ACCEPT, RELEASE, REJECT = 1, 2, 3


class MemberLost(ClientError):
    """A fatal error: this member cannot be used any more, but a new one may work."""


class ShareMember:
    """Fetches and acknowledges messages. Counts acknowledgements that the broker refused as `late`: their messages may
    be redelivered.
    """

    def __init__(
        self, settings: Settings, topics: Sequence[str], figures: Figures, reports: FailureReporter | None
    ) -> None:
        """`reports` is None if brokers do not accept failure reports."""
        self._figures = figures
        self._reports = reports
        self._consumer = _make_consumer(settings)
        self._consumer.subscribe(list(topics))
        self._consumer.set_acknowledgement_commit_callback(self._on_acknowledged)

    def take(self, timeout_s: float) -> list[Any]:
        """Returns messages as soon as there are any. All earlier ones must be acknowledged. Raises ClientError."""
        self._report()
        try:
            taken = list(self._consumer.poll(timeout_s))
        except KafkaException as error:
            if error.args[0].fatal():
                raise MemberLost(error.args[0].str()) from None
            raise _client_error(error) from None
        good = [raw for raw in taken if raw.error() is None]
        for raw in taken:
            if raw.error() is not None:
                # The library rejects messages that it cannot read.
                _LOG.warning("%s[%s]@%s: %s", raw.topic(), raw.partition(), raw.offset(), raw.error().str())
        return good

    def acknowledge(self, raw: Any, outcome: int, report: FailureReport | None = None) -> None:
        """Acknowledges a message. The next `take`, `send` or `settle` sends the failure report, and then this."""
        from confluent_kafka import AcknowledgeType, IllegalStateException  # needs confluent-kafka 2.16

        try:
            self._consumer.acknowledge(raw, AcknowledgeType(outcome))
        except IllegalStateException:
            self._figures.add("late")
            return
        if report is not None and self._reports is not None:
            self._reports.add(raw, report)

    def _report(self) -> None:
        if self._reports is not None:
            self._reports.send()

    def send(self) -> None:
        """Sends acknowledgements without waiting for the reply."""
        self._report()
        try:
            self._consumer.commit_async()
        except KafkaException as error:
            _LOG.warning("%s", _client_error(error))

    def settle(self, timeout_s: float) -> dict[tuple[str, int], ClientError]:
        """Sends acknowledgements, and returns the errors by partition. Raises CommitLost if the outcome is unknown."""
        self._report()
        try:
            results = self._consumer.commit_sync(timeout_s)
        except KafkaException as error:
            raise CommitLost(
                f"the outcome of the acknowledgements is unknown: {error.args[0].str()}"
            ) from None
        return {
            (topic_partition.topic, topic_partition.partition): _acknowledge_error(topic_partition, error)
            for topic_partition, error in results.items()
            if error is not None
        }

    def _on_acknowledged(self, offsets: Mapping[Any, set[int]], error: Any) -> None:
        if error is not None:
            count = sum(map(len, offsets.values()))
            self._figures.add("late", count)
            _LOG.warning(
                "%d messages may be redelivered: acknowledging failed: %s", count, _client_error(error)
            )

    def close(self) -> None:
        """Sends acknowledgements. Other members get unacknowledged messages at once."""
        self._report()
        try:
            self._consumer.close()
        except KafkaException as error:
            _LOG.warning("%s", _client_error(error))
        if self._reports is not None:
            self._reports.close()


def _make_consumer(settings: Settings) -> Any:
    try:
        from confluent_kafka import ShareConsumer
    except ImportError:
        raise ApplicationError("share groups need confluent-kafka 2.16 or newer") from None
    try:
        return ShareConsumer(settings)
    except KafkaException as error:
        raise ApplicationError(error.args[0].str()) from None


def _client_error(error: Any) -> ClientError:
    return ClientError(error.args[0].str())


def _acknowledge_error(topic_partition: Any, error: Any) -> ClientError:
    definite = error.args[0].code() in (KafkaError.INVALID_RECORD_STATE,)
    kind = CommitRefused if definite else CommitLost
    return kind(
        f"{topic_partition.topic}[{topic_partition.partition}]: acknowledging failed: {error.args[0].str()}"
    )
