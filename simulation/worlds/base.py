"""What all worlds have in common: topics, clients, a beginning and an end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar

from penstock.protocol.errors import ErrorCode
from simulation.checks.committed import CommittedLogs
from simulation.client import CREATE_TOPICS, Client, message
from simulation.cluster import Cluster, TopicShape


class World(ABC):
    """A world draws its shape from the loop's seed, and runs clients until `close`."""

    #: Settings of the nodes, beside those that all worlds share.
    settings: ClassVar[Mapping[str, str]] = {}
    #: How long, in virtual seconds, everything may take to work again after the faults.
    recovery_s: ClassVar[float] = 40.0

    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.committed = committed
        self.counts: Counter[str] = Counter()
        self.is_closing = False
        self.admin = Client(cluster, 200, self.counts)

    @property
    @abstractmethod
    def topics(self) -> tuple[TopicShape, ...]:
        """Created before the clients start."""

    @property
    @abstractmethod
    def clients(self) -> list[Client]:
        """Clients that faults may suspend."""

    @abstractmethod
    def begin(self) -> None:
        """Start the clients: the topics exist."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether all clients are at work. Faults start then."""

    @abstractmethod
    def unfinished(self) -> str | None:
        """What still has to happen before this run has shown that the cluster works again, if anything."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Wrap shipped code, for checks that see more than clients do."""
        yield

    def finish(self) -> None:  # noqa: B027 - a world need not have such checks
        """Check what can be checked only at the end."""

    def close(self) -> None:
        """Start no new work; what is under way goes on until it is done."""
        self.is_closing = True

    # -- the beginning ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the topics, then start the clients. Runs in a task of the admin's process."""
        for shape in self.topics:
            while not await self._create(shape):
                await asyncio.sleep(0.02)
        while not all(shape.name in self.cluster.image.topics for shape in self.topics):
            await asyncio.sleep(0.02)
        self.begin()

    async def _create(self, shape: TopicShape) -> bool:
        if shape.name in self.cluster.image.topics:
            return True
        if self.cluster.unhealthy() is not None:
            return False
        new = message(CREATE_TOPICS, 7)
        configs = tuple(new("CreatableTopicConfig", name=name, value=value) for name, value in shape.configs)
        topic = new(
            "CreatableTopic",
            name=shape.name,
            num_partitions=shape.partitions,
            replication_factor=shape.replication_factor,
            assignments=(),
            configs=configs,
        )
        request = new(
            "CreateTopicsRequest", topics=(topic,), timeout=timedelta(seconds=1), validate_only=False
        )
        reply = await self.admin.call(self.admin.any_node(), CREATE_TOPICS, 7, request, timeout_s=2)
        return reply is not None and reply.topics[0].error_code in (
            ErrorCode.none,
            ErrorCode.topic_already_exists,
        )
