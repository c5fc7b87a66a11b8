"""Sequence numbers: one for each record, wrapping after 2^31, none for refused batches."""

import pytest

from penstock.client.errors import ClientError
from penstock.client.wire.in_flight import SEQUENCE_NUMBERS, PartitionQueue, ProducerIdAndEpoch
from penstock.protocol.record_batch import Record, checksum, encode_batch, read_header

PRODUCER = ProducerIdAndEpoch(77, 3)


def batch(count: int = 1) -> bytearray:
    return encode_batch([Record(index, 0, None, b"v") for index in range(count)])


def queue() -> PartitionQueue:
    return PartitionQueue("orders", 0, None)


def admit(to: PartitionQueue, count: int = 1) -> int:
    delivery = to.admit(batch(count), PRODUCER, is_transactional=False)
    to.acknowledge(delivery, 0)
    return delivery.sequence


def test_every_record_has_a_number() -> None:
    to = queue()
    assert [admit(to, 3), admit(to, 2), admit(to)] == [0, 3, 5]


def test_numbers_begin_again_after_the_last() -> None:
    to = queue()
    to._next_sequence = SEQUENCE_NUMBERS - 2
    assert [admit(to, 3), admit(to)] == [SEQUENCE_NUMBERS - 2, 1]
    to._next_sequence = SEQUENCE_NUMBERS - 1
    assert [admit(to), admit(to)] == [SEQUENCE_NUMBERS - 1, 0]


@pytest.mark.parametrize("is_transactional", [True, False])
def test_a_batch_says_who_sends_it(is_transactional: bool) -> None:
    to, data = queue(), batch(2)
    to._next_sequence = 9
    to.admit(data, PRODUCER, is_transactional=is_transactional)
    header = read_header(data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 3, 9)
    assert header.is_transactional is is_transactional
    assert header.crc == checksum(data)


def test_the_first_goes_alone_and_then_five() -> None:
    """A broker takes any number from a producer that it has not met."""
    to = queue()
    first = to.admit(batch(), PRODUCER, is_transactional=False)
    assert to.is_full
    to.acknowledge(first, 0)
    for _ in range(5):
        assert not to.is_full
        to.admit(batch(), PRODUCER, is_transactional=False)
    assert to.is_full


def test_acknowledged_out_of_turn() -> None:
    to = queue()
    admit(to)
    first, second, third = (to.admit(batch(), PRODUCER, is_transactional=False) for _ in range(3))
    to.acknowledge(second, 2)
    assert list(to.unacked) == [first, second, third]
    assert to.to_send_again() == [first, third]
    assert not to.waits_for_another(first)
    assert to.waits_for_another(third)
    to.acknowledge(first, 1)
    assert list(to.unacked) == [third]


@pytest.mark.parametrize(
    "data",
    [
        bytearray(b"short"),
        batch()[:-1],
        batch() + b"x",
        encode_batch([Record(0, 0, None, b"v"), Record(2, 0, None, b"v")]),
        encode_batch([], base_offset=0, last_offset=0),
    ],
)
def test_what_no_broker_takes_is_refused_here(data: bytearray) -> None:
    with pytest.raises(ClientError):
        queue().admit(data, PRODUCER, is_transactional=False)
