"""Effectively once: which messages are known by their ids while others are in progress."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.contracts import ContractSession, EffectivelyOnce, HandledIds
from penstock.client.app.figures import Figures
from penstock.client.deadletters.headers import MESSAGE_ID
from penstock.protocol.dead_letter_headers import DELIVERY_COUNT_HEADER


class Raw(RawMessage):
    def __init__(self, message_id: str, attempts: int = 0, offset: int = 0) -> None:
        self.name = message_id, attempts
        headers = [(MESSAGE_ID, message_id.encode())]
        if attempts:
            headers.append((DELIVERY_COUNT_HEADER, b"%d" % attempts))
        super().__init__(offset, headers=headers)


class Runner:
    def __init__(self, in_hand: Sequence[Raw]) -> None:
        self._in_hand = in_hand
        self.given: list[tuple[str, int]] = []

    def check(self) -> None:
        pass

    def pending(self) -> list[Raw]:
        return list(self._in_hand)

    def run(self, batch: Sequence[Raw], arrived: Callable[[], None]) -> None:
        arrived()
        self.given += [raw.name for raw in batch]


class Store:
    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        return {"marked"} & set(ids)


def handled(*batch: Raw, in_hand: Sequence[Raw] = ()) -> list[tuple[str, int]]:
    runner: Any = Runner(in_hand)
    store: Any = Store()
    session = ContractSession(runner, None, Figures())  # type: ignore[arg-type]
    session.membership = SimpleNamespace(taken=list(batch))  # type: ignore[assignment]
    EffectivelyOnce(session, 3600.0, HandledIds(store, "g", 60.0), claims=False).process(batch)
    given: list[tuple[str, int]] = runner.given
    assert session.figures.duplicates == len(batch) - len(given)
    assert session.membership.taken == []
    return given


def test_what_is_marked_or_in_hand_or_twice_is_left_out() -> None:
    assert handled(Raw("marked"), Raw("a"), Raw("b"), Raw("a"), in_hand=[Raw("b")]) == [("a", 0)]


def test_the_retry_of_a_message_that_has_just_failed_is_no_duplicate_of_it() -> None:
    """Its letter can be read before the lane of the first attempt has noticed that the letter is there."""
    assert handled(Raw("a", 1), in_hand=[Raw("a")]) == [("a", 1)]
    assert handled(Raw("a", 2), in_hand=[Raw("a", 1)]) == [("a", 2)]


def test_an_earlier_attempt_that_comes_again_is_one() -> None:
    assert handled(Raw("a"), in_hand=[Raw("a", 1)]) == []
    assert handled(Raw("a", 1), in_hand=[Raw("a", 1)]) == []


class Kept:
    """A store that keeps what it is told, as one does that outlives the application."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        return self.ids & set(ids)

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        self.ids.update(ids)


def member(store: Kept, *, claims: bool) -> tuple[EffectivelyOnce, Any, Figures]:
    runner: Any = Runner(())
    letters: Any = SimpleNamespace(settle=lambda: None)
    session = ContractSession(runner, letters, Figures())
    session.membership = SimpleNamespace(  # type: ignore[assignment]
        taken=[], positions=lambda pending: {}, commit=lambda positions, wait: None
    )
    return EffectivelyOnce(session, 0.0, HandledIds(store, "g", 60.0), claims=claims), runner, session.figures  # type: ignore[arg-type]


@pytest.mark.parametrize("claims", [False, True])
def test_a_failed_message_that_is_read_again_gets_no_second_letter(claims: bool) -> None:
    """Its member was killed after the letter was there and marked, and before the position was committed."""
    store = Kept()
    first, _, _ = member(store, claims=claims)
    first.failed(Raw("a", offset=7))
    first.tick()
    second, runner, figures = member(store, claims=claims)
    second.process([Raw("a", offset=7), Raw("b", offset=8)])
    assert runner.given == [("b", 0)]
    assert figures.duplicates == 1
    # A dead letter that is replayed is another record of the same id, and is handled.
    second.process([Raw("a", offset=9)])
    assert runner.given[1:] == [("a", 0)]
