"""How long the largest legal request of each API holds the event loop: python -m benchmarks.request_turns [API ...]

For each API and each of its arrays, a client of a running node sends a request of as many elements of the array as
penstock.request.max.bytes and penstock.request.elements.max allow. Printed is the longest turn of the event loop until
the answer has come, in processor time, without garbage collection, with what ran then. Produce and
DescribeTopicPartitions are also sent for the partitions of a topic that exists. Not a test: the times are those of the
machine.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import io
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Any, get_args, get_origin

from kio.index import load_request_schema
from kio.serial import entity_writer

from penstock.broker.config.node_settings import load_settings
from penstock.broker.network.apis import APIS, FETCH
from penstock.broker.node import Node
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics
from penstock.protocol.record_batch import Record, encode_batch

_REQUEST_BYTES_MAX = 5 * 2**20 // 4
_ELEMENTS_MAX = 20_000
_ANSWER_SECONDS_MAX = 60
_PAUSE_SECONDS = 0.05
_TOPIC = "many"
_PARTITIONS = 2_000
_PRODUCE_VERSION = 9
_LISTENERS = "PLAINTEXT://127.0.0.1:0,NODES://127.0.0.1:0"


# -- requests --------------------------------------------------------------------------------------------


def _is_array(annotation: Any) -> tuple[bool, Any]:
    if get_origin(annotation) is UnionType:
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is tuple:
        return True, get_args(annotation)[0]
    return False, annotation


def arrays(entity: type[Any]) -> Iterator[tuple[str, ...]]:
    """The paths to all arrays of a message."""
    for field in fields(entity):
        is_array, element = _is_array(field.type)
        if is_array:
            yield (field.name,)
        if is_dataclass(element):
            yield from ((field.name, *path) for path in arrays(element))  # type: ignore[arg-type]


def _value(kind: str, annotation: Any, number: int) -> Any:
    _, base = _is_array(annotation)
    match kind:
        case "string":
            return f"n{number}"
        case "bytes" | "records":
            return b""
        case "uuid":
            return uuid.UUID(int=number + 10)
        case "bool":
            return False
        case "float64":
            return 0.0
        case "timedelta_i32" | "timedelta_i64":
            return datetime.timedelta(milliseconds=1000)
        case "datetime_i64":
            return datetime.datetime.fromtimestamp(0, datetime.UTC)
        case "error_code":
            return base(0)
        case _:
            return number % 100 if kind in ("int8", "int16") else number


def message(entity: type[Any], path: tuple[str, ...], count: int, number: int = 0) -> Any:
    """A message of which the array at the path has so many elements, and each other array one or none."""
    values: dict[str, Any] = {}
    for field in fields(entity):
        is_array, element = _is_array(field.type)
        on_path = bool(path) and path[0] == field.name
        here = range(count if len(path) == 1 else 1) if on_path else range(0)
        rest = path[1:] if on_path else ()
        if field.metadata.get("tag") is not None and not on_path:
            continue
        if field.name in ("replica_id", "generation_id_or_member_epoch"):
            values[field.name] = -1  # of a consumer
        elif field.name == "acks":
            values[field.name] = -1  # otherwise an error has no reply
        elif field.name == "transactional_id":
            values[field.name] = None if get_origin(field.type) is UnionType else "t"
        elif is_dataclass(element):
            if is_array:
                values[field.name] = tuple(message(element, rest, count, each) for each in here)  # type: ignore[arg-type]
            else:
                values[field.name] = message(element, rest, count)  # type: ignore[arg-type]
        elif is_array:
            values[field.name] = tuple(
                _value(field.metadata["kafka_type"], field.type, each) for each in here
            )
        else:
            values[field.name] = _value(field.metadata["kafka_type"], field.type, number)
    return entity(**values)


def _encoded(api_key: int, version: int, path: tuple[str, ...], count: int) -> bytes:
    schema = load_request_schema(api_key, version)
    out = io.BytesIO()
    header = schema.__header_schema__(
        request_api_key=schema.__api_key__, request_api_version=version, correlation_id=1, client_id="c"
    )
    entity_writer(schema.__header_schema__)(out, header)
    entity_writer(schema)(out, message(schema, path, count))
    return out.getvalue()


def smallest(api_key: int, version: int, path: tuple[str, ...]) -> bytes:
    """The frame of a request with one element."""
    data = _encoded(api_key, version, path, 1)
    return struct.pack(">i", len(data)) + data


def largest(api_key: int, version: int, path: tuple[str, ...]) -> tuple[bytes, int]:
    """The frame of the largest request, and how many elements its array has."""
    encoded = partial(_encoded, api_key, version, path)
    if api_key != FETCH:
        data = encoded(_ELEMENTS_MAX - len(path) + 1)
        if len(data) <= _REQUEST_BYTES_MAX:
            return struct.pack(">i", len(data)) + data, _ELEMENTS_MAX - len(path) + 1
    small, more = len(encoded(1000)), len(encoded(2000))
    count = 1000 + (_REQUEST_BYTES_MAX - small) * 1000 // (more - small)
    while len(data := encoded(count)) > _REQUEST_BYTES_MAX:
        count = count * 99 // 100
    return struct.pack(">i", len(data)) + data, count


# -- turns -----------------------------------------------------------------------------------------------


class Turns:
    """Times every callback of the event loop."""

    def __init__(self) -> None:
        self.longest, self.what = 0.0, ""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            callback = handle._callback  # a handle that is cancelled while it runs forgets it
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.longest:
                self.longest, self.what = took, str(callback)[:100]

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    def measure(self, port: int, name: str, frame: bytes) -> None:
        time.sleep(_PAUSE_SECONDS)
        self.longest, self.what = 0.0, ""
        gc.disable()
        answer = _ask(port, frame)
        longest, what = self.longest * 1000, self.what
        gc.enable()
        print(f"{longest:7.1f} ms  {name}, {answer}; {what}", flush=True)


class RunningNode:
    """A node on an event loop in a thread of its own, so that the client adds nothing to its turns."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        self._ready.wait()

    async def _run(self) -> None:
        self._end = asyncio.Event()
        self.node = Node(load_settings({"listeners": _LISTENERS, "log.dirs": f"{self._folder}/data"}, {}))
        await self.node.start()
        self._ready.set()
        await self._end.wait()
        await self.node.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


