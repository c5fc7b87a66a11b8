"""librdkafka itself, through ctypes: whole arrays go in and out, no Python runs per message.

The shared library is the one inside the confluent-kafka wheel, so nothing has to be built.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import confluent_kafka

_PRODUCER, _CONSUMER = 0, 1
_CONF_OK = 0
_EVENT_DELIVERY = 0x1
_BEGINNING = -2
_ERROR_BYTES = 512


class Message(Structure):
    """rd_kafka_message_t."""

    _fields_ = (
        ("err", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("len", c_size_t),
        ("key", c_void_p),
        ("key_len", c_size_t),
        ("offset", c_int64),
        ("private", c_void_p),
    )


class TopicPartition(Structure):
    """rd_kafka_topic_partition_t."""

    _fields_ = (
        ("topic", c_char_p),
        ("partition", c_int32),
        ("offset", c_int64),
        ("metadata", c_void_p),
        ("metadata_size", c_size_t),
        ("opaque", c_void_p),
        ("err", c_int),
        ("private", c_void_p),
    )


class TopicPartitionList(Structure):
    """rd_kafka_topic_partition_list_t."""

    _fields_ = (("count", c_int), ("size", c_int), ("elements", POINTER(TopicPartition)))


#: Result and argument types of every function used, by name without the rd_kafka_ prefix.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "conf_new": (c_void_p,),
    "conf_set": (c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t),
    "conf_set_events": (None, c_void_p, c_int),
    "new": (c_void_p, c_int, c_void_p, c_char_p, c_size_t),
    "topic_new": (c_void_p, c_void_p, c_char_p, c_void_p),
    "produce_batch": (c_int, c_void_p, c_int32, c_int, POINTER(Message), c_int),
    "outq_len": (c_int, c_void_p),
    "queue_get_main": (c_void_p, c_void_p),
    "queue_new": (c_void_p, c_void_p),
    "queue_poll": (c_void_p, c_void_p, c_int),
    "event_message_count": (c_size_t, c_void_p),
    "event_destroy": (None, c_void_p),
    "consume_start_queue": (c_int, c_void_p, c_int32, c_int64, c_void_p),
    "consume_callback_queue": (c_int, c_void_p, c_int, c_void_p, c_void_p),
    "topic_partition_list_new": (POINTER(TopicPartitionList), c_int),
    "topic_partition_list_add": (c_void_p, POINTER(TopicPartitionList), c_char_p, c_int32),
    "position": (c_int, c_void_p, POINTER(TopicPartitionList)),
}


class LibrdkafkaError(Exception):
    pass


def _load() -> dict[str, Any]:
    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    library = ctypes.CDLL(str(next(folder.glob("librdkafka-*.so*"))))
    functions = {}
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


class _Handle:
    """A client instance. It lives as long as its process, which is one run."""

    def __init__(self, kind: int, config: dict[str, str], topic: str, events: int = 0) -> None:
        self.call = _load()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        conf = self.call["conf_new"]()
        for name, value in config.items():
            if self.call["conf_set"](conf, name.encode(), value.encode(), error, _ERROR_BYTES) != _CONF_OK:
                raise LibrdkafkaError(error.value.decode())
        self.call["conf_set_events"](conf, events)
        self.client = self.call["new"](kind, conf, error, _ERROR_BYTES)
        if not self.client:
            raise LibrdkafkaError(error.value.decode())
        self.topic = self.call["topic_new"](self.client, topic.encode(), None)


class BatchProducer:
    """Hands over one prebuilt array of messages after the other; the payloads are never copied."""

    def __init__(self, config: dict[str, str], topic: str, pool: list[bytes], array_length: int) -> None:
        # With only errors reported, what is neither queued nor failed has been acknowledged.
        config = {**config, "delivery.report.only.error": "true"}
        self._handle = _Handle(_PRODUCER, config, topic, _EVENT_DELIVERY)
        self._events = self._handle.call["queue_get_main"](self._handle.client)
        self._payload = ctypes.create_string_buffer(b"".join(pool), len(pool) * len(pool[0]))
        self._messages = _message_array(
            ctypes.addressof(self._payload), len(pool[0]), len(pool), array_length
        )
        self.enqueued = self._failed = 0

    def produce(self, partition: int) -> int:
        """Enqueue the array for one partition; fewer than all when the queue is full."""
        produce_batch = self._handle.call["produce_batch"]
        count = int(produce_batch(self._handle.topic, partition, 0, self._messages, len(self._messages)))
        self.enqueued += count
        return count

    def queued(self) -> int:
        return int(self._handle.call["outq_len"](self._handle.client))

    def acknowledged(self) -> int:
        return self.enqueued - self._failed - self.queued()

    def serve(self, timeout_ms: int) -> None:
        """Collect delivery errors; any is fatal to the run."""
        event = self._handle.call["queue_poll"](self._events, timeout_ms)
        if event:
            self._failed += self._handle.call["event_message_count"](event)
            self._handle.call["event_destroy"](event)
        if self._failed:
            raise LibrdkafkaError(f"{self._failed} messages were not delivered")


def _message_array(base: int, value_bytes: int, pool_values: int, length: int) -> Any:
    messages = (Message * length)()
    for index, message in enumerate(messages):
        message.payload = base + (index % pool_values) * value_bytes
        message.len = value_bytes
    return messages


class QueueConsumer:
    """Reads partitions from their beginning into one queue and counts what passes."""

    def __init__(self, config: dict[str, str], topic: str, partitions: Sequence[int]) -> None:
        self._handle = _Handle(_CONSUMER, config, topic)
        self._queue = self._handle.call["queue_new"](self._handle.client)
        self._positions = self._handle.call["topic_partition_list_new"](len(partitions))
        for partition in partitions:
            self._handle.call["consume_start_queue"](self._handle.topic, partition, _BEGINNING, self._queue)
            self._handle.call["topic_partition_list_add"](self._positions, topic.encode(), partition)
        # The library frees a message once its callback returns. Any C function that ignores what it is given
        # will do, and a C function costs nothing where a Python one would be called for every message.
        self._ignore = ctypes.cast(ctypes.CDLL(None).abs, c_void_p)

    def consume(self, timeout_ms: int) -> None:
        """Take off the queue what is there, or wait for something to come."""
        count = self._handle.call["consume_callback_queue"](self._queue, timeout_ms, self._ignore, None)
        if count < 0:
            raise LibrdkafkaError("consuming failed")

    def position(self) -> int:
        """The sum over the partitions of the offset that comes next; nothing read yet counts as zero."""
        if self._handle.call["position"](self._handle.client, self._positions):
            raise LibrdkafkaError("no position")
        listed = self._positions.contents
        return sum(max(listed.elements[index].offset, 0) for index in range(listed.count))
