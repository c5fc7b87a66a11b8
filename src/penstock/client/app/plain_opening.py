"""Which plain consumer it is that a user asked for."""

from __future__ import annotations

from typing import Any, Final

from penstock.client.app.delivery import Delivery
from penstock.client.app.message import Message
from penstock.client.app.plain import PlainConsumer, Polling
from penstock.client.app.resources import Resources
from penstock.client.app.settings import ApplicationError
from penstock.client.app.subscription import Subscription, subscription
from penstock.client.backoff import Backoff
from penstock.client.durations import Duration

__all__ = ["UNANSWERED_MAX", "open_consumer"]

#: What waits for an answer; more of it is a loop that forgot to give one.
UNANSWERED_MAX: Final = 100_000
_KEPT: Final = (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE)


def open_consumer(
    resources: Resources,
    topics: tuple[str, ...],
    *,
    group: str,
    delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
    retry: Backoff | int | None = None,
    dead_letters: bool | None = None,
    start: str = "earliest",
    commit_every: Duration = "100ms",
    in_flight_max: int = UNANSWERED_MAX,
    share: bool = False,
    lock: Duration | None = None,
) -> PlainConsumer:
    """Joined, or about to. Raises ApplicationError, Unavailable, Refused."""
    declared = subscription(
        _consumer,
        topics,
        group=group,
        delivery=delivery,
        retry=retry,
        dead_letters=(share or retry is not None) if dead_letters is None else dead_letters,
        start=start,
        commit_every=commit_every,
        in_flight_max=in_flight_max,
        share=share,
        lock=lock,
    )
    if declared.delivery not in _KEPT:
        raise ApplicationError(
            f"{declared.delivery} needs to know when a handler begins and ends: subscribe one"
        )
    return _opened(declared, resources)


def _opened(declared: Subscription, resources: Resources) -> PlainConsumer:
    if declared.share:
        from penstock.client.app.share_plain import SharedPolling

        return SharedPolling(declared, resources)
    return Polling(declared, resources)


def _consumer(message: Message) -> Any:
    """Stands for the user's loop where a handler is named."""


_consumer.__qualname__ = "consumer"
