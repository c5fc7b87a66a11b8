"""What a subscription asks of its share group, as settings of the group: brokers keep to them, for every member.

Apache Kafka knows only some of them. Where it has no delay, what fails is tried again at once; where it cannot hand
out at most once, the members do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.app.delivery import Delivery
from penstock.client.app.resources import Resources
from penstock.client.app.settings import ApplicationError, admin_settings
from penstock.client.app.subscription import Subscription
from penstock.client.durations import seconds
from penstock.client.errors import ClientError
from penstock.client.letters import dead_letter_topic

__all__ = ["ShareGroup", "agree", "wanted"]

_LOG: Final = logging.getLogger("penstock.client")
_CALL_S: Final = 20.0
_SEEN_S: Final = 5.0
_LOOK_S: Final = 0.05
_LOCK_MS: Final = 30_000
_DELIVERIES_MAX: Final = 5

RESET, ISOLATION = "share.auto.offset.reset", "share.isolation.level"
LOCK, LIMIT = "share.record.lock.duration.ms", "share.delivery.count.limit"
BACKOFF, BASE, CAP, JITTER = (f"penstock.share.backoff{end}" for end in ("", ".ms", ".max.ms", ".jitter.ms"))
DELIVERY, ACQUIRE = "penstock.share.delivery", "penstock.share.acquire.mode"
LETTERS, COPIES = "errors.deadletterqueue.topic.name", "errors.deadletterqueue.copy.record.enable"
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


def wanted(subscription: Subscription) -> dict[str, str]:
    """Without `retry` and `lock` the group keeps what it has of these. Pure."""
    asked = {
        RESET: subscription.start,
        ISOLATION: "read_committed",
        DELIVERY: str(subscription.delivery),
        ACQUIRE: "record_limit",
        LETTERS: dead_letter_topic(_ANY_TOPIC) if subscription.dead_letters else "",
    }
    if subscription.dead_letters:
        asked[COPIES] = "true"
    if subscription.lock_s is not None:
        asked[LOCK] = str(round(subscription.lock_s * 1000))
    if subscription.retry is not None:
        asked[LIMIT] = str(subscription.retry.attempts)
        asked[BACKOFF] = "exponential"
        asked[BASE] = str(round(seconds(subscription.retry.base) * 1000))
        asked[CAP] = str(round(seconds(subscription.retry.cap) * 1000))
        asked[JITTER] = "-1"
    return asked


def agree(subscription: Subscription, resources: Resources) -> ShareGroup:
    """Set where it differs. Raises ApplicationError where brokers refuse it, ClientError where none answers."""
    from confluent_kafka.admin import AdminClient

    settings = _Settings(
        AdminClient(admin_settings(resources.bootstrap, resources.name, resources.settings)),
        subscription.group,
    )
    asked, known = wanted(subscription), settings.described()
    if DELIVERY not in known and asked[LETTERS]:
        # Only our brokers put the topic's name in the place of the braces.
        asked[LETTERS] = dead_letter_topic(subscription.topics[0])
        if len(subscription.topics) > 1:
            del asked[LETTERS]
    _warn_of_absent(subscription, asked, known)
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


def _warn_of_absent(subscription: Subscription, asked: Mapping[str, str], known: Mapping[str, str]) -> None:
    flaws = []
    if BACKOFF in asked and BACKOFF not in known:
        flaws.append("what fails is tried again at once")
    if LIMIT in asked and LIMIT not in known:
        flaws.append("how often is the broker's setting")
    if subscription.dead_letters and (LETTERS not in asked or LETTERS not in known):
        flaws.append("what is given up is not kept")
    if flaws:
        _LOG.warning(
            "%s: these brokers have no such settings of groups: %s", subscription.group, ", ".join(flaws)
        )


class _Settings:
    """Of one group, in the cluster."""

    def __init__(self, admin: Any, group: str) -> None:
        self._admin = admin
        self._group = group

    def described(self) -> dict[str, str]:
        """All that the brokers know, by name. Raises ClientError."""
        entries = self._result(self._admin.describe_configs([self._resource()], request_timeout=_CALL_S))
        return {name: entry.value or "" for name, entry in entries.items()}

    def change(self, changes: Mapping[str, str]) -> None:
        """In force when this returns, where we can see it. Raises ApplicationError, ClientError."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in changes.items()
        ]
        self._result(
            self._admin.incremental_alter_configs([self._resource(entries)], request_timeout=_CALL_S)
        )
        deadline_s = time.monotonic() + _SEEN_S
        while not changes.items() <= self.described().items() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def _resource(self, entries: list[Any] | None = None) -> Any:
        from confluent_kafka.admin import ConfigResource

        return ConfigResource(ConfigResource.Type.GROUP, self._group, incremental_configs=entries)

    def _result(self, futures: Mapping[Any, Any]) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        (future,) = futures.values()
        try:
            return future.result(_CALL_S)
        except KafkaException as error:
            told = error.args[0]
            sentence = f"the settings of group {self._group}: {told.str()}"
            passing = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT)
            raise (ClientError if told.code() in passing or told.retriable() else ApplicationError)(
                sentence
            ) from None
        except TimeoutError:
            raise ClientError(f"the settings of group {self._group}: no broker answers") from None
