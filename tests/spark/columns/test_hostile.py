"""A checksum does not protect from hostile batches. Each is refused, or read as the per-record codec reads it, and no
byte beyond its end is read.
"""

import random
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.spark.columns.guarded import GuardedMemory
from tests.spark.columns.records import EVERYTHING, decoded, expected, log_of, logs, rows

from penstock.protocol.errors import ApiError
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    BatchHeader,
    Record,
    decode_records,
    encode_batch,
    pack_batch,
    read_header,
)
from penstock.spark.columns import COLUMNS, CorruptBatch, decode, kernels

BOUND = 1 << 22
MUTATIONS = 100_000
#: Bytes that often make long numbers, negative ones, nulls and large lengths.
PIVOTS = (0x00, 0x01, 0x02, 0x03, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
SEEDS = [
    [Record(0, 5, b"key", b"value", (("h", b"x"), ("longer", None)))],
    [Record(n, 1 << 40, None if n % 2 else b"k" * n, b"v" * 70, ()) for n in range(4)],
    [Record(n * 100, n << 50, b"", None, (("", b""),) * n) for n in range(4)],
    [Record(0, 0, None, None, ()), Record(1 << 30, -(1 << 62), b"a" * 200, b"b" * 200, ())],
    [Record(0, -(1 << 63), None, None, ()), Record(1, 1, None, None, ())],
]


def mutated(body: bytes, chance: random.Random) -> bytes:
    out = bytearray(body)
    for _ in range(chance.randint(1, 3)):
        kind, at = chance.random(), chance.randrange(len(out) + 1)
        if kind < 0.7 and at < len(out):
            out[at] = chance.choice(PIVOTS) if chance.random() < 0.6 else chance.randrange(256)
        elif kind < 0.8:
            out[at:at] = bytes([chance.choice(PIVOTS)])
        elif kind < 0.9:
            del out[at : at + chance.randint(1, 3)]
        else:
            del out[at:]
    return bytes(out)


class Scanner:
    """The kernel with all its arrays allocated once, over memory that ends at a guard page."""

    def __init__(self) -> None:
        self.memory = GuardedMemory(1 << 16)
        self.records = np.empty((kernels.RECORD_FIELDS, 1000), np.int64)
        self.cursor = np.zeros(kernels.CURSOR_FIELDS, np.int64)

    def scan(self, header: BatchHeader, body: bytes) -> list[tuple[int, int, int, int]] | None:
        """Return offset, timestamp and the lengths of key and value, or None for a refused batch."""
        bodies = np.array([(self.memory.place(body), len(body))], np.int64)
        headers = np.array([header], np.int64)
        self.cursor[:] = 0
        ending = kernels.scan(headers, bodies, self.cursor, self.records, EVERYTHING, (1000, BOUND))
        if ending != kernels.FINISHED:
            return None
        fields = [kernels.OFFSET, kernels.TIMESTAMP, kernels.KEY_BYTES, kernels.VALUE_BYTES]
        found = self.records[fields, : self.cursor[kernels.ROWS]].T.tolist()
        return [(offset, microseconds, key, value) for offset, microseconds, key, value in found]


def clamped(timestamp: int) -> int:
    bound = ((1 << 63) - 1) // 1000
    return max(-bound, min(timestamp, bound)) * 1000


def by_the_codec(hostile: bytearray) -> list[tuple[int, int, int, int]] | None:
    try:
        records = decode_records(hostile, BOUND)
    except ApiError:
        return None
    return [
        (
            record.offset,
            clamped(record.timestamp),
            -1 if record.key is None else len(record.key),
            -1 if record.value is None else len(record.value),
        )
        for record in records
    ]


def test_the_kernel_and_the_codec_agree_on_damaged_batches() -> None:
    chance, scanner = random.Random(5), Scanner()
    seeds = [encode_batch(records) for records in SEEDS]
    read = 0
    for _ in range(MUTATIONS):
        seed = chance.choice(seeds)
        hostile = pack_batch(read_header(seed), mutated(bytes(seed[BATCH_HEADER_BYTES:]), chance))
        found = scanner.scan(read_header(hostile), bytes(hostile[BATCH_HEADER_BYTES:]))
        assert found == by_the_codec(hostile), hostile.hex()
        read += found is not None
    assert MUTATIONS // 50 < read < MUTATIONS // 2, "no damaged batch was accepted, or none was refused"


@given(log=logs(), chance=st.randoms(use_true_random=False))
def test_all_columns_of_a_damaged_batch_are_refused_or_equal(
    log: list[list[Record]], chance: random.Random
) -> None:
    batch = log_of(log)[0]
    hostile = pack_batch(read_header(batch), mutated(bytes(batch[BATCH_HEADER_BYTES:]), chance))
    try:
        records = decode_records(hostile, BOUND)
    except ApiError:
        records = None
    try:
        found = rows(decoded([hostile], (-(1 << 62), 1 << 62)))
    except CorruptBatch:
        found = None
    if records is None:
        assert found is None
    else:
        texts = [r._replace(headers=tuple((as_java(k), v) for k, v in r.headers)) for r in records]
        want = expected(texts)
        for row, record in zip(want, records, strict=True):
            row["timestamp"] = clamped(record.timestamp)
        assert found == want


def as_java(key: str) -> str:
    return key.encode(errors="surrogateescape").decode(errors="replace")


@given(junk=st.binary(max_size=300), count=st.integers(0, 50), attributes=st.integers(0, 7))
def test_random_bytes_are_refused_or_contain_as_many_records_as_they_declare(
    junk: bytes, count: int, attributes: int
) -> None:
    header = read_header(encode_batch(SEEDS[0]))
    junk_header = header._replace(record_count=count, attributes=attributes, last_offset_delta=1 << 30)
    hostile = GuardedMemory(1000).view(pack_batch(junk_header, junk))
    try:
        tables = list(
            decode(
                [(read_header(hostile), hostile)],
                topic="t",
                partition=0,
                start_offset=0,
                end_offset=1 << 62,
                columns=COLUMNS,
                decoded_bytes_max=BOUND,
            )
        )
    except CorruptBatch:
        return
    assert sum(table.num_rows for table in tables) == count


def test_the_guard_page_works() -> None:
    """Reading the byte behind it ends the process. Otherwise the other tests would prove nothing."""
    program = (
        "import ctypes\n"
        "from tests.spark.columns.guarded import GuardedMemory\n"
        "memory = GuardedMemory(10)\n"
        "start = memory.place(b'0123456789')\n"
        "assert ctypes.string_at(start, 10) == b'0123456789'\n"
        "ctypes.string_at(start, 11)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -11, done.stderr
