"""Staying in a group while work is slow: a second thread that polls whenever the first is busy for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.client.app.settings import Settings

__all__ = ["Keeper"]

#: A busy member polls so often at least, as a part of max.poll.interval.ms.
_KEEP_PART: Final = 4
#: Others wait for a busy member when partitions move, and it learns late that it has lost some.
_KEEP_S_MAX: Final = 3.0
_POLL_INTERVAL_MS: Final = 300_000


class Keeper:
    def __init__(self, settings: Settings, poll: Callable[[], None]) -> None:
        interval_ms = int(settings.get("max.poll.interval.ms", _POLL_INTERVAL_MS))
        self._every_s = min(interval_ms / 1000 / _KEEP_PART, _KEEP_S_MAX)
        self._poll = poll
        self._busy_since: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-keeper", daemon=True)
        self._thread.start()

    def busy(self) -> None:
        """From now on, until it is told otherwise."""
        self._busy_since = time.monotonic()

    def idle(self) -> None:
        self._busy_since = None

    def end(self) -> None:
        """Without waiting: whoever ends it may hold what the thread wants."""
        self._closing.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s / 2):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._every_s:
                self._poll()
