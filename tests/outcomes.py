"""What becomes of a message, however librdkafka reports it."""

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer


def produce(producer: Producer, topic: str, value: bytes, note: Callable[[KafkaError | None], Any]) -> None:
    """`note` gets the error, or None. `produce` itself raises it if the metadata with the refusal has already come."""
    try:
        producer.produce(topic, value, on_delivery=lambda error, _: note(error))
    except KafkaException as refused:
        note(refused.args[0])


def error_name(error: KafkaError) -> str:
    """The name of an error that a client reports; librdkafka takes the loss of a connection for a refusal.

    That is so between SaslHandshake and its reply: "handshake failed: Local: Broker transport failure".
    """
    if error.code() == KafkaError._AUTHENTICATION and "handshake failed: Local: " in error.str():
        return "connection lost during SaslHandshake"
    return error.name()
