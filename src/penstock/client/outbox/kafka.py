"""Settings and errors of the client library, as relays use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.outbox.errors import Disturbed, OutboxError

__all__ = ["consumer_of", "is_hopeless", "passing", "producer_of", "settings_of", "words"]

_TRANSACTION_TIMEOUT_MS: Final = 60_000
#: The broker judges how large a message may be; the library keeps batches of several below `batch.size`.
_MESSAGE_BYTES_MAX: Final = 256 << 20
#: One call; those that need longer are made again.
CALL_S: Final = 2.0
#: How long a call that does not come to an end may keep us from stopping.
STOP_S: Final = 10.0

Settings = dict[str, Any]


def settings_of(bootstrap: str, given: Mapping[str, Any] | None) -> Settings:
    """What a user gave, checked. Raises OutboxError."""
    from penstock.client.app.settings import checked

    try:
        return {"bootstrap.servers": bootstrap, **checked(given)}
    except ClientError as error:
        raise OutboxError(str(error)) from None


def producer_of(settings: Settings, transactional_id: str) -> Any:
    from confluent_kafka import Producer

    from penstock.client.app.settings import producer_settings

    given = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    ours = {
        "transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS,
        "message.max.bytes": _MESSAGE_BYTES_MAX,
        "topic.metadata.propagation.max.ms": 5_000,
        # All of a batch is on its way before anyone waits for it.
        "linger.ms": 0,
        **given,
    }
    made = producer_settings(settings["bootstrap.servers"], transactional_id, ours)
    timeout_ms = {"message.timeout.ms": made["transaction.timeout.ms"]}
    return _made(Producer, {**timeout_ms, **made, "transactional.id": transactional_id})


def consumer_of(settings: Settings, name: str, *, isolation: str) -> Any:
    """Reads what it is told to, and belongs to no group."""
    from confluent_kafka import Consumer

    from penstock.client.app.settings import consumer_settings

    given = {key: value for key, value in settings.items() if key != "bootstrap.servers"}
    made = consumer_settings(settings["bootstrap.servers"], name, given, group=name)
    ours = {
        "isolation.level": isolation,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 20,
    }
    return _made(Consumer, {**made, **ours})


def admin_of(settings: Settings) -> Any:
    from confluent_kafka.admin import AdminClient

    from penstock.client.app.settings import consumer_settings

    given = {key: value for key, value in settings.items() if key != "bootstrap.servers"}
    made = consumer_settings(settings["bootstrap.servers"], "penstock-outbox", given, group="none")
    of_clients = ("client.", "sasl.", "security.", "socket.", "ssl.", "logger", "broker.", "reconnect.")
    chosen = {name: value for name, value in made.items() if name.startswith(of_clients)}
    return _made(AdminClient, {"bootstrap.servers": settings["bootstrap.servers"], **chosen})


def _made(kind: Callable[[Settings], Any], settings: Settings) -> Any:
    from confluent_kafka import KafkaException

    try:
        return kind(settings)
    except (KafkaException, TypeError, ValueError) as error:
        raise OutboxError(f"the client library does not take these settings: {words(error)}") from None


def words(error: BaseException | Any) -> str:
    """What the library has to say."""
    cause = _cause(error)
    return str(cause.str()) if hasattr(cause, "str") else str(cause)


def _cause(error: Any) -> Any:
    return error.args[0] if isinstance(error, BaseException) and error.args else error


def passing(call: Callable[[float], Any], what: str, stopping: threading.Event) -> Any:
    """Make a call of the transactional producer again until it is through.

    Raises Disturbed for what beginning anew may mend, and where it is time to stop; OutboxError for what it does not.
    """
    from confluent_kafka import KafkaException

    asked_to_stop_at: float | None = None
    while True:
        try:
            return call(CALL_S)
        except KafkaException as error:
            cause = error.args[0]
            if is_hopeless(cause):
                raise OutboxError(f"{what}: {cause.str()}") from None
            if not cause.retriable() or cause.fatal() or cause.txn_requires_abort():
                raise Disturbed(f"{what}: {cause.str()}", cause=cause) from None
        if stopping.is_set():
            asked_to_stop_at = asked_to_stop_at or time.monotonic()
            if time.monotonic() - asked_to_stop_at > STOP_S:
                raise Disturbed(f"{what}: no answer, and it is time to stop")


def is_hopeless(error: Any) -> bool:
    """Of the relay as such: no row has anything to do with it."""
    from confluent_kafka import KafkaError

    return error.code() in (
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError._UNSUPPORTED_FEATURE,
        KafkaError.UNSUPPORTED_VERSION,
    )
