"""What the tests of the raw client share: settings, single requests, batches, and reading a partition to its end."""

import time
from typing import Any

from tests.waiting import eventually

from penstock.client.admin import cluster as admin
from penstock.client.admin.cluster import ClusterInfo, QuorumInfo
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.fetch import FetchResult, PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import LATEST, list_offsets
from penstock.client.wire.settings import Address, ConnectionSettings
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import Record, decode_records, encode_batch

BYTES_MAX = 64 << 20


def settings(bootstrap: str, **more: str) -> ConnectionSettings:
    return ConnectionSettings.parse({"bootstrap.servers": bootstrap, **more})


def connect(address: Address, timeout_s: float = 5) -> Connection:
    """A connection to one broker. Raises ClientError."""
    timeout_ms = int(timeout_s * 1000)
    return Connection(
        address,
        ConnectionSettings(
            bootstrap=(address,), connect_timeout_ms=timeout_ms, request_timeout_ms=timeout_ms
        ),
    )


def send_request(address: Address, request: Any, *, timeout_s: float = 5) -> Any:
    """Sends one request to one broker, in the newest version that both know."""
    with connect(address, timeout_s) as connection:
        return connection.call(request)


def describe_cluster(address: Address) -> ClusterInfo:
    with connect(address) as connection:
        return admin.describe_cluster(connection)


def describe_quorum(address: Address, *, timeout_s: float) -> QuorumInfo:
    with connect(address, timeout_s) as connection:
        return admin.describe_quorum(connection, timeout_ms=timeout_s * 1000)


def batch(*values: bytes, codec: Codec = Codec.NONE, timestamp: int | None = None) -> bytearray:
    at = int(time.time() * 1000) if timestamp is None else timestamp
    return encode_batch([Record(i, at, None, value) for i, value in enumerate(values)], codec=codec)


def records(
    fetched: FetchResult, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED
) -> list[Record]:
    """From the offset that was asked for on."""
    aborted = fetched.aborted if isolation is IsolationLevel.READ_COMMITTED else None
    return [
        record
        for view in visible_batches(checked_batches(fetched.data), aborted)
        for record in decode_records(view.data, BYTES_MAX)
        if record.offset >= fetched.offset
    ]


def read(
    cluster: Cluster,
    topic: str,
    partition: int = 0,
    *,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    bytes_max: int | None = None,
) -> list[Record]:
    """All there is now."""
    topic_id = cluster.await_topic(topic).id
    reader = PartitionReader(cluster, topic, topic_id, partition, isolation=isolation, bytes_max=bytes_max)
    end = list_offsets(cluster, {(topic, partition): LATEST}, isolation=isolation)[topic, partition]
    assert end is not None
    found: list[Record] = []
    position = 0
    while position < end.offset:
        fetched = reader.fetch(position, wait_ms=500)
        found += records(fetched, isolation)
        position = fetched.next_offset
    return found


def read_committed(cluster: Cluster, topic: str, partition: int = 0) -> list[bytes]:
    """The values, when no transaction is open any more: an end is decided before its markers are written."""
    place = (topic, partition)

    def is_settled() -> bool:
        ends = [
            list_offsets(cluster, {place: LATEST}, isolation=isolation)[place] for isolation in IsolationLevel
        ]
        return ends[0] == ends[1]

    eventually(is_settled, what="the end of all transactions")
    return values(read(cluster, topic, partition, isolation=IsolationLevel.READ_COMMITTED))


def values(found: list[Record]) -> list[bytes]:
    return [record.value or b"" for record in found]
