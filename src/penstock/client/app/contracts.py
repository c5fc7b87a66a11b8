"""The contracts: in which order a batch is handled and its positions are committed.

at-least-once     handle, letters are there, commit
at-most-once      commit and know it, handle
effectively-once  leave out what is marked, handle, mark, commit; or result and mark in one database transaction
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock.client.app.committing import CommitLost, CommitRefused
from penstock.client.app.figures import Figures
from penstock.client.app.inline import Runner
from penstock.client.app.letterbox import Letterbox
from penstock.client.app.membership import Membership
from penstock.client.app.places import Place, place_of
from penstock.client.errors import ClientError

__all__ = ["AtLeastOnce", "AtMostOnce", "Contract", "Session", "committed_first", "note_unfinished"]

_LOG: Final = logging.getLogger("penstock.client")
#: How long a rebalance waits for what is in hand.
HAND_OVER_S: Final = 30.0
_STRETCH_MAX: Final = 1 << 20


class Session:
    """What a contract works with while its subscription is a member."""

    __slots__ = ("figures", "letterbox", "membership", "runner")

    def __init__(self, runner: Runner, letterbox: Letterbox, figures: Figures) -> None:
        self.membership: Membership = None  # type: ignore[assignment]  # joins once the contract is there
        self.runner = runner
        self.letterbox = letterbox
        self.figures = figures


class Contract(Protocol):
    """Called by the thread that takes messages, except for the callbacks of rebalances."""

    def process(self, batch: Sequence[Any]) -> None: ...

    def tick(self) -> None:
        """Between batches, also where there are none."""

    def stop(self) -> None:
        """From another thread: begin nothing more than the contract asks for."""

    def finish(self) -> None:
        """Before leaving: everything in hand is done and committed."""

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]: ...

    def revoked(self, places: Sequence[Place]) -> None: ...

    def lost(self, places: Sequence[Place]) -> None: ...


class AtLeastOnce:
    """What was handled since the last commit comes again after a crash."""

    def __init__(self, session: Session, commit_every_s: float) -> None:
        self._session = session
        self._commit_every_s = commit_every_s
        self._committed_s = time.monotonic()

    def process(self, batch: Sequence[Any]) -> None:
        self._session.runner.run(batch, self._arrived)
        self.tick()

    def _arrived(self) -> None:
        """From now on the runner tells what of the batch is not handled."""
        self._session.membership.taken = []

    def tick(self) -> None:
        now_s = time.monotonic()
        if now_s - self._committed_s >= self._commit_every_s:
            self._committed_s = now_s
            self._commit(wait=False)

    def _commit(self, *, wait: bool) -> None:
        session = self._session
        session.runner.check()
        # In this order: what is pending now may be done by the time its position would be asked for.
        positions = session.membership.positions(session.runner.pending())
        self._settle()
        session.membership.commit(positions, wait=wait)

    def _settle(self) -> None:
        """What must be durable before positions are committed."""
        self._session.letterbox.settle()

    def stop(self) -> None:
        # Whoever commits meanwhile finds these either with the runner or put back.
        with self._session.membership.held():
            self._session.membership.put_back(self._session.runner.trim())

    def finish(self) -> None:
        rest, _ = self._session.runner.interrupt(HAND_OVER_S)
        self._session.membership.put_back(rest)
        self._session.runner.drain()
        self._commit_if_possible()

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return {}

    def revoked(self, places: Sequence[Place]) -> None:
        rest, in_hand = self._session.runner.interrupt(HAND_OVER_S, places)
        self._session.membership.put_back(rest)
        gone = [raw for raw in in_hand if place_of(raw) in places]
        if gone:
            self._session.figures.lost_in_hand += len(gone)
            _LOG.warning(
                "%d messages were still in hand when their partition went to another member", len(gone)
            )
        self._commit_if_possible(in_hand)

    def _commit_if_possible(self, in_hand: Sequence[Any] = ()) -> None:
        session = self._session
        try:
            # What was taken and did not come to the runner is neither handled nor in hand.
            not_handled = [*session.runner.pending(), *in_hand, *session.membership.taken]
            positions = session.membership.positions(not_handled)
            self._settle()
            session.membership.commit(positions, wait=True)
        except ClientError as error:
            _LOG.warning("%s; what was handled since the last commit comes again", error)

    def lost(self, places: Sequence[Place]) -> None:
        """Whoever has them now began at the last commit."""
        rest, in_hand = self._session.runner.interrupt(0.0)
        self._session.membership.put_back(rest)
        self._session.figures.lost_in_hand += sum(place_of(raw) in places for raw in in_hand)


def note_unfinished(figures: Figures, place: Place, first: int, end: int) -> None:
    """Positions of at-most-once are committed before messages are handled: an earlier member left these open."""
    figures.lost_max += end - first
    _LOG.warning(
        "%s[%d]: up to %d messages, from offset %d on, may be lost: an earlier member has committed them and not "
        "recorded that they were handled",
        *place,
        end - first,
        first,
    )


def committed_first(
    membership: Membership, figures: Figures, count: int, unfinished: Sequence[Any] = ()
) -> bool:
    """Whether what was taken last may be handled: its position is committed, and known to be. Else it is given up.

    `unfinished` are all messages that are not handled yet: what is noted with the position is up to them.
    """
    try:
        membership.commit(membership.positions(), wait=True, done=membership.positions(unfinished))
    except CommitRefused as error:
        # Not committed for certain, so whoever has the partitions now gets these messages for the first time.
        _LOG.warning("%s; %d messages are left to their new owner", error, count)
    except CommitLost as error:
        # The commit may arrive yet. As another member we read on behind it or before it, but it cannot move us.
        figures.dropped += count
        _LOG.warning("%s; %d messages are dropped", error, count)
    else:
        return True
    figures.restarts += 1
    membership.rejoin()
    return False


class AtMostOnce:
    """Nothing is handled before its position is committed, and known to be."""

    def __init__(self, session: Session, commit_every_s: float = 0.1, unit: int = 1) -> None:
        """`unit` is how many messages the handler takes at a time."""
        self._session = session
        self._commit_every_s = commit_every_s
        self._noted_s = time.monotonic()
        self._unit = unit
        #: How many are handled before it is looked whether to note how far we are.
        self._stretch = unit
        self._open: Sequence[Any] = ()

    def process(self, batch: Sequence[Any]) -> None:
        session = self._session
        self._check()
        mine = self._committed(batch)
        while mine:
            stretch, mine = mine[: self._stretch], mine[self._stretch :]
            self._open = [*stretch, *mine]
            self._run(stretch, mine)
            self._open = mine
            self._note()
        session.letterbox.settle()

    def _run(self, stretch: Sequence[Any], rest: Sequence[Any]) -> None:
        session, began_s = self._session, time.monotonic()
        try:
            session.runner.run(stretch)
        except BaseException:
            # What failed, and those behind it.
            session.figures.dropped += 1 + len(session.runner.trim()) + len(rest)
            raise
        is_quick = time.monotonic() - began_s < self._commit_every_s / 4
        longer, shorter = min(self._stretch * 2, _STRETCH_MAX), self._stretch // 2 // self._unit * self._unit
        self._stretch = longer if is_quick else max(shorter, self._unit)

    def _note(self, *, now: bool = False) -> None:
        """Keep how far messages are handled, so that the next member can tell what may be lost if this one dies.

        It waits, as every commit does here: one that is under way for longer could move the group back.
        """
        if not now and time.monotonic() - self._noted_s < self._commit_every_s:
            return
        membership = self._session.membership
        try:
            with membership.held():
                self._commit_done()
        except ClientError as error:
            _LOG.warning("%s; joining again", error)
            self._session.figures.restarts += 1
            membership.rejoin()
        finally:
            self._noted_s = time.monotonic()

    def _commit_done(self) -> None:
        """Commit up to the last batch, without the one that was taken since. Raises ClientError.

        If its partition is revoked before that batch is committed, the next owner must still get it.
        """
        membership = self._session.membership
        taken = membership.taken
        done = membership.positions([*self._session.runner.pending(), *self._open, *taken])
        # After that: a message that failed is handled only when its letter is there.
        self._session.letterbox.settle()
        membership.commit(membership.positions(taken), wait=True, done=done)

    def _committed(self, batch: Sequence[Any]) -> list[Any]:
        """Without what went to another member since it was taken, be it that we have its partition again."""
        membership = self._session.membership
        with membership.held():
            kept = set(map(id, membership.taken))
            mine = [raw for raw in batch if id(raw) in kept]
            unfinished = [*self._session.runner.pending(), *mine]
            self._session.letterbox.settle()
            is_ours = committed_first(membership, self._session.figures, len(mine), unfinished)
            # From here on the batch is committed, dropped, or left to the next owner of its partition.
            membership.taken = []
            self._noted_s = time.monotonic()
            return mine if is_ours else []

    def tick(self) -> None:
        """Raises what made it impossible to go on in a lane."""
        self._check()
        self._note()

    def _check(self) -> None:
        runner = self._session.runner
        try:
            runner.check()
        except Exception:
            raise
        except BaseException:
            # The application ends, and nobody else handles what is in the lanes.
            rest, _ = runner.interrupt(HAND_OVER_S)
            self._session.figures.dropped += len(rest) + len(runner.pending())
            raise

    def stop(self) -> None:
        """What is in hand is committed: nobody else would handle it."""

    def finish(self) -> None:
        self._session.runner.drain()
        self._session.letterbox.settle()
        self._note_last()

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return {}

    def revoked(self, places: Sequence[Place]) -> None:
        """What is in hand was committed before: nobody else gets it, so it is finished here."""
        self._note_last()

    def _note_last(self) -> None:
        with suppress(ClientError):  # then the next member counts more than there were
            self._commit_done()

    def lost(self, places: Sequence[Place]) -> None:
        pass
