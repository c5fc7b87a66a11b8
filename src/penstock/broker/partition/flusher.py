"""Grouped fsync: one sync in flight per partition, and everything appended meanwhile shares the next."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Final

from penstock.broker.metrics import Metrics
from penstock.log.writeback import begin_writeback

if TYPE_CHECKING:
    from penstock.log.flush import FlushTicket
    from penstock.log.log import Log
    from penstock.log.tail import SharedFile

logger = logging.getLogger("penstock.flush")

#: When a sync that found no descriptors is tried again.
_POSTPONED_S: Final = 0.1


def end_process(error: Exception, what: str = "fsync failed") -> None:
    """After a failed fsync the page cache may lie about what is on disk, so nothing we say could be trusted."""
    logger.critical(f"{what}; ending the process so that nothing unsafe is acknowledged", exc_info=error)
    logging.shutdown()
    os._exit(1)


class Flusher:
    """Syncs one log on request; `on_synced` is called on the loop when `log.synced` has moved."""

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
            ticket = self._log.flush_begin()
        except OSError:
            self._postponed()
            return
        if ticket is None:
            return
        self._in_flight = True
        started = perf_counter()

        def run() -> None:
            error: Exception | None = None
            try:
                ticket.run()
            except Exception as failure:
                error = failure
            with suppress(RuntimeError):  # the loop has closed: nobody waits for this sync any more
                self._loop.call_soon_threadsafe(self._done, ticket, error, started)

        self._executor.submit(run)

    def appended(self, size: int) -> None:
        """Nobody waits for a sync: only see to it that the disk does not fall far behind."""
        self._behind_bytes += size
        if self._behind_bytes >= self._behind_bytes_max > 0 and not self._writing_back and not self._closed:
            self._behind_bytes = 0
            self._write_back()

    def _write_back(self) -> None:
        self._writing_back = True
        file = self._log.hold_tail()

        def run() -> None:
            begin_writeback(file.fd)
            with suppress(RuntimeError):  # the loop has closed, and the process lets go of the file
                self._loop.call_soon_threadsafe(self._written_back, file)

        self._executor.submit(run)

    def _written_back(self, file: SharedFile) -> None:
        self._writing_back = False
        file.drop()

    def _postponed(self) -> None:
        """Out of descriptors: some are freed, and whoever waits for this sync goes on waiting."""
        logger.warning("sync postponed: too many open files", extra={"log": str(self._log.directory)})
        self._log.files.close_idle()
        self._loop.call_later(_POSTPONED_S, self.request)

    async def close(self) -> None:
        """Begin no more, and wait for the one under way: its files are about to be closed or moved."""
        self._closed = True
        if self._in_flight:
            self._idle = self._loop.create_future()
            await self._idle

    def _done(self, ticket: FlushTicket, error: Exception | None, started: float) -> None:
        if error is not None:
            end_process(error)
            return
        self._metrics.flushes.observe(perf_counter() - started)
        self._in_flight = False
        try:
            self._log.flush_done(ticket)
            if ticket.postponed:
                self._postponed()
        finally:
            # Who closes the partition holds up all other changes of this node's partitions.
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
        if self._wanted:
            self._wanted = False
            self.request()
        self._on_synced()
