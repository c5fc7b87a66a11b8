"""A subscription: a handler, its topics and group, and the delivery contract that it gets. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.client.app.breaker import Breaker
from penstock.client.app.failures import ATTEMPTS_MAX, Backoff
from penstock.client.app.handler import check_database_parameter
from penstock.client.app.librdkafka import ApplicationError
from penstock.client.deadletters.headers import is_failure_topic
from penstock.client.payloads import HandlerSignature, codec_for, inspect_handler
from penstock.client.retry import Duration, duration_s

__all__ = ("STARTS", "Delivery", "Subscription", "check_group_contract", "declare_subscription")


class Delivery(StrEnum):
    #: No message is handled twice. Messages that may be lost are counted.
    AT_MOST_ONCE = "at-most-once"
    #: No message is lost. The number of messages that may be handled twice is bounded.
    AT_LEAST_ONCE = "at-least-once"
    #: No message is lost, and a redelivered message is recognised by its id.
    EFFECTIVELY_ONCE = "effectively-once"
    #: The result and the offset are one transaction, of the cluster or of a database.
    EXACTLY_ONCE = "exactly-once"


STARTS: Final = ("earliest", "latest")
_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CONCURRENCY_MAX: Final = 1_000
#: Bounds how many messages a crash repeats, or a commit with an unknown outcome drops.
TAKEN_MAX: Final = 500
#: The lock of a message starts when it is fetched, so a member fetches only what it can handle at once.
SHARED_TAKEN_MAX: Final = 1
#: Each of them is a group member with its own connections.
_SHARED_CONCURRENCY_MAX: Final = 64
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    topics: tuple[str, ...]
    group: str
    delivery: Delivery
    handler: Callable[..., Any]
    shape: HandlerSignature
    name: str
    retry: Backoff | None
    dead_letters: bool
    concurrency: int
    batch: int | None
    breaker: Breaker | None
    keep_order: bool
    start: str
    commit_every_s: float
    taken_max: int
    in_flight_max: int
    #: Effectively-once: a URL or a store, and how long ids are kept.
    store: Any
    remember_s: float
    #: Exactly-once: None for transactions of the cluster, else a URL or a ledger.
    ledger: Any
    #: The topic for the handler's results.
    to: str | None
    #: Whether the group is a share group, and the duration of its locks; None for the group's own setting.
    share: bool
    lock_s: float | None

    @property
    def levels(self) -> int:
        """The number of retry topics. A share group has none, because its brokers delay redeliveries."""
        return self.retry.attempts - 1 if self.retry is not None and not self.share else 0


def declare_subscription(
    handler: Callable[..., Any],
    topics: tuple[str, ...],
    *,
    group: str,
    delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
    retry: Backoff | int | None = None,
    dead_letters: bool = True,
    concurrency: int = 1,
    batch: int | None = None,
    breaker: Breaker | None = None,
    keep_order: bool = False,
    start: str = "earliest",
    commit_every: Duration = "100ms",
    taken_max: int | None = None,
    in_flight_max: int | None = None,
    store: Any = None,
    remember: Duration | None = None,
    ledger: Any = None,
    to: str | None = None,
    share: bool = False,
    lock: Duration | None = None,
) -> Subscription:
    """Checks the parameters and returns the subscription. Raises ApplicationError."""
    backoff = _retry_backoff(retry)
    taken_max = taken_max or (SHARED_TAKEN_MAX if share else TAKEN_MAX)
    most_at_once = concurrency if share else 2 * max(taken_max, concurrency)
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    made = Subscription(
        topics=_topics(topics),
        group=_group(group),
        delivery=_delivery(delivery),
        handler=handler,
        shape=_signature(handler, batch),
        name=name,
        retry=backoff,
        dead_letters=dead_letters,
        concurrency=_whole_number("concurrency", concurrency, _CONCURRENCY_MAX),
        batch=None if batch is None else _whole_number("batch", batch, 100_000),
        breaker=breaker,
        keep_order=keep_order,
        start=start,
        commit_every_s=_seconds("commit_every", commit_every),
        taken_max=_whole_number("taken_max", max(taken_max, batch or 1), 1_000_000),
        in_flight_max=_whole_number("in_flight_max", in_flight_max or most_at_once, 1_000_000),
        store=store,
        remember_s=_remember_s(remember, backoff),
        ledger=ledger,
        to=to,
        share=share,
        lock_s=None if lock is None else _seconds("lock", lock),
    )
    for handle in made.shape.extras:
        check_database_parameter(handle)
    for check in _CHECKS:
        flaw = check(made)
        if flaw is not None:
            raise ApplicationError(f"{name}: {flaw}")
    return made


# Checks of single values


def _topics(topics: tuple[str, ...]) -> tuple[str, ...]:
    if not topics:
        raise ApplicationError("a subscription needs at least one topic")
    for topic in topics:
        if not isinstance(topic, str) or not _TOPIC_NAME.fullmatch(topic):
            raise ApplicationError(f"{topic!r} is not a valid topic name")
        if is_failure_topic(topic) and len(topics) > 1:
            raise ApplicationError(f"{topic} is a retry or dead-letter topic: subscribe to it alone")
    return topics


def _group(group: str) -> str:
    if not isinstance(group, str) or not group.strip():
        raise ApplicationError("a subscription needs a group")
    return group


def _delivery(name: str) -> Delivery:
    try:
        return Delivery(name)
    except ValueError:
        known = ", ".join(Delivery)
        raise ApplicationError(f"delivery={name!r} must be one of {known}") from None


def _signature(handler: Callable[..., Any], batch: int | None) -> HandlerSignature:
    try:
        shape = inspect_handler(handler, batch=batch is not None)
        if shape.payload is not None:
            codec_for(shape.payload)
    except TypeError as flaw:
        raise ApplicationError(str(flaw)) from flaw
    return shape


def _whole_number(name: str, value: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ApplicationError(f"{name}={value!r} must be a whole number from 1 to {most}")
    return value


def _seconds(name: str, value: Duration) -> float:
    try:
        return duration_s(value)
    except ValueError as flaw:
        raise ApplicationError(f"{name}: {flaw}") from None


def _retry_backoff(given: object) -> Backoff | None:
    """A number means Backoff(attempts=number)."""
    if given is None or isinstance(given, Backoff):
        return given
    try:
        return Backoff(attempts=given)  # type: ignore[arg-type]
    except ValueError:
        raise ApplicationError(
            f"retry={given!r} must be a Backoff or the number of attempts (1 to {ATTEMPTS_MAX})"
        ) from None


def _remember_s(remember: Duration | None, retry: Backoff | None) -> float:
    """Twice the longest time of all retries, and at least a day."""
    if remember is not None:
        return _seconds("remember", remember)
    return max(2 * retry.longest_s(), _DAY_S) if retry is not None else _DAY_S


# Checks of combinations


def _check_start(made: Subscription) -> str | None:
    return None if made.start in STARTS else f"start={made.start!r} must be earliest or latest"


def _check_retry(made: Subscription) -> str | None:
    if made.delivery is Delivery.AT_MOST_ONCE and made.retry is not None:
        return "at-most-once retries nothing: remove retry=, failed messages become dead letters"
    return None


def _check_store(made: Subscription) -> str | None:
    if made.store is not None and made.delivery is not Delivery.EFFECTIVELY_ONCE:
        return f"store= works with effectively-once, not with {made.delivery}"
    return None


def _check_ledger(made: Subscription) -> str | None:
    if made.ledger is None:
        return None
    if made.delivery is not Delivery.EXACTLY_ONCE:
        return f"ledger= works with exactly-once, not with {made.delivery}"
    if len(made.shape.extras) != 1:
        return "with a ledger the handler must take a `connection` and write through it"
    if made.concurrency > 1 or made.batch is not None or made.shape.is_async:
        return "with a ledger the handler must be a plain function, without concurrency= and batch="
    return None


def _check_connection_parameter(made: Subscription) -> str | None:
    if not made.shape.extras or made.ledger is not None:
        return None
    if made.delivery is not Delivery.EFFECTIVELY_ONCE:
        return f"{made.shape.extras[0]} works with effectively-once, or with exactly-once and a ledger"
    if made.batch is not None or made.shape.is_async:
        return "a handler that takes a connection must be a plain function of one message"
    return None


def _check_batch(made: Subscription) -> str | None:
    if made.batch is None:
        return None
    if made.concurrency > 1 or made.shape.is_async:
        return "batch= needs a plain function, without concurrency="
    if made.delivery is Delivery.EFFECTIVELY_ONCE or made.to is not None or made.breaker is not None:
        return "batch= does not work with effectively-once, to= or breaker="
    return None


def _check_keep_order(made: Subscription) -> str | None:
    if made.keep_order and (made.retry is None or made.concurrency > 1 or made.batch is not None):
        return "keep_order= needs retry=, without concurrency= and batch="
    if made.keep_order and (made.shape.is_async or made.ledger is not None):
        return "keep_order= needs a plain function, without a ledger"
    return None


def _check_dead_letters(made: Subscription) -> str | None:
    if not made.dead_letters and made.retry is not None:
        return "retry= needs a dead-letter topic for messages whose last attempt fails"
    return None


def _check_share(made: Subscription) -> str | None:
    if not made.share:
        return "lock= needs share=True" if made.lock_s is not None else None
    if made.delivery not in (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE):
        return f"a share group needs at-least-once or at-most-once, not {made.delivery}"
    if made.batch is not None or made.keep_order:
        return "a share group delivers single messages in no order: remove batch= and keep_order="
    if made.breaker is not None:
        return (
            "breaker= does not work in a share group, because the lock of a waiting message would expire: "
            "use the delay of retry="
        )
    if made.concurrency > _SHARED_CONCURRENCY_MAX:
        return (
            f"concurrency= must be at most {_SHARED_CONCURRENCY_MAX} in a share group: each is a group member"
        )
    if made.lock_s is not None and made.lock_s <= 0:
        return "lock= must be longer than 0"
    return None


def check_group_contract(made: Subscription, others: Iterable[Subscription]) -> None:
    """Raises ApplicationError if another subscription uses the group with another contract.

    Committed offsets have another meaning under each contract.
    """
    for other in others:
        if other.group != made.group:
            continue
        if (other.delivery, other.share, other.ledger is None) != (
            made.delivery,
            made.share,
            made.ledger is None,
        ):
            raise ApplicationError(
                f"{made.name}: {other.name} uses group {made.group} with {other.delivery}"
                f"{' as a share group' if other.share else ''}; use another group for {made.delivery}"
                f"{' as a share group' if made.share else ''}"
            )


_CHECKS: Final = (
    _check_share,
    _check_start,
    _check_retry,
    _check_store,
    _check_ledger,
    _check_connection_parameter,
    _check_batch,
    _check_keep_order,
    _check_dead_letters,
)
