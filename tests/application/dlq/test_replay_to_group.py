"""Dead letters of an application are replayed to the group that failed, or to all groups."""

import json
from collections.abc import Callable
from typing import Any

from tests.application.apps import QUICK
from tests.application.dlq.dead_letters import Office
from tests.waiting import eventually

from penstock.client import Backoff, Message, Penstock, Reject


def test_a_message_that_was_mended_is_handled_by_the_group_that_gave_it_up(
    penstock: Callable[..., tuple[str, str]], office: Office, unique: Callable[[str], str]
) -> None:
    topic, billing, shipping = unique("orders"), unique("billing"), unique("shipping")
    app = Penstock(office.bootstrap, settings=QUICK)
    app.create_topic(topic, partitions=2)
    billed: list[tuple[int, int]] = []
    shipped: list[int] = []

    def bill(order: dict[str, Any], message: Message) -> None:
        if order["price"] < 0:
            raise Reject(f"a price of {order['price']}")
        billed.append((order["price"], message.attempt))

    def ship(order: dict[str, Any]) -> None:
        shipped.append(order["price"])

    app.subscribe(topic, group=billing, retry=Backoff(base="10ms", cap="50ms", attempts=2))(bill)
    app.subscribe(topic, group=shipping, retry=Backoff(base="10ms", cap="50ms", attempts=2))(ship)
    app.publish(topic, {"price": -5}, key="ada")
    app.start()
    try:
        eventually(lambda: shipped == [-5] and _dead(office, topic), what="a dead letter")
        [found] = [json.loads(line) for line in penstock("dlq", "list", billing, "--json")[0].splitlines()]
        assert found["error"].endswith("Reject")
        assert found["message"] == "a price of -5"
        assert "bill" in found["handler"]
        place = f"{found['partition']}:{found['offset']}"

        penstock("dlq", "edit", topic, place, "--value", '{"price": 5}')
        assert (
            "1 dead letter of" in penstock("dlq", "replay", topic, "--to", "group", "--handler", "*bill")[1]
        )
        eventually(lambda: billed == [(5, 1)], what="what was replayed to the group")

        app.publish(topic, {"price": -7}, key="ada")
        eventually(lambda: len(_dead(office, topic)) == 3, what="another dead letter")
        penstock("dlq", "replay", topic)
        eventually(lambda: shipped == [-5, -7, -7], what="what was replayed to everybody")
        eventually(lambda: len(_dead(office, topic)) == 4, what="that it has failed again")
    finally:
        app.close()
    # The edited one was for one group only, and what failed again is another letter, which waits.
    assert billed == [(5, 1)]
    states = [json.loads(line)["state"] for line in penstock("dlq", "list", topic, "--json")[0].splitlines()]
    assert sorted(states) == ["edited", "replayed", "replayed", "waiting"]


def _dead(office: Office, topic: str) -> list[Any]:
    return office.read(f"{topic}.dlq")
