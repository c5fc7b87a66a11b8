"""What groups know of topics: their partitions, and the racks in which those can be read."""

from collections.abc import Collection
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
