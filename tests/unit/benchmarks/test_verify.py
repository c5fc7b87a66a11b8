"""A run whose contents are wrong has no figures."""

import pytest
from benchmarks.load.verify import same_batch, values_from
from benchmarks.wire.payloads import fill_batch, value_pool
from benchmarks.wire.raw_client import BrokerError

from penstock.protocol.compression import Codec

NOW_MS = 1_700_000_000_000
POOL = value_pool(100, count=20)


def stored(codec: Codec = Codec.LZ4) -> bytearray:
    batch, _ = fill_batch(POOL, codec, 4096, NOW_MS)
    return bytearray(batch)


def test_the_brokers_own_stamps_do_not_count_as_a_difference() -> None:
    sent = stored()
    kept = bytearray(sent)
    kept[0:8] = (12345).to_bytes(8, "big")
    kept[12:16] = (7).to_bytes(4, "big")
    same_batch(bytes(sent))(memoryview(kept))
    values_from(POOL)(memoryview(kept))


@pytest.mark.parametrize("position", [22, 61, -1])
def test_one_flipped_byte_is_noticed(position: int) -> None:
    sent = stored()
    kept = bytearray(sent)
    kept[position] ^= 1
    with pytest.raises(BrokerError):
        same_batch(bytes(sent))(memoryview(kept))
    with pytest.raises(BrokerError):
        values_from(POOL)(memoryview(kept))


def test_a_sound_batch_of_other_content_is_noticed() -> None:
    other, _ = fill_batch(value_pool(100, count=20, seed=8), Codec.LZ4, 4096, NOW_MS)
    with pytest.raises(BrokerError):
        same_batch(bytes(stored()))(memoryview(other))
    with pytest.raises(BrokerError):
        values_from(POOL)(memoryview(other))
