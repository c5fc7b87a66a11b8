"""kcat, a command that many users know."""

from collections.abc import Callable

import pytest
from tests.compat import confluent
from tests.compat.kcat import installed, kcat, metadata, read
from tests.compat.message import Message, numbered

pytestmark = pytest.mark.skipif(not installed(), reason="kcat is not installed")


def test_metadata(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=3)
    described = metadata(bootstrap, "-t", topic)
    assert [each["name"] for each in described["brokers"]] == [bootstrap]
    [found] = described["topics"]
    assert found["topic"] == topic
    assert [each["partition"] for each in found["partitions"]] == [0, 1, 2]


def test_publish_from_a_pipe_and_read_back(bootstrap: str, topic: str) -> None:
    kcat(bootstrap, "-P", "-t", topic, stdin=b"one\ntwo\nthree\n")
    assert kcat(bootstrap, "-C", "-t", topic, "-e", "-q", "-o", "beginning") == b"one\ntwo\nthree\n"


def test_publish_a_file_idempotently(bootstrap: str, topic: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(5000))
    kcat(bootstrap, "-P", "-t", topic, "-X", "enable.idempotence=true", "-z", "lz4", stdin=lines)
    assert kcat(bootstrap, "-C", "-t", topic, "-e", "-q") == lines


def test_formats_with_keys_headers_and_offsets(bootstrap: str, topic: str) -> None:
    kcat(bootstrap, "-P", "-t", topic, "-K", ":", "-H", "a=b", stdin=b"key:value\n")
    printed = kcat(bootstrap, "-C", "-t", topic, "-e", "-q", "-f", "%t|%p|%o|%k|%s|%h\n")
    assert printed.decode() == f"{topic}|0|0|key|value|a=b\n"


def test_the_last_messages_and_a_time(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"retention.ms": "-1"})
    confluent.publish(
        bootstrap, topic, [each._replace(timestamp_ms=1_700_000_000_000 + n) for n, each in _ten()]
    )
    assert kcat(bootstrap, "-C", "-t", topic, "-e", "-q", "-o", "-3", "-f", "%s ") == b"7 8 9 "
    assert (
        kcat(bootstrap, "-C", "-t", topic, "-e", "-q", "-o", "s@1700000000004", "-f", "%s ")
        == b"4 5 6 7 8 9 "
    )
    assert kcat(bootstrap, "-Q", "-t", f"{topic}:0:1700000000006").decode().split() == [
        topic,
        "[0]",
        "offset",
        "6",
    ]


def _ten() -> list[tuple[int, Message]]:
    return list(enumerate(numbered(10)))


def test_a_group_of_one(bootstrap: str, new_topic: Callable[..., str], group: str) -> None:
    topic = new_topic(partitions=2)
    confluent.publish(bootstrap, topic, [*numbered(5), *numbered(5, partition=1)])
    first = kcat(
        bootstrap, "-G", group, "-c", "10", "-q", "-X", "auto.offset.reset=earliest", "-f", "%p:%s\n", topic
    )
    assert sorted(first.split()) == sorted(b"%d:%d" % (p, n) for p in range(2) for n in range(5))


def test_delete_by_tombstone_is_seen(bootstrap: str, topic: str) -> None:
    kcat(bootstrap, "-P", "-t", topic, "-K", ":", "-Z", stdin=b"key:\n")
    [only] = read(bootstrap, topic)
    assert (only["key"], only["payload"]) == ("key", None)
