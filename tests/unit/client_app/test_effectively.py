"""Which of the messages that come are known by their ids, while others are still in hand."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from penstock.client.app.contracts import Session
from penstock.client.app.effectively import EffectivelyOnce, Marks
from penstock.client.app.figures import Figures
from penstock.client.letters import MESSAGE_ID
from penstock.protocol.letters import DELIVERY_COUNT


class Raw:
    def __init__(self, message_id: str, attempts: int = 0) -> None:
        self.name = message_id, attempts

    def headers(self) -> list[tuple[str, bytes]]:
        message_id, attempts = self.name
        told = [(MESSAGE_ID, message_id.encode())]
        return [*told, (DELIVERY_COUNT, b"%d" % attempts)] if attempts else told


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
    session = Session(runner, None, Figures())  # type: ignore[arg-type]
    session.membership = SimpleNamespace(taken=list(batch))  # type: ignore[assignment]
    EffectivelyOnce(session, 3600.0, Marks(store, "g", 60.0), claims=False).process(batch)
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
