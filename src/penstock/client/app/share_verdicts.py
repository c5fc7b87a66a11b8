"""What becomes of a message of a share group: done, to be tried again by whoever gets it, or given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from penstock.client.app.failing import Reject, Retry
from penstock.client.app.figures import Figures
from penstock.client.app.handling import Call, Unreadable
from penstock.client.app.letterbox import Letterbox
from penstock.client.app.share_failures import Told, delay_of, told_of
from penstock.client.app.share_member import ACCEPT, REJECT, RELEASE
from penstock.client.app.share_pool import Job
from penstock.client.errors import ClientError

__all__ = ["Verdicts", "judging", "judging_async"]

_LOG: Final = logging.getLogger("penstock.client")


class Verdicts:
    """Threads of handlers share it. With a `letterbox` nothing is tried again: failures are letters."""

    def __init__(
        self,
        figures: Figures,
        deliveries_max: int,
        letterbox: Letterbox | None,
        *,
        tries_again: bool,
        tells: bool,
    ) -> None:
        """`tells`: brokers take delays and errors of single messages."""
        self._figures = figures
        self._deliveries_max = deliveries_max
        self._letterbox = letterbox
        self._tries_again = tries_again
        self._tells = tells

    def is_overdue(self, job: Job) -> bool:
        """Whoever gets it next must not find us at work on it."""
        if time.monotonic() < job.deadline_s:
            return False
        if not self._figures.overdue:
            _LOG.warning(
                "messages are given back untried: handlers need longer for all that are taken at once than their "
                "lock lasts; a lower taken_max= or a longer lock= helps"
            )
        self._figures.add("overdue")
        return True

    def done(self) -> int:
        self._figures.add("handled")
        return ACCEPT

    def failed(self, raw: Any, error: Exception) -> int:
        if not self._tries_again:
            return self._given_up(raw, error)
        place = f"{raw.topic()}[{raw.partition()}]@{raw.offset()}"
        count = raw.delivery_count() or 1
        is_last = self._is_last(raw, error)
        words = "is given up" if is_last else "is to be tried again"
        _LOG.warning("%s %s, delivery %d: %s: %s", place, words, count, type(error).__name__, error)
        if isinstance(error, Retry) and error.delay is not None and not self._tells:
            _LOG.warning(
                "%s rests as long as its group says: these brokers know no delay= of one message", place
            )
        self._figures.add("dead" if is_last else "retried")
        return REJECT if isinstance(error, (Reject, Unreadable)) else RELEASE

    def told(self, raw: Any, error: Exception) -> Told | None:
        """What brokers are to know of the failure: a delay of its own, or the error of what is given up."""
        if not self._tries_again or not self._tells:
            return None
        if self._is_last(raw, error):
            return told_of(error)
        if isinstance(error, Retry) and error.delay is not None:
            try:
                return Told(delay_ms=delay_of(error.delay))
            except ClientError as flaw:
                _LOG.warning("the message rests as long as its group says: %s", flaw)
        return None

    def _is_last(self, raw: Any, error: Exception) -> bool:
        return isinstance(error, (Reject, Unreadable)) or (raw.delivery_count() or 1) >= self._deliveries_max

    def _given_up(self, raw: Any, error: Exception) -> int:
        if self._letterbox is None:
            _LOG.warning("%s[%d]@%d failed: %s", raw.topic(), raw.partition(), raw.offset(), error)
            self._figures.add("dropped")
            return RELEASE
        try:
            self._letterbox.failed(raw, error)
        except ClientError as flaw:
            _LOG.error("a dead letter is lost: %s", flaw)
            self._figures.add("dropped")
        return ACCEPT


def judging(call: Call, verdicts: Verdicts) -> Callable[[Job], int]:
    def judge(job: Job) -> int:
        if verdicts.is_overdue(job):
            return RELEASE
        try:
            call(job.raw)
        except Exception as error:
            job.told = verdicts.told(job.raw, error)
            return verdicts.failed(job.raw, error)
        return verdicts.done()

    return judge


def judging_async(call: Call, verdicts: Verdicts) -> Callable[[Job], Awaitable[int]]:
    import asyncio

    async def judge(job: Job) -> int:
        if verdicts.is_overdue(job):
            return RELEASE
        try:
            await call(job.raw)
        except Exception as error:
            job.told = verdicts.told(job.raw, error)
            # A letter may have to be waited for, by this one only.
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, verdicts.failed, job.raw, error)
        return verdicts.done()

    return judge
