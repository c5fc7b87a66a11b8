"""What components use of their process and of other nodes, as tests control it."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.broker.environment import ProcessEnvironment
from penstock.cluster.image import ClusterImage


class SetClockEnvironment(ProcessEnvironment):
    """A process whose wall clock the test sets."""

    def __init__(self, clock_ms: int) -> None:
        super().__init__(io_threads=2, sync_threads=2)
        self.clock_ms = clock_ms

    def now_ms(self) -> int:
        return self.clock_ms

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        """Tasks that have not ended."""
        return self._tasks


class PublishedMetadata:
    """The image that the test has published."""

    def __init__(self) -> None:
        self.image = ClusterImage()
        self.turn = asyncio.Lock()


class FetchedPeers:
    """Other nodes, to which this node sends nothing but fetches."""

    async def call(self, where: int | tuple[str, int], api_key: int, request: Any, **options: Any) -> Any:
        raise AssertionError(f"API {api_key} was called at {where}")

    async def raw(self, where: int | tuple[str, int], frame: Any, **options: Any) -> memoryview:
        raise AssertionError(f"a frame was sent to {where}")
