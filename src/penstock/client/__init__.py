"""The client side, in two layers.

Below: blocking connections to brokers of Penstock and Apache Kafka that move raw record batches. Everything there
belongs to one thread and one process, waits no longer than its deadline says, and imports neither a broker nor a client
library.

Above: `Penstock`, an application that publishes and subscribes under a delivery contract, on confluent-kafka. Its names
are found here and loaded when they are first used, so that the layer below stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.app.committing import CommitLost, CommitRefused
    from penstock.client.app.delivery import Delivery
    from penstock.client.app.failing import Reject, Retry
    from penstock.client.app.message import Message
    from penstock.client.app.penstock import Penstock
    from penstock.client.app.plain import PlainConsumer
    from penstock.client.app.plain_async import AsyncConsumer
    from penstock.client.app.publishing import NotPublished, Published
    from penstock.client.app.settings import ApplicationError
    from penstock.client.backoff import Backoff
    from penstock.client.breaker import Breaker
    from penstock.client.errors import ClientError
    from penstock.client.payloads import PayloadError

__all__ = [
    "ApplicationError",
    "AsyncConsumer",
    "Backoff",
    "Breaker",
    "ClientError",
    "CommitLost",
    "CommitRefused",
    "Delivery",
    "Message",
    "NotPublished",
    "PayloadError",
    "Penstock",
    "PlainConsumer",
    "Published",
    "Reject",
    "Retry",
]

_HOMES = {
    "ApplicationError": "app.settings",
    "AsyncConsumer": "app.plain_async",
    "Backoff": "backoff",
    "Breaker": "breaker",
    "ClientError": "errors",
    "CommitLost": "app.committing",
    "CommitRefused": "app.committing",
    "Delivery": "app.delivery",
    "Message": "app.message",
    "NotPublished": "app.publishing",
    "PayloadError": "payloads",
    "Penstock": "app.penstock",
    "PlainConsumer": "app.plain",
    "Published": "app.publishing",
    "Reject": "app.failing",
    "Retry": "app.failing",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
