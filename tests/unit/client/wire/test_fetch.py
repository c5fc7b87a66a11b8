"""What a reader sees of the batches that a broker sends."""

import pytest

from penstock.client.errors import CorruptRecords
from penstock.client.wire.fetch import BatchView, checked_batches, visible_batches, whole_batches
from penstock.protocol.record_batch import TRANSACTIONAL, EndMarker, Record, encode_batch, encode_end_marker


def batch(offset: int, count: int = 1, *, producer: int = -1) -> bytearray:
    records = [Record(offset + i, 0, None, b"%d" % (offset + i)) for i in range(count)]
    attributes = TRANSACTIONAL if producer >= 0 else 0
    return encode_batch(
        records, producer_id=producer, producer_epoch=0, base_sequence=0, attributes=attributes
    )


def marker(offset: int, producer: int, *, commits: bool) -> bytearray:
    made = encode_end_marker(EndMarker(producer, 0, 0, commits), 0)
    made[:8] = offset.to_bytes(8, "big")
    return made


def seen(data: bytes, aborted: list[tuple[int, int]] | None) -> list[int]:
    return [view.header.base_offset for view in visible_batches(checked_batches(data), aborted)]


def test_everything_but_control_batches_is_seen_when_nothing_is_hidden() -> None:
    data = b"".join((batch(0), batch(1, producer=5), marker(2, 5, commits=False), batch(3)))
    assert seen(data, None) == [0, 1, 3]


def test_aborted_transactions_are_hidden_up_to_their_marker() -> None:
    data = b"".join(
        (
            batch(0, producer=5),
            batch(1, producer=6),
            batch(2),
            marker(3, 5, commits=False),
            batch(4, producer=5),  # its next transaction
            marker(5, 6, commits=True),
            batch(6, producer=6),
            marker(7, 5, commits=True),
            marker(8, 6, commits=False),
        )
    )
    assert seen(data, [(5, 0), (6, 6)]) == [1, 2, 4]


def test_a_transaction_that_began_before_what_was_fetched() -> None:
    data = b"".join((batch(100, producer=5), marker(101, 5, commits=False), batch(102, producer=5)))
    assert seen(data, [(5, 3)]) == [102]


def test_the_same_producer_aborts_twice() -> None:
    data = b"".join(
        (
            batch(0, producer=5),
            marker(1, 5, commits=False),
            batch(2, producer=5),
            marker(3, 5, commits=True),
            batch(4, 2, producer=5),
            marker(6, 5, commits=False),
        )
    )
    assert seen(data, [(5, 4), (5, 0)]) == [2]


def test_an_idempotent_batch_of_an_aborted_producer_is_no_part_of_its_transaction() -> None:
    plain = encode_batch([Record(0, 0, None, b"v")], producer_id=5, producer_epoch=0, base_sequence=0)
    assert seen(bytes(plain), [(5, 0)]) == [0]


def test_a_batch_that_was_cut_short_is_left_out() -> None:
    data = batch(0) + batch(1)
    for cut in range(1, len(batch(1))):
        assert bytes(whole_batches(memoryview(data)[:-cut])) == batch(0)
    assert bytes(whole_batches(memoryview(data))) == data
    assert len(whole_batches(memoryview(b""))) == 0


def test_an_old_format_is_named() -> None:
    old = bytearray(batch(0))
    old[16] = 1
    with pytest.raises(CorruptRecords, match="format 1"):
        list(checked_batches(old))
    with pytest.raises(CorruptRecords, match="format 1"):
        whole_batches(memoryview(old)[:-1])


def test_a_length_that_cannot_be() -> None:
    broken = bytearray(batch(0))
    broken[8:12] = (10).to_bytes(4, "big")
    with pytest.raises(CorruptRecords, match="too short for a record batch"):
        whole_batches(memoryview(broken))


def test_damage_is_found_if_checksums_are_checked() -> None:
    damaged = batch(7)
    damaged[-1] ^= 1
    with pytest.raises(CorruptRecords, match="offset 7"):
        list(checked_batches(damaged))
    assert [type(view) for view in checked_batches(damaged, checks_crc=False)] == [BatchView]
