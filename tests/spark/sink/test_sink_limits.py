"""Batch sizes of the sink: batches are cut to the limits of the topic, and larger rows are refused before sending."""

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


class Desk:
    """A cluster that answers what a topic is and how it is set."""

    def __init__(self, **told: str) -> None:
        self.settings = OPTIONS.connection
        self.told = {name.replace("_", "."): value for name, value in told.items()}
        self.asked = 0
        self.internal = False

    def topic_to_write(self, name: str) -> SimpleNamespace:
        if " " in name:
            raise broker_error(ErrorCode.invalid_topic_exception, f"topic {name}")
        return SimpleNamespace(is_internal=self.internal, partitions=(None,))

    def answer(self, topic: str) -> dict[str, str]:
        self.asked += 1
        if not self.told:
            raise broker_error(ErrorCode.topic_authorization_failed, topic)
        return self.told


@pytest.fixture(autouse=True)
def asks_desk(monkeypatch):
    monkeypatch.setattr(records, "topic_settings", lambda desk, topic: desk.answer(topic))
    monkeypatch.setattr(records, "_KNOWN_LIMITS", {})


def rows(*values: bytes, key: bytes | None = b"k") -> pa.RecordBatch:
    return pa.record_batch({"key": pa.array([key] * len(values), pa.binary()), "value": list(values)})


def sent(desk: Desk, *values: bytes, columns: SinkColumns = COLUMNS, **options: object) -> list[bytes]:
    """The batches."""
    found = []
    writers._send(
        LimitChecker(desk, **options),
        OPTIONS,
        columns,
        [rows(*values)],
        lambda topic, partition, data: found.append(bytes(data)),
    )
    return found


def values_of(batches: list[bytes]) -> list[bytes]:
    return [bytes(record.value) for batch in batches for record in decode_records(batch, BYTES_MAX)]


def test_batches_are_cut_to_what_the_topic_takes():
    values = [os.urandom(400) for _ in range(10)]
    found = sent(Desk(max_message_bytes="1000"), *values)
    assert values_of(found) == values
    assert 2 <= len(found) <= 10
    assert max(map(len, found)) <= 1000
    assert len(sent(Desk(), *values, afresh=True)) == 1, "limits that the broker does not report are unknown"


@pytest.mark.parametrize("setting", ["max.message.bytes", "segment.bytes"])
def test_a_record_that_is_too_large(setting):
    desk = Desk(**{"max.message.bytes": "5000", "segment.bytes": "5000", setting: "1000"})
    words = f"a record of 20.. bytes is too large for topic t, which takes at most {setting}=1000"
    with pytest.raises(RecordTooLarge, match=words):
        sent(desk, b"small", os.urandom(2000))
    with pytest.raises(RecordTooLarge, match=words):
        writers.write_dry_run(desk, OPTIONS, COLUMNS, [rows(os.urandom(2000))])
    assert writers.write_dry_run(desk, OPTIONS, COLUMNS, [rows(b"a", b"b")]).rows == 2


def test_what_fits_compressed_is_compressed():
    values = [b"first", b"x" * 9000, b"last"]
    found = sent(Desk(max_message_bytes="1000"), *values)
    assert values_of(found) == values
    assert [batch[22] for batch in found] == [Codec.NONE, Codec.GZIP, Codec.NONE]


def test_what_was_heard_lately_is_not_held_against_a_row():
    desk = Desk(max_message_bytes="1000")
    sent(desk, b"small")
    sent(desk, b"small")
    assert desk.asked == 1
    desk.told = {"max.message.bytes": "9000"}
    assert len(sent(desk, os.urandom(2000))) == 1
    desk.told = {"max.message.bytes": "1000"}
    with pytest.raises(RecordTooLarge):
        sent(desk, os.urandom(2000), afresh=True)


def test_a_compacted_topic_needs_keys():
    desk = Desk(cleanup_policy="compact,delete")
    assert len(sent(desk, b"v")) == 1
    with pytest.raises(WrongRow, match="a row for topic t has no key"):
        writers._send(LimitChecker(desk), OPTIONS, COLUMNS, [rows(b"v", key=None)], lambda *_: None)
    without = SinkColumns(positions={"value": 1}, topic="t")
    with pytest.raises(WrongRow, match="a row for topic t has no key"):
        sent(desk, b"v", columns=without)


def test_topics_that_cannot_be_written_to():
    with pytest.raises(WrongRow, match="there can be no topic 'a b'"):
        sent(Desk(), b"v", columns=SinkColumns(positions={"value": 1}, topic="a b"))
    desk = Desk()
    desk.internal = True
    with pytest.raises(WrongRow, match="which brokers keep for themselves"):
        sent(desk, b"v")


def test_other_refusals_are_not_about_rows(monkeypatch):
    def refuse(_: str) -> None:
        raise broker_error(ErrorCode.unknown_topic_or_partition, "t")

    desk = Desk()
    monkeypatch.setattr(desk, "topic_to_write", refuse)
    with pytest.raises(Refused, match="unknown topic"):
        sent(desk, b"v")
