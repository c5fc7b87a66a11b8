"""Limits of topics: batches fit into them, and a record that does not fit fails before it is sent."""

import os
from types import SimpleNamespace

import pyarrow as pa
import pytest

from penstock.client.errors import Refused, broker_error
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import decode_records
from penstock.spark.sink import records, writers
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.records import LimitChecker, RecordTooLarge, SinkColumns, WrongRow

COLUMNS = SinkColumns(positions={"key": 0, "value": 1}, topic="t")
OPTIONS = SinkOptions.parse({"kafka.bootstrap.servers": "unused:1"}, streaming=False)
BYTES_MAX = 1 << 20


class FakeCluster:
    """A cluster that returns a given topic and given settings."""

    def __init__(self, **topic_settings: str) -> None:
        self.settings = OPTIONS.connection
        self.topic_settings = {name.replace("_", "."): value for name, value in topic_settings.items()}
        self.asked = 0
        self.internal = False

    def topic_to_write(self, name: str) -> SimpleNamespace:
        if " " in name:
            raise broker_error(ErrorCode.invalid_topic_exception, f"topic {name}")
        return SimpleNamespace(is_internal=self.internal, partitions=(None,))

    def answer(self, topic: str) -> dict[str, str]:
        self.asked += 1
        if not self.topic_settings:
            raise broker_error(ErrorCode.topic_authorization_failed, topic)
        return self.topic_settings


@pytest.fixture(autouse=True)
def fake_settings(monkeypatch):
    monkeypatch.setattr(records, "topic_settings", lambda cluster, topic: cluster.answer(topic))
    monkeypatch.setattr(records, "_KNOWN_LIMITS", {})


def rows(*values: bytes, key: bytes | None = b"k") -> pa.RecordBatch:
    return pa.record_batch({"key": pa.array([key] * len(values), pa.binary()), "value": list(values)})


def sent(
    cluster: FakeCluster, *values: bytes, columns: SinkColumns = COLUMNS, **options: object
) -> list[bytes]:
    """Return the batches that were sent."""
    found = []
    writers._send(
        LimitChecker(cluster, **options),
        OPTIONS,
        columns,
        [rows(*values)],
        lambda topic, partition, data: found.append(bytes(data)),
    )
    return found


def values_of(batches: list[bytes]) -> list[bytes]:
    return [bytes(record.value) for batch in batches for record in decode_records(batch, BYTES_MAX)]


def test_batches_fit_the_limit_of_the_topic():
    values = [os.urandom(400) for _ in range(10)]
    found = sent(FakeCluster(max_message_bytes="1000"), *values)
    assert values_of(found) == values
    assert 2 <= len(found) <= 10
    assert max(map(len, found)) <= 1000
    assert len(sent(FakeCluster(), *values, use_cache=False)) == 1, "without settings there is no limit"


@pytest.mark.parametrize("setting", ["max.message.bytes", "segment.bytes"])
def test_a_record_that_is_too_large(setting):
    cluster = FakeCluster(**{"max.message.bytes": "5000", "segment.bytes": "5000", setting: "1000"})
    words = f"a record of 20.. bytes is too large for topic t, which accepts at most {setting}=1000"
    with pytest.raises(RecordTooLarge, match=words):
        sent(cluster, b"small", os.urandom(2000))
    with pytest.raises(RecordTooLarge, match=words):
        writers.write_dry_run(cluster, OPTIONS, COLUMNS, [rows(os.urandom(2000))])
    assert writers.write_dry_run(cluster, OPTIONS, COLUMNS, [rows(b"a", b"b")]).rows == 2


def test_a_large_record_is_compressed_if_it_then_fits():
    values = [b"first", b"x" * 9000, b"last"]
    found = sent(FakeCluster(max_message_bytes="1000"), *values)
    assert values_of(found) == values
    assert [batch[22] for batch in found] == [Codec.NONE, Codec.GZIP, Codec.NONE]


def test_limits_are_read_again_before_a_row_is_refused():
    cluster = FakeCluster(max_message_bytes="1000")
    sent(cluster, b"small")
    sent(cluster, b"small")
    assert cluster.asked == 1
    cluster.topic_settings = {"max.message.bytes": "9000"}
    assert len(sent(cluster, os.urandom(2000))) == 1
    cluster.topic_settings = {"max.message.bytes": "1000"}
    with pytest.raises(RecordTooLarge):
        sent(cluster, os.urandom(2000), use_cache=False)


def test_a_compacted_topic_needs_keys():
    cluster = FakeCluster(cleanup_policy="compact,delete")
    assert len(sent(cluster, b"v")) == 1
    with pytest.raises(WrongRow, match="a row for topic t has no key"):
        writers._send(LimitChecker(cluster), OPTIONS, COLUMNS, [rows(b"v", key=None)], lambda *_: None)
    without = SinkColumns(positions={"value": 1}, topic="t")
    with pytest.raises(WrongRow, match="a row for topic t has no key"):
        sent(cluster, b"v", columns=without)


def test_topics_that_cannot_be_written():
    with pytest.raises(WrongRow, match="'a b' is not a valid topic name"):
        sent(FakeCluster(), b"v", columns=SinkColumns(positions={"value": 1}, topic="a b"))
    cluster = FakeCluster()
    cluster.internal = True
    with pytest.raises(WrongRow, match="which is an internal topic of the brokers"):
        sent(cluster, b"v")


def test_other_errors_are_not_about_rows(monkeypatch):
    def refuse(_: str) -> None:
        raise broker_error(ErrorCode.unknown_topic_or_partition, "t")

    cluster = FakeCluster()
    monkeypatch.setattr(cluster, "topic_to_write", refuse)
    with pytest.raises(Refused, match="unknown topic"):
        sent(cluster, b"v")
