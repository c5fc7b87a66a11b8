"""Grouped fsync: one sync in flight per partition; everything appended meanwhile shares the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from penstock.broker.environment import end_process
from penstock.broker.metrics.counters import Metrics
from penstock.log.flush import begin_writeback

if TYPE_CHECKING:
    from penstock.log.flush import FlushJob
    from penstock.log.log import Log
    from penstock.log.segment_files import SharedFile

logger = logging.getLogger("penstock.flush")

#: Delay before the retry of a sync that found no free file descriptor.
_POSTPONED_S: Final = 0.1


class Flusher:
    """Syncs one log on request; calls `on_synced` on the event loop when `log.synced` has moved."""

    __slots__ = (
        "_behind_bytes",
        "_behind_bytes_max",
        "_closed",
        "_executor",
        "_idle",
        "_in_flight",
        "_log",
        "_loop",
        "_metrics",
        "_on_synced",
        "_wanted",
        "_writing_back",
    )

    def __init__(
        self,
        log: Log,
        *,
        executor: Executor,
        metrics: Metrics,
        on_synced: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        behind_bytes_max: int,
    ) -> None:
        self._log = log
        self._executor = executor
        self._metrics = metrics
        self._on_synced = on_synced
        self._loop = loop
        self._idle: asyncio.Future[None] | None = None
        self._in_flight = self._wanted = self._closed = False
        self._behind_bytes = 0
        self._behind_bytes_max = behind_bytes_max
        self._writing_back = False

    def request(self) -> None:
        if self._closed:
            return
        if self._in_flight:
            self._wanted = True
            return
        try:
            flush_job = self._log.flush_begin()
        except OSError:
            self._postponed()
            return
        if flush_job is None:
            return
        self._in_flight = True
        started = perf_counter()

        def run() -> None:
            error: Exception | None = None
            try:
                flush_job.run()
            except Exception as failure:
                error = failure
            with suppress(RuntimeError):  # the event loop is closed, so nothing waits for this sync
                self._loop.call_soon_threadsafe(self._done, flush_job, error, started)

        self._executor.submit(run)

    def appended(self, size: int) -> None:
        """Count appended bytes that no request waits for, and write them back before the disk falls far behind."""
        self._behind_bytes += size
        if self._behind_bytes >= self._behind_bytes_max > 0 and not self._writing_back and not self._closed:
            self._behind_bytes = 0
            self._write_back()

    def _write_back(self) -> None:
        self._writing_back = True
        file = self._log.hold_tail()

        def run() -> None:
            begin_writeback(file.fd)
            with suppress(
                RuntimeError
            ):  # the event loop is closed, and the end of the process closes the file
                self._loop.call_soon_threadsafe(self._written_back, file)

        self._executor.submit(run)

    def _written_back(self, file: SharedFile) -> None:
        self._writing_back = False
        file.drop()

    def _postponed(self) -> None:
        """Free some file descriptors and retry later; requests that wait for this sync keep waiting."""
        logger.warning("sync postponed: too many open files", extra={"log": str(self._log.directory)})
        self._log.files.close_idle()
        self._loop.call_later(_POSTPONED_S, self.request)

    async def close(self) -> None:
        """Start no more syncs, and wait for the one in flight: its files are about to be closed or moved."""
        self._closed = True
        if self._in_flight:
            self._idle = self._loop.create_future()
            await self._idle

    def _done(self, flush_job: FlushJob, error: Exception | None, started: float) -> None:
        if error is not None:
            end_process(error)
            return
        self._metrics.flushes.observe(perf_counter() - started)
        self._in_flight = False
        try:
            self._log.flush_done(flush_job)
            if flush_job.postponed:
                self._postponed()
        finally:
            # Even after an error: the task that waits in `close` holds up all other changes of this node's partitions.
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
        if self._wanted:
            self._wanted = False
            self.request()
        self._on_synced()
