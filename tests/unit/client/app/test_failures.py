"""Dead letters and retries: what they say about their message."""

from random import Random
from typing import Any

import pytest
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.failures import Backoff, FailurePolicy
from penstock.client.app.message import message_id_of
from penstock.client.deadletters.headers import MESSAGE_ID


@pytest.mark.parametrize("headers", [[], [(MESSAGE_ID, b"m-1")], [(MESSAGE_ID, b"")]])
def test_a_message_has_the_same_id_in_all_its_letters(headers: list[Any]) -> None:
    """Also a message that was published without an id: else a dedupe store would not recognise its retry."""
    failing = FailurePolicy(
        group="g",
        handler="bill",
        backoff=Backoff(base="1s", attempts=3),
        partitions={},
        now_ms=lambda: 0,
        chance=Random(1),
    )
    raw = RawMessage(7, partition=1, headers=headers)
    letters = [failing.failure_record(raw, ValueError("no")), failing.following_record(raw, 1)]
    again = failing.failure_record(
        RawMessage(topic="orders.retry.1", partition=1, headers=letters[0].headers), ValueError("no")
    )
    for letter in (*letters, again):
        assert message_id_of(
            RawMessage(99, topic=letter.topic, partition=1, headers=letter.headers)
        ) == message_id_of(raw)
