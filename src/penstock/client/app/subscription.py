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
    #: Never twice; what may be lost is counted.
    AT_MOST_ONCE = "at-most-once"
    #: Never lost; what may come twice is bounded.
    AT_LEAST_ONCE = "at-least-once"
    #: Never lost, and known by its id when it comes again.
    EFFECTIVELY_ONCE = "effectively-once"
    #: Result and position are one transaction, of the cluster or of a database.
    EXACTLY_ONCE = "exactly-once"


STARTS: Final = ("earliest", "latest")
_TOPIC_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CONCURRENCY_MAX: Final = 1_000
#: Bounds what a crash repeats, or a commit of unknown fate drops.
TAKEN_MAX: Final = 500
#: A lock runs from the moment when a message is taken, so none is taken that nobody handles at once.
SHARED_TAKEN_MAX: Final = 1
#: Each of them is a member, with connections of its own.
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
    #: Of effectively-once: a URL, or a store; how long ids are known.
    store: Any
    remember_s: float
    #: Of exactly-once: None for transactions of the cluster; else a URL, or a ledger.
    ledger: Any
    #: A topic for what the handler returns.
    to: str | None
    #: Whether the group shares single messages, and for how long each is one member's; None as the group has it.
    share: bool
    lock_s: float | None

    @property
    def levels(self) -> int:
        """Of retry topics; a share group has none, since its brokers do the waiting."""
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
    """Checked. Raises ApplicationError."""
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


# What is wrong with one value


def _topics(topics: tuple[str, ...]) -> tuple[str, ...]:
    if not topics:
        raise ApplicationError("a subscription names at least one topic")
    for topic in topics:
        if not isinstance(topic, str) or not _TOPIC_NAME.fullmatch(topic):
            raise ApplicationError(f"{topic!r} cannot be the name of a topic")
        if is_failure_topic(topic) and len(topics) > 1:
            raise ApplicationError(f"{topic} holds retries or dead letters, which are subscribed to alone")
    return topics


def _group(group: str) -> str:
    if not isinstance(group, str) or not group.strip():
        raise ApplicationError("a subscription names its group")
    return group


def _delivery(name: str) -> Delivery:
    try:
        return Delivery(name)
    except ValueError:
        known = ", ".join(Delivery)
        raise ApplicationError(f"delivery={name!r} is none of {known}") from None


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
        raise ApplicationError(f"{name}={value!r} is a whole number from 1 to {most}")
    return value


def _seconds(name: str, value: Duration) -> float:
    try:
        return duration_s(value)
    except ValueError as flaw:
        raise ApplicationError(f"{name}: {flaw}") from None


def _retry_backoff(given: object) -> Backoff | None:
    """A number is how often a message is tried in all, with the rests that Backoff has by itself."""
    if given is None or isinstance(given, Backoff):
        return given
    try:
        return Backoff(attempts=given)  # type: ignore[arg-type]
    except ValueError:
        raise ApplicationError(
            f"retry={given!r} is neither a Backoff nor how often a message is tried (1 to {ATTEMPTS_MAX})"
        ) from None


def _remember_s(remember: Duration | None, retry: Backoff | None) -> float:
    """Twice the longest retry window, and a day at least: whoever replays a topic does so later than that."""
    if remember is not None:
        return _seconds("remember", remember)
    return max(2 * retry.longest_s(), _DAY_S) if retry is not None else _DAY_S


# What does not go together


def _check_start(made: Subscription) -> str | None:
    return None if made.start in STARTS else f"start={made.start!r} is neither earliest nor latest"


def _check_retry(made: Subscription) -> str | None:
    if made.delivery is Delivery.AT_MOST_ONCE and made.retry is not None:
        return "at-most-once tries nothing again: leave retry= out, failures become dead letters"
    return None


def _check_store(made: Subscription) -> str | None:
    if made.store is not None and made.delivery is not Delivery.EFFECTIVELY_ONCE:
        return f"store= is of effectively-once, not of {made.delivery}"
    return None


def _check_ledger(made: Subscription) -> str | None:
    if made.ledger is None:
        return None
    if made.delivery is not Delivery.EXACTLY_ONCE:
        return f"ledger= is of exactly-once, not of {made.delivery}"
    if len(made.shape.extras) != 1:
        return "with a ledger the handler takes the database's `connection`, through which it writes"
    if made.concurrency > 1 or made.batch is not None or made.shape.is_async:
        return "with a ledger messages are handled one after the other, by a plain function"
    return None


def _check_connection_parameter(made: Subscription) -> str | None:
    if not made.shape.extras or made.ledger is not None:
        return None
    if made.delivery is not Delivery.EFFECTIVELY_ONCE:
        return f"{made.shape.extras[0]} is given with effectively-once, or exactly-once and a ledger"
    if made.batch is not None or made.shape.is_async:
        return "a handler that takes a connection is a plain function of one message"
    return None


def _check_batch(made: Subscription) -> str | None:
    if made.batch is None:
        return None
    if made.concurrency > 1 or made.shape.is_async:
        return "batches are handled one after the other, by a plain function"
    if made.delivery is Delivery.EFFECTIVELY_ONCE or made.to is not None or made.breaker is not None:
        return "batches go without effectively-once, to= and breaker="
    return None


def _check_keep_order(made: Subscription) -> str | None:
    if made.keep_order and (made.retry is None or made.concurrency > 1 or made.batch is not None):
        return (
            "keep_order= is about retries, for one message after the other: it needs retry= and nothing else"
        )
    if made.keep_order and (made.shape.is_async or made.ledger is not None):
        return "keep_order= goes with plain functions and without a ledger"
    return None


def _check_dead_letters(made: Subscription) -> str | None:
    if not made.dead_letters and made.retry is not None:
        return "retry= needs a dead-letter topic for what fails each time"
    return None


def _check_share(made: Subscription) -> str | None:
    if not made.share:
        return "lock= is of share groups: say share=True" if made.lock_s is not None else None
    if made.delivery not in (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE):
        return f"a share group is at-least-once or at-most-once, not {made.delivery}"
    if made.batch is not None or made.keep_order:
        return "a share group hands out single messages in no order: leave batch= and keep_order= out"
    if made.breaker is not None:
        return (
            "a message of a share group cannot wait for breaker=, its lock would run out: "
            "the delay of retry= spares what fails"
        )
    if made.concurrency > _SHARED_CONCURRENCY_MAX:
        return (
            f"concurrency= is at most {_SHARED_CONCURRENCY_MAX} in a share group: each is a member of its own"
        )
    if made.lock_s is not None and made.lock_s <= 0:
        return "lock= is longer than 0"
    return None


def check_group_contract(made: Subscription, others: Iterable[Subscription]) -> None:
    """Positions of a group mean what its contract says: two of them cannot share one. Raises ApplicationError."""
    for other in others:
        if other.group != made.group:
            continue
        if (other.delivery, other.share, other.ledger is None) != (
            made.delivery,
            made.share,
            made.ledger is None,
        ):
            raise ApplicationError(
                f"{made.name}: group {made.group} is {other.delivery}{' and shared' if other.share else ''} for "
                f"{other.name}; {made.delivery}{' and shared' if made.share else ''} needs a group of its own"
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
