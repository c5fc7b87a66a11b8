"""A member of a share group: settings of the group, messages and acknowledgements, and failure reports. For one thread.

A subscription sets its share group's settings, and brokers apply them to every member. Apache Kafka knows only some of
them: without the delay, a failed message is tried again at once; without at-most-once, the members see to it
themselves.

A failure report precedes an acknowledgement and carries a delay for one message, or the error. Only Penstock's brokers
accept it: without it a message waits as long as its group says, and a dead letter does not name the error. So a member
that cannot send a report logs a warning, and acknowledges all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
    """What is in force."""

    lock_s: float
    deliveries_max: int
    #: Whether brokers hand out at most once by themselves.
    is_at_most_once: bool
    #: Whether brokers take delays and errors of single messages.
    takes_failures: bool


def share_group_settings(subscription: Subscription) -> dict[str, str]:
    """Without `retry` and `lock` the group keeps what it has of these. Pure."""
    asked = {
        RESET: subscription.start,
        ISOLATION: "read_committed",
        DELIVERY: str(subscription.delivery),
        ACQUIRE: "record_limit",
        DEAD_LETTER_TOPIC: dead_letter_topic(_ANY_TOPIC) if subscription.dead_letters else "",
    }
    if subscription.dead_letters:
        asked[DEAD_LETTER_COPIES] = "true"
    if subscription.lock_s is not None:
        asked[LOCK] = str(round(subscription.lock_s * 1000))
    if subscription.retry is not None:
        asked[LIMIT] = str(subscription.retry.attempts)
        asked[BACKOFF] = "exponential"
        asked[BASE] = str(round(duration_s(subscription.retry.base) * 1000))
        asked[CAP] = str(round(duration_s(subscription.retry.cap) * 1000))
        asked[JITTER] = "-1"
    return asked


def apply_share_group_settings(subscription: Subscription, resources: Resources) -> ShareGroup:
    """Set where it differs. Raises ApplicationError where brokers refuse it, ClientError where none answers."""
    from confluent_kafka.admin import AdminClient

    settings = _GroupSettings(
        AdminClient(admin_settings(resources.bootstrap, resources.name, resources.settings)),
        subscription.group,
    )
    asked, known = share_group_settings(subscription), settings.described()
    if DELIVERY not in known and asked[DEAD_LETTER_TOPIC]:
        # Only our brokers put the topic's name in the place of the braces.
        asked[DEAD_LETTER_TOPIC] = dead_letter_topic(subscription.topics[0])
        if len(subscription.topics) > 1:
            del asked[DEAD_LETTER_TOPIC]
    _warn_of_missing_settings(subscription, asked, known)
    changes = {name: value for name, value in asked.items() if known.get(name, value) != value}
    if changes:
        settings.change(changes)
        known |= changes
    return ShareGroup(
        lock_s=int(known.get(LOCK) or _LOCK_MS) / 1000,
        deliveries_max=int(known.get(LIMIT) or _DELIVERIES_MAX),
        is_at_most_once=known.get(DELIVERY) == Delivery.AT_MOST_ONCE,
        takes_failures=DELIVERY in known,
    )


def _warn_of_missing_settings(
    subscription: Subscription, asked: Mapping[str, str], known: Mapping[str, str]
) -> None:
    flaws = []
    if BACKOFF in asked and BACKOFF not in known:
        flaws.append("what fails is tried again at once")
    if LIMIT in asked and LIMIT not in known:
        flaws.append("how often is the broker's setting")
    if subscription.dead_letters and (DEAD_LETTER_TOPIC not in asked or DEAD_LETTER_TOPIC not in known):
        flaws.append("what is given up is not kept")
    if flaws:
        _LOG.warning(
            "%s: these brokers have no such settings of groups: %s", subscription.group, ", ".join(flaws)
        )


class _GroupSettings:
    """Of one group, in the cluster."""

    def __init__(self, admin: Any, group: str) -> None:
        self._admin = admin
        self._group = group

    def described(self) -> dict[str, str]:
        """All that the brokers know, by name. Raises ClientError."""
        entries = self._result(
            self._admin.describe_configs([self._resource()], request_timeout=_ADMIN_TIMEOUT_S)
        )
        return {name: entry.value or "" for name, entry in entries.items()}

    def change(self, changes: Mapping[str, str]) -> None:
        """In force when this returns, where we can see it. Raises ApplicationError, ClientError."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

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
        from confluent_kafka.admin import ConfigResource

        return ConfigResource(ConfigResource.Type.GROUP, self._group, incremental_configs=entries)

    def _result(self, futures: Mapping[Any, Any]) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        (future,) = futures.values()
        try:
            return future.result(_ADMIN_TIMEOUT_S)
        except KafkaException as error:
            told = error.args[0]
            sentence = f"the settings of group {self._group}: {told.str()}"
            passing = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT)
            raise (ClientError if told.code() in passing or told.retriable() else ApplicationError)(
                sentence
            ) from None
        except TimeoutError:
            raise ClientError(f"the settings of group {self._group}: no broker answers") from None


_CHUNK_MAX: Final = 50
#: The locks of the messages run on meanwhile.
_REPORT_TIMEOUT_MS: Final = 5_000


class FailureReport(NamedTuple):
    delay_ms: int = GROUP_DEFAULT_DELAY
    error: WorkerError | None = None


