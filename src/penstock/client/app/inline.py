"""Handlers called one message after the other, in the thread that reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from penstock.client.app.figures import Figures
from penstock.client.app.guarding import Stopped
from penstock.client.app.handling import Chunk, Hand, Loop, Unreadable
from penstock.client.app.places import Place
from penstock.client.tracing import take_in_hand

__all__ = ["Failed", "Inline", "InlineBatches", "Runner"]

#: Whatever is taken at once: it is handled before more is taken.
_PLENTY: Final = 1 << 31
#: Takes a message that failed, and why.
Failed = Callable[[Any, Exception], None]


def nobody_waits() -> None:
    """For whoever need not know that a batch has arrived."""


class Runner(Protocol):
    """Does the work. Messages of one key are handled in their order."""

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = ...) -> None:
        """Handle them, or see to it that they are handled; `arrived` is called once they are known to be pending."""

    def check(self) -> None:
        """Raises what made it impossible to go on, and what a handler raised to end the application."""

    def pending(self) -> list[Any]:
        """Taken and not handled yet."""

    def begun(self) -> list[Any]:
        """With the handlers now."""

    def trim(self) -> list[Any]:
        """Taken back without a gap: nothing that comes later in its partition was begun."""

    def interrupt(
        self, timeout_s: float, places: Sequence[Place] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Begin nothing more (of these partitions): what was not begun, and what is still in hand after that time."""

    def drain(self) -> None:
        """Return when nothing is pending, but what was left because the application ends. Raises what hinders it."""

    def forget(self) -> None:
        """What could not be handled is read again."""

    @property
    def room(self) -> int:
        """How many more it should get at most."""

    def await_room(self, timeout_s: float) -> int:
        """Until half of what it may hold is done, or for so long."""

    def close(self) -> None: ...


class _Sequential:
    """What both kinds share: at most one batch, whose rest another thread may take away."""

    def __init__(self) -> None:
        self._rest: Iterator[Any] = iter(())
        self._idle = threading.Event()
        self._idle.set()
        self._batch: Sequence[Any] = ()
        self._taken_away = 0
        self._left: list[Any] = []

    def run(self, batch: Sequence[Any], arrived: Callable[[], None] = nobody_waits) -> None:
        self._idle.clear()
        self._batch, self._taken_away = batch, 0
        self._rest = iter(batch)
        arrived()
        try:
            self._handle(self._rest)
        except BaseException:
            # Neither handled nor a letter: its position must not be committed on the way out.
            self._leave(self._in_hand())
            raise
        finally:
            self._batch = ()
            self._idle.set()

    def _handle(self, rest: Iterator[Any]) -> None:
        raise NotImplementedError

    def _in_hand(self) -> list[Any]:
        """What was begun and has not ended, and will not."""
        raise NotImplementedError

    def _leave(self, raws: list[Any]) -> None:
        """The application ends before these were tried."""
        self._left.extend(raws)

    def check(self) -> None:
        """What hinders it is raised by `run`."""

    def pending(self) -> list[Any]:
        return list(self._left)

    def begun(self) -> list[Any]:
        return [] if self._idle.is_set() else self._at_work()

    def _at_work(self) -> list[Any]:
        """With the handler; another thread asks."""
        raise NotImplementedError

    def trim(self) -> list[Any]:
        rest = list(self._rest)
        self._taken_away += len(rest)
        return rest

    def interrupt(
        self, timeout_s: float, places: Sequence[Place] | None = None
    ) -> tuple[list[Any], list[Any]]:
        batch = self._batch
        rest = self.trim()
        if self._idle.wait(timeout_s):
            return rest, []
        begun = len(batch) - len(rest)
        return rest, list(batch[begun - 1 : begun])

    def drain(self) -> None:
        pass

    def forget(self) -> None:
        self._left.clear()

    @property
    def room(self) -> int:
        return _PLENTY

    def await_room(self, timeout_s: float) -> int:
        return self.room

    def close(self) -> None:
        pass


class Inline(_Sequential):
    def __init__(self, loop: Loop, failed: Failed, figures: Figures) -> None:
        super().__init__()
        self._loop = loop
        self._failed = failed
        self._figures = figures
        self._hand = Hand()

    def _handle(self, rest: Iterator[Any]) -> None:
        hand, failures, count = self._hand, 0, len(self._batch)
        hand.left_out = 0
        take_in_hand(hand)
        while not self._is_through(rest):
            failures += 1
        hand.raw = None
        self._figures.handled += count - self._taken_away - len(self._left) - failures - hand.left_out

    def _is_through(self, rest: Iterator[Any]) -> bool:
        """Or one has failed, and the others are still to come."""
        hand = self._hand
        try:
            self._loop(rest, hand)
        except Stopped:
            self._leave([hand.raw, *rest])
        except Exception as error:
            self._failed(hand.raw, error)
            return False
        return True

    def _in_hand(self) -> list[Any]:
        raw, self._hand.raw = self._hand.raw, None
        return [] if raw is None else [raw]

    def _at_work(self) -> list[Any]:
        raw = self._hand.raw
        return [] if raw is None else [raw]


class InlineBatches(_Sequential):
    """Lists of messages to the handler; where one of them fails, it is looked for by halves.

    Where no message may be handled twice (`isolates` is false), all of the list fail together.
    """

    def __init__(
        self,
        call: Callable[[Chunk], Any],
        decode: Callable[[Any], Any],
        failed: Failed,
        figures: Figures,
        *,
        count_max: int,
        isolates: bool,
    ) -> None:
        super().__init__()
        self._call = call
        self._decode = decode
        self._failed = failed
        self._figures = figures
        self._count_max = count_max
        self._isolates = isolates
        self._chunk: list[Any] = []

    def _handle(self, rest: Iterator[Any]) -> None:
        while chunk := list(islice(rest, self._count_max)):
            self._chunk = chunk
            self._call_with(self._readable(chunk))
        self._chunk = []

    def _in_hand(self) -> list[Any]:
        return list(self._chunk)

    _at_work = _in_hand

    def _readable(self, chunk: Sequence[Any]) -> list[tuple[Any, Any]]:
        good = []
        for raw in chunk:
            try:
                good.append((raw, self._decode(raw)))
            except Unreadable as error:
                self._failed(raw, error)
        return good

    def _call_with(self, pairs: Chunk) -> None:
        if not pairs:
            return
        try:
            self._call(pairs)
        except Stopped:
            self._leave([raw for raw, _ in pairs])
        except Exception as error:
            if len(pairs) == 1 or not self._isolates:
                for raw, _ in pairs:
                    self._failed(raw, error)
                return
            middle = len(pairs) // 2
            self._call_with(pairs[:middle])
            self._call_with(pairs[middle:])
        else:
            self._figures.handled += len(pairs)
