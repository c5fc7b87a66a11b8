"""Letters on their way: published, and waited for before the position of what failed is committed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from penstock.client.app.failing import Failing, Letter
from penstock.client.app.figures import Figures
from penstock.client.app.publishing import NotPublished, Published
from penstock.client.letters import dead_letter_topic, original_topic
from penstock.protocol.letters import WITHOUT_RECORD

__all__ = ["Letterbox"]

_LOG: Final = logging.getLogger("penstock.client")
_WAIT_S: Final = 300.0

#: Publishes a letter.
Post = Callable[[Letter], "Future[Published]"]


class Letterbox:
    """Takes failures from any thread. `waits` where each is to be there before the next message is handled.

    `gives_up` where nothing is tried again, as at-most-once has it: a letter that cannot be published is dropped, and
    counted.
    """

    def __init__(
        self,
        failing: Failing,
        post: Post,
        figures: Figures,
        *,
        waits: bool,
        gives_up: bool = False,
        await_published: Callable[[Future[Published], float], Published] = Future.result,
    ) -> None:
        self._failing = failing
        self._post = post
        self._figures = figures
        self._waits = waits
        self._gives_up = gives_up
        self._await_published = await_published
        self._lock = threading.Lock()
        #: A rebalance may settle letters in one thread while another does: each is awaited by one of them.
        self._settling = threading.Lock()
        self._on_their_way: list[tuple[Letter, Future[Published]]] = []

    def failed(self, raw: Any, error: Exception) -> Letter:
        letter = self._failing.letter(raw, error)
        words = "is a dead letter" if letter.is_dead else f"goes to {letter.topic}"
        place = f"{raw.topic()}[{raw.partition()}]@{raw.offset()}"
        _LOG.warning("%s %s: %s: %s", place, words, type(error).__name__, error)
        self._count(letter)
        self.send(letter)
        return letter

    def _count(self, letter: Letter) -> None:
        with self._lock:
            if letter.is_dead:
                self._figures.dead += 1
            else:
                self._figures.retried += 1

    def send(self, letter: Letter) -> None:
        """Raises NotPublished where it waits."""
        try:
            future = self._post(letter)
        except NotPublished as error:
            self._send_less(letter, error)
            return
        if self._waits:
            self._await(letter, future)
            return
        with self._lock:
            self._on_their_way.append((letter, future))

    def settle(self) -> None:
        """All are there. Raises NotPublished, and does so again until another box is used."""
        with self._settling:
            with self._lock:
                waiting = list(self._on_their_way)
            for letter, future in waiting:
                self._await(letter, future)
            with self._lock:
                del self._on_their_way[: len(waiting)]

    def _await(self, letter: Letter, future: Future[Published]) -> None:
        try:
            self._await_published(future, _WAIT_S)
        except NotPublished as error:
            self._send_less(letter, error)
        except TimeoutError:
            self._not_published(letter, NotPublished(f"{letter.topic}: nobody answers", may_be_there=True))

    def _send_less(self, letter: Letter, error: NotPublished) -> None:
        """What is too large for one topic may fit another one; else its headers tell where it is."""
        less = _less(letter, error) if error.too_large else None
        if less is None:
            self._not_published(letter, error)
            return
        _LOG.warning("%s; it goes to %s instead", error, less.topic)
        try:
            self._await(less, self._post(less))
        except NotPublished as again:
            self._send_less(less, again)

    def _not_published(self, letter: Letter, error: NotPublished) -> None:
        if not self._gives_up:
            raise error
        with self._lock:
            self._figures.dropped += 1
        _LOG.warning("%s; the message is dropped", error)


def _less(letter: Letter, error: NotPublished) -> Letter | None:
    """A dead letter in place of a retry, and one without its record in place of that. Better than to stop for ever."""
    if not letter.is_dead:
        return letter._replace(topic=dead_letter_topic(original_topic(letter.topic)), is_dead=True)
    if letter.value is None:
        return None
    return letter._replace(value=None, headers=[*letter.headers, (WITHOUT_RECORD, str(error).encode())])
