"""Checks and changes of a produced batch before the append, for topics whose records are decoded."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.broker.config.node_settings import load_settings
from penstock.broker.partition.produced_batch import (
    _SCAN_SLICE_S,
    NAMED_RECORDS_MAX,
    BatchPreparer,
    RecordScans,
    prepare_batch,
)
from penstock.protocol.compression import Codec, compress
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.record_batch import (
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Record,
    checksum,
    decode_records,
    encode_batch,
    open_batch,
    pack_batch,
    read_header,
)
from penstock.protocol.steps import Steps

BOUND = 1 << 20
KEYED = [
    Record(0, 500, b"a", b"one", (("h", b"x"),)),
    Record(1, 400, b"b", None),
    Record(2, 700, b"", b"an empty key is a key"),
]
KEYLESS = [*KEYED[:2], Record(2, 700, None, b"lost")]


def produced(records: list[Record], codec: Codec = Codec.NONE, attributes: int = TRANSACTIONAL) -> memoryview:
    batch = encode_batch(
        records, codec=codec, attributes=attributes, producer_id=4, producer_epoch=3, base_sequence=77
    )
    return memoryview(batch)


@pytest.mark.parametrize("codec", Codec)
def test_a_compacted_topic_takes_keyed_records_as_they_are(codec: Codec) -> None:
    batch = produced(KEYED, codec)
    assert prepare_batch(batch, compacted=True, codec=None, max_bytes=BOUND) is batch


@pytest.mark.parametrize("codec", Codec)
def test_a_compacted_topic_names_the_record_without_a_key(codec: Codec) -> None:
    with pytest.raises(ApiError, match="record 2 ") as refused:
        prepare_batch(produced(KEYLESS, codec), compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


def test_other_topics_take_records_without_a_key() -> None:
    batch = produced(KEYLESS)
    assert prepare_batch(batch, compacted=False, codec=None, max_bytes=BOUND) is batch


@pytest.mark.parametrize("sent", Codec)
@pytest.mark.parametrize("stored", Codec)
@pytest.mark.parametrize("attributes", [TRANSACTIONAL, LOG_APPEND_TIME])
def test_a_topic_codec_changes_nothing_but_the_codec(sent: Codec, stored: Codec, attributes: int) -> None:
    batch = produced(KEYED, sent, attributes)
    prepared = prepare_batch(batch, compacted=True, codec=stored, max_bytes=BOUND)
    before, after = read_header(batch), read_header(prepared)
    assert after.codec is stored
    assert after.crc == checksum(prepared)
    same = {"length": 0, "crc": 0, "attributes": 0}
    assert after._replace(**same) == before._replace(**same)
    assert after.attributes ^ after.codec == before.attributes ^ before.codec
    assert decode_records(prepared, BOUND) == decode_records(batch, BOUND)
    assert (prepared is batch) == (sent is stored)


@pytest.mark.parametrize("compacted", [True, False])
def test_looking_inside_is_bounded(compacted: bool) -> None:
    batch = produced([Record(0, 0, b"k", bytes(2 * BOUND))], Codec.ZSTD)
    with pytest.raises(ApiError, match="more than") as refused:
        prepare_batch(batch, compacted=compacted, codec=Codec.GZIP, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


def test_records_that_cannot_be_read_are_refused_by_a_compacted_topic() -> None:
    batch = memoryview(pack_batch(read_header(produced(KEYED)), b"\x02" * 40))
    with pytest.raises(ApiError) as refused:
        prepare_batch(batch, compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


@pytest.mark.parametrize("damaged_at", [16, 19, 30, 59, 61])
def test_damage_is_never_hidden_under_a_new_checksum(damaged_at: int) -> None:
    batch = bytearray(produced(KEYED, Codec.NONE))
    batch[damaged_at] ^= 0xFF
    prepared = prepare_batch(memoryview(batch), compacted=True, codec=Codec.GZIP, max_bytes=BOUND)
    assert bytes(prepared) == bytes(batch), "left as it is, for the append to refuse"


@pytest.mark.parametrize("sent", Codec)
def test_more_records_than_a_batch_can_hold_are_not_claimed_in_another_codec(sent: Codec) -> None:
    """Two records compressed could pass for a thousand by their header alone."""
    header, body = open_batch(produced(KEYED[:2], sent), BOUND)
    lying = header._replace(record_count=1000, last_offset_delta=999, attributes=int(sent))
    batch = memoryview(pack_batch(lying, compress(sent, body)))
    for stored in set(Codec) - {sent}:
        with pytest.raises(ApiError, match="cannot hold 1000 records") as refused:
            prepare_batch(batch, compacted=False, codec=stored, max_bytes=BOUND)
        assert refused.value.code is ErrorCode.invalid_record


def test_a_refused_batch_names_at_most_a_thousand_records() -> None:
    batch = produced([Record(number, 0, None, b"v") for number in range(NAMED_RECORDS_MAX + 10)])
    with pytest.raises(InvalidRecords) as refused:
        prepare_batch(batch, compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.indexes == tuple(range(NAMED_RECORDS_MAX))


class Ticks:
    """A clock that moves by a tenth of a slice with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += _SCAN_SLICE_S / 10
        return self.now