def parse_delay_ms(given: Any) -> int:
    """In milliseconds. Raises ApplicationError."""
    try:
        delay_ms = round(duration_s(given) * 1000)
    except DurationError as flaw:
        raise ApplicationError(f"delay={given!r}: {flaw}") from None
    if delay_ms > DELAY_MS_MAX:
        raise ApplicationError(f"delay={given!r} is longer than {DELAY_MS_MAX // 86_400_000} days")
    return delay_ms


def error_report(error: BaseException) -> FailureReport:
    """For a message that is given up because of it."""
    failure = describe_failure(error, "")
    return FailureReport(error=WorkerError(failure.error_class, failure.message, failure.stack))


class FailureReporter:
    """Of one member, in its thread."""

    def __init__(self, cluster: Callable[[], Cluster], group: str) -> None:
        self._make_cluster = cluster
        self._group = group
        self._cluster: Cluster | None = None
        self._waiting: dict[tuple[str, int], list[WorkerFailure]] = {}

    def add(self, raw: Any, told: FailureReport) -> None:
        failure = WorkerFailure(raw.offset(), raw.delivery_count() or 1, *told)
        self._waiting.setdefault((raw.topic(), raw.partition()), []).append(failure)

    def send(self) -> None:
        """Returns when brokers have them, or when that is given up."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        deadline = Deadline(_REPORT_TIMEOUT_MS)
        for (topic, partition), failures in waiting.items():
            try:
                if self._cluster is None:
                    self._cluster = self._make_cluster()
                for some in _chunks(failures):
                    self._send(self._cluster, topic, partition, some, deadline)
            except ClientError as error:
                _LOG.warning(
                    "%s[%d]: delays and errors of %d messages are not known to the broker: %s",
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

        def ask(connection: Connection) -> None:
            answer = connection.call_raw(SHARE_FAILURES, 0, [body])
            raise_for_error(parse_share_failures_response(answer), f"failures in {topic}[{partition}]")

        cluster.call_leader(topic, partition, ask, deadline=deadline)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _chunks(failures: Sequence[WorkerFailure]) -> Iterator[Sequence[WorkerFailure]]:
    for at in range(0, len(failures), _CHUNK_MAX):
        yield failures[at : at + _CHUNK_MAX]


#: As the protocol numbers them: done; again, after the group's delay; never again.
ACCEPT, RELEASE, REJECT = 1, 2, 3


class MemberLost(ClientError):
    """It is of no use any more; another one may be."""


class ShareMember:
    """Figures count answers that were not kept as `late`; messages with such an answer may come again."""

    def __init__(
        self, settings: Settings, topics: Sequence[str], figures: Figures, reports: FailureReporter | None
    ) -> None:
        """`reports` where brokers take delays and errors of single messages."""
        self._figures = figures
        self._reports = reports
        self._consumer = _make_consumer(settings)
        self._consumer.subscribe(list(topics))
        self._consumer.set_acknowledgement_commit_callback(self._told)

    def take(self, timeout_s: float) -> list[Any]:
        """Whole batches, as soon as there is something. All that was taken before has an answer. Raises ClientError."""
        from confluent_kafka import KafkaException

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
                # The library has answered for it: what cannot be read is rejected.
                _LOG.warning("%s[%s]@%s: %s", raw.topic(), raw.partition(), raw.offset(), raw.error().str())
        return good

    def answer(self, raw: Any, outcome: int, told: FailureReport | None = None) -> None:
        """Sent with the next `take`, `send` or `settle`, and what is to be told of a failure before it."""
        from confluent_kafka import AcknowledgeType, IllegalStateException

        try:
            self._consumer.acknowledge(raw, AcknowledgeType(outcome))
        except IllegalStateException:
            self._figures.add("late")
            return
        if told is not None and self._reports is not None:
            self._reports.add(raw, told)

    def _report(self) -> None:
        if self._reports is not None:
            self._reports.send()

    def send(self) -> None:
        """Without waiting for whether it is kept."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            self._consumer.commit_async()
        except KafkaException as error:
            _LOG.warning("%s", _client_error(error))

    def settle(self, timeout_s: float) -> dict[tuple[str, int], ClientError]:
        """Partitions of which answers were not kept, and why. Raises CommitLost where nobody knows of any."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            told = self._consumer.commit_sync(timeout_s)
        except KafkaException as error:
            raise CommitLost(f"it is not known what was kept: {error.args[0].str()}") from None
        return {
            (topic_partition.topic, topic_partition.partition): _acknowledge_error(topic_partition, error)
            for topic_partition, error in told.items()
            if error is not None
        }

    def _told(self, offsets: Mapping[Any, set[int]], error: Any) -> None:
        if error is not None:
            count = sum(map(len, offsets.values()))
            self._figures.add("late", count)
            _LOG.warning("%d answers were not kept, and may be wanted again: %s", count, _client_error(error))

    def close(self) -> None:
        """Sends what was answered; what has no answer is for others, at once."""
        from confluent_kafka import KafkaException

        self._report()
        try:
            self._consumer.close()
        except KafkaException as error:
            _LOG.warning("%s", _client_error(error))
        if self._reports is not None:
            self._reports.close()


def _make_consumer(settings: Settings) -> Any:
    from confluent_kafka import KafkaException

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
    from confluent_kafka import KafkaError

    definite = error.args[0].code() in (KafkaError.INVALID_RECORD_STATE,)
    kind = CommitRefused if definite else CommitLost
    return kind(
        f"{topic_partition.topic}[{topic_partition.partition}]: what was said is not kept: {error.args[0].str()}"
    )
