"""At most once: a message whose partition is lost before the commit is not handled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.client.app.raw_message import Place, RawMessage

from penstock.client.app.contracts import AtMostOnce, ContractSession
from penstock.client.app.figures import Figures
from penstock.client.app.membership import CommitLost, CommitRefused


class Membership:
    """`reached` is where the library stands: behind everything that was taken."""

    def __init__(
        self, reached: dict[int, int], error: Exception | None = None, taken: Sequence[RawMessage] = ()
    ) -> None:
        self.taken = list(taken)
        self._reached = {("orders", partition): at for partition, at in reached.items()}
        self._error = error
        self.events: list[Any] = []
        self.done: dict[int, int] = {}
        self.committed: dict[int, int] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def positions(self, pending: Sequence[RawMessage] = ()) -> dict[Place, int]:
        found = dict(self._reached)
        for raw in pending:
            place = "orders", raw.partition()
            found[place] = min(found.get(place, raw.offset()), raw.offset())
        return found

    def commit(
        self, positions: Mapping[Place, int], *, wait: bool, done: Mapping[Place, int] | None = None
    ) -> None:
        assert wait
        self.committed = {partition: at for (_, partition), at in positions.items()}
        self.done = {partition: at for (_, partition), at in (done or {}).items()}
        self.events.append("commit")
        if self._error is not None:
            raise self._error

    def rejoin(self) -> None:
        self.events.append("rejoin")


class Runner:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def check(self) -> None:
        pass

    def pending(self) -> list[RawMessage]:
        return []

    def run(self, batch: Sequence[RawMessage]) -> None:
        self._events.append([raw.at for raw in batch])


class Letters:
    def settle(self) -> None:
        pass


def processed(batch: Sequence[RawMessage], membership: Membership) -> tuple[list[Any], Figures]:
    runner, letters, figures = Runner(membership.events), Letters(), Figures()
    session = ContractSession(runner, letters, figures)  # type: ignore[arg-type]
    session.membership = membership  # type: ignore[assignment]
    # It is always time to note how far it is: that must not commit what is not to be handled.
    AtMostOnce(session, commit_every_s=0.0, unit=3).process(batch)
    return membership.events, figures


BATCH = [RawMessage(5), RawMessage(8, partition=1), RawMessage(6)]


def test_it_is_committed_first() -> None:
    events, _ = processed(BATCH, Membership({0: 7, 1: 9}, taken=BATCH))
    assert events[:2] == ["commit", [(0, 5), (1, 8), (0, 6)]]


def test_a_partition_that_has_gone_takes_its_messages_along() -> None:
    events, _ = processed(BATCH, Membership({1: 9}, taken=[BATCH[1]]))
    assert events[:2] == ["commit", [(1, 8)]]


def test_a_partition_that_went_and_came_back_is_read_again_from_its_position() -> None:
    # Another member has handled up to 6 meanwhile.
    events, _ = processed(BATCH, Membership({0: 6, 1: 9}, taken=[BATCH[1]]))
    assert events[:2] == ["commit", [(1, 8)]]


@pytest.mark.parametrize(("error", "dropped"), [(CommitRefused("no"), 0), (CommitLost("who knows"), 3)])
def test_nothing_is_handled_without_a_known_commit(error: Exception, dropped: int) -> None:
    """Nor may one commit succeed and the next be refused: what is then left to others, they would not be given."""
    events, figures = processed(BATCH, Membership({0: 7, 1: 9}, error, taken=BATCH))
    assert events == ["commit", "rejoin"]
    assert figures.dropped == dropped


def test_what_goes_away_before_it_is_committed_is_for_the_next_owner() -> None:
    """A second thread polls, and a partition is revoked between the taking of a batch and its commit."""
    membership = Membership({0: 7, 1: 9}, taken=BATCH)
    session = ContractSession(Runner(membership.events), Letters(), Figures())  # type: ignore[arg-type]
    session.membership = membership  # type: ignore[assignment]
    AtMostOnce(session).revoked([("orders", 0)])
    assert membership.committed == {0: 5, 1: 8}


def test_a_letter_is_there_before_its_message_is_noted_as_handled() -> None:
    membership = Membership({0: 7, 1: 9}, taken=BATCH)

    class Slow(Letters):
        def settle(self) -> None:
            membership.events.append("letters")

    session = ContractSession(Runner(membership.events), Slow(), Figures())  # type: ignore[arg-type]
    session.membership = membership  # type: ignore[assignment]
    AtMostOnce(session, commit_every_s=0.0, unit=3).process(BATCH)
    batch = [raw.at for raw in BATCH]
    assert membership.events[:5] == ["letters", "commit", batch, "letters", "commit"]


def test_how_far_it_is_handled_is_noted_on_the_way() -> None:
    membership = Membership({0: 7, 1: 9}, taken=BATCH)
    noted: list[Any] = []

    class Watching(Runner):
        def run(self, batch: Sequence[RawMessage]) -> None:
            noted.append(membership.done)
            super().run(batch)

    session = ContractSession(Watching(membership.events), Letters(), Figures())  # type: ignore[arg-type]
    session.membership = membership  # type: ignore[assignment]
    contract = AtMostOnce(session, commit_every_s=0.0)
    contract.process(BATCH)
    # Before each message: nothing, then one of partition 0, then all of partition 1 too.
    assert noted == [{0: 5, 1: 8}, {0: 6, 1: 8}, {0: 6, 1: 9}]
    assert membership.done == {0: 7, 1: 9}
