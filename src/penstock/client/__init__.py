"""The client side, in two layers.

The lower layer, `penstock.client.wire`, has blocking connections that move raw record batches to and from Penstock and
Apache Kafka brokers. Each of its objects belongs to one thread and one process and waits no longer than its deadline.
The layer imports neither the broker nor a client library.

The upper layer, `penstock.client.app`, is `Penstock`: an application that publishes and subscribes under a delivery
contract, on confluent-kafka. This package exports its names and loads them on first use, so that the lower layer stays
light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.app.application import Penstock
    from penstock.client.app.breaker import Breaker
    from penstock.client.app.failures import Backoff, Reject, Retry
    from penstock.client.app.librdkafka import ApplicationError
    from penstock.client.app.membership import CommitLost, CommitRefused
    from penstock.client.app.message import Message
    from penstock.client.app.overflow import Block, BufferFull, PublishFigures
    from penstock.client.app.plain_consumer import AsyncConsumer, PlainConsumer
    from penstock.client.app.publisher import Published
    from penstock.client.app.subscription import Delivery
    from penstock.client.errors import ClientError, NotPublished
    from penstock.client.payloads import PayloadError
    from penstock.client.wire.properties import read_properties

__all__ = [
    "ApplicationError",
    "AsyncConsumer",
    "Backoff",
    "Block",
    "Breaker",
    "BufferFull",
    "ClientError",
    "CommitLost",
    "CommitRefused",
    "Delivery",
    "Message",
    "NotPublished",
    "PayloadError",
    "Penstock",
    "PlainConsumer",
    "PublishFigures",
    "Published",
    "Reject",
    "Retry",
    "read_properties",
]

_HOMES = {
    "ApplicationError": "app.librdkafka",
    "AsyncConsumer": "app.plain_consumer",
    "Backoff": "app.failures",
    "Block": "app.overflow",
    "Breaker": "app.breaker",
    "BufferFull": "app.overflow",
    "ClientError": "errors",
    "CommitLost": "app.membership",
    "CommitRefused": "app.membership",
    "Delivery": "app.subscription",
    "Message": "app.message",
    "NotPublished": "errors",
    "PayloadError": "payloads",
    "Penstock": "app.application",
    "PlainConsumer": "app.plain_consumer",
    "PublishFigures": "app.overflow",
    "Published": "app.publisher",
    "Reject": "app.failures",
    "Retry": "app.failures",
    "read_properties": "wire.properties",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
