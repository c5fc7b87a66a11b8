"""Applications whose only broker is killed and restarted continue, and keep their contract."""

import json
import time

import pytest
from tests.application.apps import QUICK, read_all
from tests.brokers import BrokerProcess
from tests.waiting import eventually

from penstock.client import Penstock

COUNT = 60
#: The client library has given up the broker by then, and forgotten it.
ABSENCE_S = 2.0


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_it_goes_on_when_the_broker_is_back(
    fresh_broker: BrokerProcess, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Penstock(fresh_broker.bootstrap_servers, settings=QUICK)
    app.create_topic("orders", partitions=1)
    app.create_topic("invoices", partitions=1)
    handled: list[int] = []

    @app.subscribe("orders", group="billing", delivery=delivery, to="invoices")
    def bill(order: dict[str, int]) -> dict[str, int]:
        handled.append(order["id"])
        if handled.count(COUNT) == 1 and order["id"] == COUNT:
            fresh_broker.kill()  # what was handled before is committed, what is in hand is not
        return order

    def publish(first: int) -> None:
        """Messages that the broker had not confirmed when it was killed are sent again when it is back."""
        for number in range(first, first + COUNT):
            app.publish_soon("orders", {"id": number})

    publish(0)
    app.start()
    try:
        eventually(lambda: len(handled) >= COUNT, what="orders before the crash")
        publish(COUNT)
        eventually(lambda: "Connection refused" in caplog.text, what="an absence that is noticed")
        time.sleep(ABSENCE_S)
        fresh_broker.start()
        publish(2 * COUNT)
        eventually(lambda: set(handled) == set(range(3 * COUNT)), what="orders after it")
    finally:
        app.close()
    found = [json.loads(each.value())["id"] for each in read_all(fresh_broker.bootstrap_servers, "invoices")]
    assert set(found) == set(range(3 * COUNT))
    if delivery == "exactly-once":
        assert len(found) == 3 * COUNT
