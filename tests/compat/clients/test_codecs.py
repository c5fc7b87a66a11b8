"""Messages published by any client with any codec are read by every other client."""

import functools
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.compat import aio, confluent, kafka_python, kcat
from tests.compat.message import CODECS, Message

CLIENTS: dict[str, ModuleType] = {"confluent": confluent, "kafka-python": kafka_python, "aiokafka": aio}
CREATED_MS = 1_700_000_000_123
KEEP_OLD_TIMESTAMPS = {"retention.ms": "-1"}

MESSAGES = [
    Message(value=b"plain", timestamp_ms=CREATED_MS),
    Message(value=b"keyed", key=b"key", timestamp_ms=CREATED_MS + 1),
    Message(value=None, key=b"tombstone", timestamp_ms=CREATED_MS + 2),
    Message(value=b"", key=b"", timestamp_ms=CREATED_MS + 3),
    Message(
        value="grüße".encode(), headers=(("trace", b"\x00\xff"), ("empty", b"")), timestamp_ms=CREATED_MS + 4
    ),
    Message(value=b"twice", headers=(("same", b"1"), ("same", b"2")), timestamp_ms=CREATED_MS + 5),
    *(
        Message(value=b"again and again " * 60, key=b"%d" % n, timestamp_ms=CREATED_MS + 6 + n)
        for n in range(40)
    ),
]
NULL_HEADER = Message(value=b"null header", headers=(("nothing", None),), timestamp_ms=CREATED_MS)


@pytest.fixture(scope="module")
def filled(broker: Any, admin: Any) -> Callable[[str, str], str]:
    """`filled(client, codec)`: the topic that this client filled with this codec, once for all its readers."""

    @functools.cache
    def fill(client: str, codec: str) -> str:
        name = f"codec-{client}-{codec}-{uuid.uuid4().hex[:8]}"
        topic = confluent.create_topic(admin, name, settings=KEEP_OLD_TIMESTAMPS)
        offsets = CLIENTS[client].publish(broker.bootstrap_servers, topic, MESSAGES, codec)
        assert offsets == list(range(len(MESSAGES)))
        return topic

    return fill


@pytest.mark.parametrize("consumer", CLIENTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("producer", CLIENTS)
def test_every_client_reads_what_another_wrote(
    bootstrap: str, filled: Callable[[str, str], str], producer: str, codec: str, consumer: str
) -> None:
    received = CLIENTS[consumer].read(bootstrap, filled(producer, codec), len(MESSAGES))
    assert [each.message for each in received] == MESSAGES
    assert [each.offset for each in received] == list(range(len(MESSAGES)))


@pytest.mark.parametrize("producer", ["confluent", "aiokafka"])
def test_a_header_may_be_null(bootstrap: str, new_topic: Callable[..., str], producer: str) -> None:
    topic = new_topic(**KEEP_OLD_TIMESTAMPS)
    CLIENTS[producer].publish(bootstrap, topic, [NULL_HEADER])
    for client in CLIENTS.values():
        assert [each.message for each in client.read(bootstrap, topic, 1)] == [NULL_HEADER]


@pytest.mark.skipif(not kcat.installed(), reason="kcat is not installed")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("producer", CLIENTS)
def test_kcat_reads_what_a_client_wrote(
    bootstrap: str, filled: Callable[[str, str], str], producer: str, codec: str
) -> None:
    seen = kcat.read(bootstrap, filled(producer, codec))
    expected = [(_text(each.key) or None, _text(each.value) or None, each.timestamp_ms) for each in MESSAGES]
    assert [(each["key"] or None, each["payload"] or None, each["ts"]) for each in seen] == expected


@pytest.mark.skipif(not kcat.installed(), reason="kcat is not installed")
@pytest.mark.parametrize("codec", CODECS)
def test_clients_read_what_kcat_wrote(bootstrap: str, topic: str, codec: str) -> None:
    lines = b"".join(b"k%d:value %d\n" % (n, n) for n in range(100))
    kcat.kcat(bootstrap, "-P", "-t", topic, "-z", codec, "-K:", "-H", "from=kcat", stdin=lines)
    for client in CLIENTS.values():
        received = [each.message for each in client.read(bootstrap, topic, 100)]
        assert [(each.key, each.value) for each in received] == [
            (b"k%d" % n, b"value %d" % n) for n in range(100)
        ]
        assert {each.headers for each in received} == {(("from", b"kcat"),)}


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_compressed_batch_is_stored_as_it_was_sent(
    bootstrap: str, new_topic: Callable[..., str], python_admin: Any, codec: str
) -> None:
    """Ten thousand equal bytes are stored in a fraction of their size, so they were not decompressed on the way."""
    topic = new_topic()
    confluent.publish(
        bootstrap, topic, [Message(value=b"x" * 1000) for _ in range(100)], codec, linger_ms=200
    )
    assert 0 < _stored_bytes(python_admin, topic) < 20_000


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_topic_with_its_own_codec_repacks(
    bootstrap: str, new_topic: Callable[..., str], python_admin: Any, codec: str
) -> None:
    topic = new_topic(**{"compression.type": codec})
    messages = [Message(value=b"x" * 1000, key=b"%d" % n, headers=(("n", b"%d" % n),)) for n in range(100)]
    confluent.publish(bootstrap, topic, messages, "none", linger_ms=200)
    assert 0 < _stored_bytes(python_admin, topic) < 30_000
    for client in CLIENTS.values():
        received = [each.message._replace(timestamp_ms=None) for each in client.read(bootstrap, topic, 100)]
        assert received == messages


def test_a_topic_without_compression_unpacks(
    bootstrap: str, new_topic: Callable[..., str], python_admin: Any
) -> None:
    topic = new_topic(**{"compression.type": "uncompressed"})
    messages = [Message(value=b"x" * 1000) for _ in range(100)]
    confluent.publish(bootstrap, topic, messages, "zstd", linger_ms=200)
    assert _stored_bytes(python_admin, topic) > 100_000
    assert [each.message.value for each in kafka_python.read(bootstrap, topic, 100)] == [b"x" * 1000] * 100


def _stored_bytes(python_admin: Any, topic: str) -> int:
    [described] = python_admin.describe_log_dirs([topic])
    sizes = [
        partition["partition_size"]
        for log_dir in described["log_dirs"]
        for each in log_dir["topics"]
        for partition in each["partitions"]
    ]
    return sum(sizes)


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode()
