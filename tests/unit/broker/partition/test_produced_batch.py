"""Checks and changes of a produced batch before the append, for topics whose records are decoded."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.broker.config.node_settings import load_settings
from penstock.broker.partition.produced_batch import NAMED_RECORDS_MAX, BatchPreparer, prepare_batch
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
from penstock.protocol.steps import finish

BOUND = 1 << 20
KEYED = [
    Record(0, 500, b"a", b"one", (("h", b"x"),)),
    Record(1, 400, b"b", None),
    Record(2, 700, b"", b"an empty key is a key"),
]
KEYLESS = [*KEYED[:2], Record(2, 700, None, b"lost")]


def checked(batch: memoryview, **options: Any) -> bytearray | memoryview:
    """The prepared batch, once its keys are checked."""
    prepared = prepare_batch(batch, **options)
    if prepared.key_check is not None:
        finish(prepared.key_check)
    return prepared.batch


def produced(records: list[Record], codec: Codec = Codec.NONE, attributes: int = TRANSACTIONAL) -> memoryview:
    batch = encode_batch(
        records, codec=codec, attributes=attributes, producer_id=4, producer_epoch=3, base_sequence=77
    )
    return memoryview(batch)


@pytest.mark.parametrize("codec", Codec)
def test_a_compacted_topic_takes_keyed_records_as_they_are(codec: Codec) -> None:
    batch = produced(KEYED, codec)
    assert checked(batch, compacted=True, codec=None, max_bytes=BOUND) is batch


@pytest.mark.parametrize("codec", Codec)
def test_a_compacted_topic_names_the_record_without_a_key(codec: Codec) -> None:
    with pytest.raises(ApiError, match="record 2 ") as refused:
        checked(produced(KEYLESS, codec), compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


def test_other_topics_take_records_without_a_key() -> None:
    batch = produced(KEYLESS)
    assert checked(batch, compacted=False, codec=None, max_bytes=BOUND) is batch


@pytest.mark.parametrize("sent", Codec)
@pytest.mark.parametrize("stored", Codec)
@pytest.mark.parametrize("attributes", [TRANSACTIONAL, LOG_APPEND_TIME])
def test_a_topic_codec_changes_nothing_but_the_codec(sent: Codec, stored: Codec, attributes: int) -> None:
    batch = produced(KEYED, sent, attributes)
    prepared = checked(batch, compacted=True, codec=stored, max_bytes=BOUND)
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
        checked(batch, compacted=compacted, codec=Codec.GZIP, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


def test_records_that_cannot_be_read_are_refused_by_a_compacted_topic() -> None:
    batch = memoryview(pack_batch(read_header(produced(KEYED)), b"\x02" * 40))
    with pytest.raises(ApiError) as refused:
        checked(batch, compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.code is ErrorCode.invalid_record


@pytest.mark.parametrize("damaged_at", [16, 19, 30, 59, 61])
def test_damage_is_never_hidden_under_a_new_checksum(damaged_at: int) -> None:
    batch = bytearray(produced(KEYED, Codec.NONE))
    batch[damaged_at] ^= 0xFF
    prepared = checked(memoryview(batch), compacted=True, codec=Codec.GZIP, max_bytes=BOUND)
    assert bytes(prepared) == bytes(batch), "left as it is, for the append to refuse"


@pytest.mark.parametrize("sent", Codec)
def test_more_records_than_a_batch_can_hold_are_not_claimed_in_another_codec(sent: Codec) -> None:
    """Two records compressed could pass for a thousand by their header alone."""
    header, body = open_batch(produced(KEYED[:2], sent), BOUND)
    lying = header._replace(record_count=1000, last_offset_delta=999, attributes=int(sent))
    batch = memoryview(pack_batch(lying, compress(sent, body)))
    for stored in set(Codec) - {sent}:
        with pytest.raises(ApiError, match="cannot hold 1000 records") as refused:
            checked(batch, compacted=False, codec=stored, max_bytes=BOUND)
        assert refused.value.code is ErrorCode.invalid_record


def test_a_refused_batch_names_at_most_a_thousand_records() -> None:
    batch = produced([Record(number, 0, None, b"v") for number in range(NAMED_RECORDS_MAX + 10)])
    with pytest.raises(InvalidRecords) as refused:
        checked(batch, compacted=True, codec=None, max_bytes=BOUND)
    assert refused.value.indexes == tuple(range(NAMED_RECORDS_MAX))


class Connection:
    """Of a client that goes after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def is_open(self) -> bool:
        self.steps -= 1
        return self.steps >= 0


class InThread:
    async def in_thread(self, call: Any, *args: Any) -> Any:
        return call(*args)


@pytest.mark.parametrize("is_owed", [True, False])
async def test_keys_are_checked_in_the_time_of_the_client_while_its_reply_is_owed(is_owed: bool) -> None:
    connection: Any = Connection(steps=3)
    run: list[Any] = []

    async def run_steps(steps: Any, requester: Any) -> None:
        assert requester is connection
        for _ in steps:
            run.append(len(run))

    settings = load_settings({"listeners": "PLAINTEXT://:0"}, {})
    preparer = BatchPreparer(settings, cast(Any, InThread()), pytest.fail, cast(Any, run_steps))
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
        assert len(run) == 2
    else:
        assert bytes(await preparing) == records
        assert len(run) == 10
    assert not preparer.budget.bytes_in_use