def _ask(port: int, frame: bytes) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_SECONDS_MAX) as connection:
        try:
            connection.sendall(frame)
            missing = _SIZE_BYTES = 4
            data = b""
            while len(data) < missing:
                piece = connection.recv(65536)
                if not piece:
                    return "closed"
                data += piece
                if len(data) >= _SIZE_BYTES and missing == _SIZE_BYTES:
                    missing = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
        except TimeoutError:
            return "no answer"
        except ConnectionError:
            return "closed"
    return "answered"


# -- partitions that exist -------------------------------------------------------------------------------


def _create(port: int) -> None:
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": f"127.0.0.1:{port}"})) as cluster:
        create_topics(cluster, [NewTopic(name=_TOPIC, partitions=_PARTITIONS)])


def produce_to_many(acks: int) -> bytes:
    """A record for each partition."""
    schema = import_module(f"kio.schema.produce.v{_PRODUCE_VERSION}.request")
    batch = bytes(encode_batch([Record(0, 0, b"k", bytes(100))]))
    data = tuple(schema.PartitionProduceData(index=index, records=batch) for index in range(_PARTITIONS))
    return _with_header(
        schema.ProduceRequest(
            transactional_id=None,
            acks=acks,
            timeout=datetime.timedelta(seconds=30),
            topic_data=(schema.TopicProduceData(name=_TOPIC, partition_data=data),),
        )
    )


def describe_many() -> bytes:
    schema = import_module("kio.schema.describe_topic_partitions.v0.request")
    return _with_header(
        schema.DescribeTopicPartitionsRequest(
            topics=(schema.TopicRequest(name=_TOPIC),), response_partition_limit=_PARTITIONS, cursor=None
        )
    )


def _with_header(request: Any) -> bytes:
    schema, out = type(request), io.BytesIO()
    header = schema.__header_schema__(
        request_api_key=schema.__api_key__,
        request_api_version=schema.__version__,
        correlation_id=1,
        client_id="c",
    )
    entity_writer(schema.__header_schema__)(out, header)
    entity_writer(schema)(out, request)
    return struct.pack(">i", len(out.getvalue())) + out.getvalue()


def measure(wanted: set[str]) -> None:
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        running = RunningNode(folder)
        try:
            for api in APIS.values():
                if wanted and api.name not in wanted:
                    continue
                listener = running.node.listeners[1 if api.inter_broker_from == 0 else 0]
                for path in arrays(load_request_schema(api.key, api.max_version)):
                    # The first request of an API also loads its schema and its handler.
                    _ask(listener.port, smallest(api.key, api.max_version, path))
                    frame, count = largest(api.key, api.max_version, path)
                    turns.measure(listener.port, f"{api.name} {'.'.join(path)} x {count}", frame)
            port = running.node.listeners[0].port
            existing = {f"produce, acks={acks}": partial(produce_to_many, acks) for acks in (1, -1)} | {
                "describe_topic_partitions": describe_many
            }
            chosen = {
                name: make for name, make in existing.items() if not wanted or name.split(",")[0] in wanted
            }
            if chosen:
                _create(port)
            for name, make in chosen.items():
                turns.measure(port, f"{name}, x {_PARTITIONS} partitions of a topic", make())
        finally:
            running.stop()


if __name__ == "__main__":
    measure(set(sys.argv[1:]))
