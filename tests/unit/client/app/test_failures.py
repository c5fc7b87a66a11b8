"""Letters: what they tell of the message that they are about."""

from random import Random
from typing import Any

import pytest

from penstock.client.app.failures import Backoff, FailurePolicy
from penstock.client.app.message import message_id_of
from penstock.client.deadletters.headers import MESSAGE_ID


class Raw:
    def __init__(self, topic: str, offset: int, headers: list[Any]) -> None:
        self._told = topic, offset, headers

    def topic(self) -> str:
        return self._told[0]

    def partition(self) -> int:
        return 1

    def offset(self) -> int:
        return self._told[1]

    def headers(self) -> list[Any]:
        return self._told[2]

    def key(self) -> bytes | None:
        return None

    value = key

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


@pytest.mark.parametrize("headers", [[], [(MESSAGE_ID, b"m-1")], [(MESSAGE_ID, b"")]])
def test_a_message_has_the_same_id_in_all_its_letters(headers: list[Any]) -> None:
    """Also one that was published without any: else a dedupe store would not know its second letter."""
    failing = FailurePolicy(
        group="g",
        handler="bill",
        backoff=Backoff(base="1s", attempts=3),
        partitions={},
        now_ms=lambda: 0,
        chance=Random(1),
    )
    raw = Raw("orders", 7, headers)
    letters = [failing.letter(raw, ValueError("no")), failing.follower(raw, 1)]
    again = failing.letter(Raw("orders.retry.1", 0, letters[0].headers), ValueError("no"))
    for letter in (*letters, again):
        assert message_id_of(Raw(letter.topic, 99, letter.headers)) == message_id_of(raw)