def steps(count: int, log: list[str]) -> Steps[None]:
    for _ in range(count):
        log.append("step")
        yield


def test_a_scan_of_ordinary_size_never_rests() -> None:
    log: list[str] = []
    RecordScans(Ticks(), lambda _: log.append("rest")).run(steps(8, log))
    assert log == ["step"] * 8


def test_a_long_scan_rests_after_each_slice() -> None:
    log: list[str] = []
    RecordScans(Ticks(), lambda _: log.append("rest")).run(steps(100, log))
    runs = "".join(each[0] for each in log).split("r")
    assert sum(map(len, runs)) == 100
    assert max(map(len, runs[1:])) <= 10
    assert len(runs[0]) <= 22, "the first slice, and another one before the first rest"


def test_one_long_scan_works_at_a_time() -> None:
    """Two scans: while one rests, the other does not work."""
    resting = threading.Event()
    go_on = threading.Event()
    log: list[str] = []

    def rest(_: float) -> None:
        resting.set()
        assert go_on.wait(60)

    scans = RecordScans(Ticks(), rest)
    first = threading.Thread(target=scans.run, args=(steps(40, []),))
    first.start()
    assert resting.wait(60)
    second = threading.Thread(target=scans.run, args=(steps(40, log),))
    second.start()
    while len(log) < 10:
        second.join(0.001)
    assert len(log) <= 11, "only the first slice"
    go_on.set()
    first.join()
    second.join()
    assert len(log) == 40


def test_an_error_ends_a_scan_and_lets_others_work() -> None:
    def failing() -> Steps[None]:
        yield from steps(30, [])
        raise LookupError

    scans = RecordScans(Ticks(), lambda _: None)
    with pytest.raises(LookupError):
        scans.run(failing())
    scans.run(steps(30, log := []))
    assert len(log) == 30


class Connection:
    """Of a client that goes after the scan has looked for it some times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def is_open(self) -> bool:
        self.looks -= 1
        return self.looks >= 0


class InThread:
    async def in_thread(self, call: Any, *args: Any) -> Any:
        return call(*args)


@pytest.mark.parametrize("is_owed", [True, False])
async def test_a_scan_is_abandoned_if_its_reply_is_owed_to_a_client_that_has_gone(is_owed: bool) -> None:
    connection: Any = Connection(looks=3)
    settings = load_settings({"listeners": "PLAINTEXT://:0"}, {})
    preparer = BatchPreparer(settings, cast(Any, InThread()), pytest.fail)
    partition: Any = SimpleNamespace(
        is_compacted=True, is_scheduled=False, codec=None,
        log=SimpleNamespace(config=SimpleNamespace(max_message_bytes=BOUND)),
    )  # fmt: skip
    records = bytearray(produced([Record(number, 0, b"k", b"v") for number in range(5_000)]))
    preparing = preparer.prepare_in_thread(partition, records, connection, is_owed=is_owed)
    if is_owed:
        with pytest.raises(ApiError) as abandoned:
            await preparing
        assert abandoned.value.code is ErrorCode.request_timed_out
    else:
        assert bytes(await preparing) == records
    assert not preparer.budget.bytes_in_use
