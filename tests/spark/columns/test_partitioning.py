"""Keys go to the same partitions as with other producers."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from penstock.spark.columns import partition_rows, split_by_partition

#: From the tests of the Java client.
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
keys = st.lists(st.none() | st.binary(max_size=40), max_size=30)


@pytest.mark.parametrize(("key", "hashed"), VECTORS.items())
def test_murmur2_equals_that_of_java(key: bytes, hashed: int) -> None:
    """A count of 2^31 - 1 partitions shows all of the hash but its sign."""
    (found,) = partition_rows(pa.array([key]), (1 << 31) - 1, seed=0)
    assert found == (hashed & 0x7FFFFFFF) % ((1 << 31) - 1)


@given(keys=keys, count=st.integers(1, 1000), seed=st.integers(0, 1 << 40))
def test_keys_go_where_kafka_python_sends_them(keys: list[bytes | None], count: int, seed: int) -> None:
    found = partition_rows(pa.array(keys, pa.binary()), count, seed=seed)
    want = [seed % count if key is None else (murmur2(key) & 0x7FFFFFFF) % count for key in keys]
    assert found.tolist() == want


def test_text_is_hashed_as_its_bytes() -> None:
    text = partition_rows(pa.array(["größe", "x"]), 1000, seed=0)
    assert text.tolist() == partition_rows(pa.array(["größe".encode(), b"x"]), 1000, seed=0).tolist()


def test_null_keys_of_one_call_share_a_partition_and_calls_differ() -> None:
    nulls = pa.nulls(5)
    assert [set(partition_rows(nulls, 3, seed=seed).tolist()) for seed in range(4)] == [{0}, {1}, {2}, {0}]


@given(st.lists(st.integers(0, 5) | st.sampled_from([65_535, 65_536, 70_000]), max_size=50))
def test_rows_are_split_by_partition_in_their_order(partitions: list[int]) -> None:
    table = pa.record_batch({"value": pa.array([b"%d" % row for row in range(len(partitions))], pa.binary())})
    parts = split_by_partition(table, np.array(partitions, np.int32))
    assert list(parts) == sorted(set(partitions))
    for partition, part in parts.items():
        rows = [row for row, chosen in enumerate(partitions) if chosen == partition]
        assert part["value"].to_pylist() == [b"%d" % row for row in rows]
