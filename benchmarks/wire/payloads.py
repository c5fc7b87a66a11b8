"""The bytes that both brokers get: seeded values that compress about as well as real events do."""

import random

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import Record, encode_batch

#: How many different values a workload cycles through.
POOL_VALUES = 1000
_WORDS = (
    "order",
    "paid",
    "shipped",
    "customer",
    "warehouse",
    "amount",
    "currency",
    "pending",
    "EUR",
    "status",
)


def value_pool(value_bytes: int, count: int = POOL_VALUES, seed: int = 7) -> list[bytes]:
    """Half random hexadecimal digits (ids), half words from a small vocabulary (field names)."""
    rng = random.Random(seed)
    return [_value(rng, value_bytes) for _ in range(count)]


def _value(rng: random.Random, value_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while size < value_bytes:
        part = f"{rng.choice(_WORDS)}={rng.getrandbits(48):012x};".encode()
        parts.append(part)
        size += len(part)
    return b"".join(parts)[:value_bytes]


def fill_batch(pool: list[bytes], codec: Codec, batch_bytes_max: int, now_ms: int) -> tuple[bytes, int]:
    """One batch as large as fits before compression, and its record count."""
    count = _count_that_fits(pool, batch_bytes_max, now_ms)
    return bytes(encode_batch(_records(pool, count, now_ms), codec=codec, base_offset=0)), count


def single_record_batch(value: bytes, now_ms: int) -> bytes:
    return bytes(encode_batch([Record(0, now_ms, None, value)]))


def _records(pool: list[bytes], count: int, now_ms: int) -> list[Record]:
    return [Record(offset, now_ms, None, pool[offset % len(pool)]) for offset in range(count)]


def _count_that_fits(pool: list[bytes], batch_bytes_max: int, now_ms: int) -> int:
    low, high = 1, max(2, batch_bytes_max // len(pool[0]))
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(encode_batch(_records(pool, middle, now_ms))) <= batch_bytes_max
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
