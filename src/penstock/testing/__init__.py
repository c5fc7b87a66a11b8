"""What users get for their own tests: an embedded broker, faults to inject into it, and a pytest plugin.

    >>> from confluent_kafka import Producer
    >>> from penstock.testing import EmbeddedBroker
    >>> with EmbeddedBroker() as broker:
    ...     topic = broker.create_topic("orders", partitions=3)
    ...     producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    ...     producer.produce(topic, b"hello")
    ...     assert producer.flush(10) == 0

With pytest, use the `penstock` fixture instead; see `penstock.testing.plugin`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.protocol.errors import ErrorCode
    from penstock.testing.embedded import EmbeddedBroker
    from penstock.testing.faults import Fault, Faults, FaultyRequest

__all__ = ("EmbeddedBroker", "ErrorCode", "Fault", "Faults", "FaultyRequest")

_MODULES = {
    "EmbeddedBroker": "penstock.testing.embedded",
    "ErrorCode": "penstock.protocol.errors",
    "Fault": "penstock.testing.faults",
    "Faults": "penstock.testing.faults",
    "FaultyRequest": "penstock.testing.faults",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, because pytest imports this package in every run wherever it is installed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
