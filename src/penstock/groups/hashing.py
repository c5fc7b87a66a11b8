"""Which partition of the internal topic a group lives in, as Kafka computes it."""

import struct
from functools import lru_cache
from typing import Final

#: Names whose place is remembered: it takes a step for each of their characters to find it.
_REMEMBERED_MAX: Final = 1_024


@lru_cache(_REMEMBERED_MAX)
def partition_of(name: str, partition_count: int) -> int:
    """Java's String.hashCode over UTF-16, without its sign, modulo the partitions."""
    units = name.encode("utf-16-be", "surrogatepass")
    code = 0
    for (unit,) in struct.iter_unpack(">H", units):
        code = (31 * code + unit) & 0xFFFF_FFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    # The smallest int has no positive counterpart; Kafka counts it as 0.
    return 0 if signed == -(1 << 31) else abs(signed) % partition_count
