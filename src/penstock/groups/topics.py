"""Topics as the rules of groups see them: their partitions, and the racks in which those can be read.

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
    #: One per partition, by number: where its replicas are. Empty where that is not known.
    racks: tuple[frozenset[str], ...]

    @property
    def partition_count(self) -> int:
        return len(self.racks)

    @property
    def every_partition(self) -> frozenset[int]:
        return frozenset(range(len(self.racks)))


class Topics(Protocol):
    """The topics of the cluster as they are during one operation."""

    @property
    def version(self) -> int:
        """Another number whenever anything said here may have changed: as long as it is the same, so is all."""

    def get(self, name: str) -> Topic | None: ...
    def by_id(self, id: UUID) -> Topic | None: ...
    def names(self) -> Collection[str]: ...


class NoTopics:
    """For who asks nothing about topics."""

    version = 0

    def get(self, name: str) -> Topic | None:
        return None

    def by_id(self, id: UUID) -> Topic | None:
        return None

    def names(self) -> Collection[str]:
        return ()


NO_TOPICS: Final = NoTopics()


#: Names whose place is remembered: it takes a step for each of their characters to find it.
_REMEMBERED_MAX: Final = 1_024


@lru_cache(_REMEMBERED_MAX)
def coordinator_partition(name: str, partition_count: int) -> int:
    """Java's String.hashCode over UTF-16, without its sign, modulo the partitions."""
    units = name.encode("utf-16-be", "surrogatepass")
    code = 0
    for (unit,) in struct.iter_unpack(">H", units):
        code = (31 * code + unit) & 0xFFFF_FFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    # The smallest int has no positive counterpart; Kafka counts it as 0.
    return 0 if signed == -(1 << 31) else abs(signed) % partition_count
