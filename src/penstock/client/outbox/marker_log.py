"""The compacted topic of markers: made where it is missing, and read to its very end."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from penstock.client.outbox.errors import Disturbed, OutboxError
from penstock.client.outbox.kafka import CALL_S, Settings, admin_of, consumer_of, words
from penstock.client.outbox.markers import MARKER_SETTINGS, Marker, marker_topic

__all__ = ["ensure_topic", "read_markers"]

_POLICY: Final = "cleanup.policy"
_ASK_S: Final = 10.0
#: Another relay's open transaction holds readers back until it ends, at the latest when its time is over.
_READ_S: Final = 180.0


def ensure_topic(settings: Settings, name: str) -> None:
    """Raises OutboxError where it is there and forgets markers, Disturbed where no broker answers."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    topic, admin = marker_topic(name), admin_of(settings)
    wanted = NewTopic(topic, num_partitions=1, config=dict(MARKER_SETTINGS))
    made = admin.create_topics([wanted], request_timeout=_ASK_S)
    try:
        made[topic].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise _explained(error, f"topic {topic}") from None
        _check_policy(admin, topic)


def _check_policy(admin: Any, topic: str) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import ConfigResource

    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    try:
        policy = admin.describe_configs([resource], request_timeout=_ASK_S)[resource].result()[_POLICY].value
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return  # not everyone may look at settings
        raise _explained(error, f"topic {topic}") from None
    if policy != MARKER_SETTINGS[_POLICY]:
        raise OutboxError(
            f"topic {topic} has {_POLICY}={policy}, and would forget what was published: set it to compact"
        )


def read_markers(settings: Settings, name: str, stopping: threading.Event) -> list[Marker]:
    """The last committed marker of every shard, of this and of earlier shardings. Raises Disturbed, OutboxError.

    Readers of committed records see nothing behind a transaction that is still open, and other shards have theirs in
    the same partition. So the end is where the log ends, not where such a reader is held back.
    """
    end = _end_of(settings, name)
    latest: dict[bytes, bytes] = {}
    reader = consumer_of(settings, f"penstock-outbox-{name}", isolation="read_committed")
    try:
        reader.assign([_place(name)])
        deadline = time.monotonic() + _READ_S
        position = 0
        while position < end:
            if time.monotonic() > deadline or stopping.is_set():
                raise Disturbed(f"{marker_topic(name)} could not be read to its end, {end}")
            message = reader.poll(0.1)
            if message is not None:
                position = _taken(message, latest, position)
    finally:
        reader.close()
    return [_decoded(name, value) for _, value in sorted(latest.items())]


def _taken(message: Any, latest: dict[bytes, bytes], position: int) -> int:
    """The position behind it."""
    from confluent_kafka import KafkaError

    if message.error() is None:
        latest.pop(message.key(), None)
        if message.value() is not None:
            latest[message.key()] = message.value()
        return int(message.offset()) + 1
    if message.error().code() == KafkaError._PARTITION_EOF:
        return int(message.offset())
    if message.error().retriable() or message.error().code() == KafkaError._TRANSPORT:
        return position
    raise _explained(message.error(), f"topic {message.topic()}")


def _end_of(settings: Settings, name: str) -> int:
    from confluent_kafka import KafkaException

    reader = consumer_of(settings, f"penstock-outbox-{name}", isolation="read_uncommitted")
    try:
        return int(reader.get_watermark_offsets(_place(name), timeout=2 * CALL_S)[1])
    except KafkaException as error:
        raise _explained(error, f"topic {marker_topic(name)}") from None
    finally:
        reader.close()


def _place(name: str) -> Any:
    from confluent_kafka import TopicPartition

    # A number is at hand at once; where the log begins is asked for only if it is not there.
    return TopicPartition(marker_topic(name), 0, 0)


def _decoded(name: str, value: bytes) -> Marker:
    try:
        return Marker.from_bytes(value)
    except ValueError as flaw:
        raise OutboxError(
            f"topic {marker_topic(name)} has something in it that is no marker: {flaw}"
        ) from None


def _explained(error: Any, what: str) -> OutboxError | Disturbed:
    from confluent_kafka import KafkaError

    cause = error if isinstance(error, KafkaError) else error.args[0]
    forbidden = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
    kind = OutboxError if cause.code() in (*forbidden, KafkaError.POLICY_VIOLATION) else Disturbed
    return kind(f"{what}: {words(cause)}")
