"""Topics as the rules of groups see them: their partitions, and the racks of the replicas.

`coordinator_partition` computes, as Kafka does, the partition of an internal topic that a group or transactional id
belongs to. Every node loads this module when it starts, so it imports nothing heavy.
"""

import struct
from collections.abc import Collection
from functools import lru_cache
from typing import Final, NamedTuple, Protocol
from uuid import UUID


class Topic(NamedTuple):
    name: str
    id: UUID
    #: The racks of the replicas of each partition, by partition number; empty if unknown.
    racks: tuple[frozenset[str], ...]

    @property
    def partition_count(self) -> int:
        return len(self.racks)

    @property
    def every_partition(self) -> frozenset[int]:
        return frozenset(range(len(self.racks)))


class Topics(Protocol):
    """The topics of the cluster; they do not change during an operation."""

    @property
    def version(self) -> int:
        """Changes whenever the topics may have changed."""

    def get(self, name: str) -> Topic | None: ...
    def by_id(self, id: UUID) -> Topic | None: ...
    def names(self) -> Collection[str]: ...


class NoTopics:
    """For operations that do not need the topics."""

    version = 0

    def get(self, name: str) -> Topic | None:
        return None

    def by_id(self, id: UUID) -> Topic | None:
        return None

    def names(self) -> Collection[str]:
        return ()


NO_TOPICS: Final = NoTopics()


#: How many results are cached, because computing one takes a step for each character.
_REMEMBERED_MAX: Final = 1_024


@lru_cache(_REMEMBERED_MAX)
def coordinator_partition(name: str, partition_count: int) -> int:
    """The absolute value of Java's String.hashCode, which is over UTF-16, modulo the number of partitions."""
    units = name.encode("utf-16-be", "surrogatepass")
    code = 0
    for (unit,) in struct.iter_unpack(">H", units):
        code = (31 * code + unit) & 0xFFFF_FFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    # The absolute value of the smallest int does not fit an int; Kafka takes 0 instead.
    return 0 if signed == -(1 << 31) else abs(signed) % partition_count
