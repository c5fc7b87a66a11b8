"""Parcels of the demo: packed once, retried, dead-lettered while the route is closed, replayed when it is open."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from tests.brokers import BrokerProcess
from tests.waiting import eventually

from penstock.client import Penstock
from penstock.demo.access import BrokerAccess
from penstock.demo.component import Component
from penstock.demo.launcher import RoadRepair
from penstock.demo.names import ORDERS, PARCEL_DEAD_LETTERS, PARCELS, PARCELS_REPLAYED, retried_topic
from penstock.demo.scene import EventLog, TopicCounter
from penstock.demo.subscribers import (
    DISTRICTS,
    CarrierBusy,
    Parcel,
    RoadClosed,
    Roads,
    Shipping,
    deliver,
    pack_order,
)

ORDERS_MADE = 400


def order(number: int) -> bytes:
    return json.dumps({"id": f"o-{number}", "customer": "c-1"}).encode()


def fate(parcel: Parcel, roads: Roads, attempt: int = 1) -> str:
    try:
        deliver(parcel, attempt=attempt, roads=roads)
    except (CarrierBusy, RoadClosed) as error:
        return type(error).__name__
    return "delivered"


def parcels() -> list[Parcel]:
    return [parcel for number in range(ORDERS_MADE) if (parcel := pack_order(order(number))) is not None]


# The rules


def test_every_order_makes_a_parcel_and_nothing_else_does() -> None:
    assert len(parcels()) == ORDERS_MADE
    assert [pack_order(each) for each in (None, b"", b"{", b"[1]", b'{"id": 1}', b'"\xfc"')] == [None] * 6


def test_most_parcels_are_delivered_and_every_trouble_is_among_them() -> None:
    fates = Counter(fate(parcel, Roads()) for parcel in parcels())
    assert fates["delivered"] > 0.9 * ORDERS_MADE
    assert min(fates["CarrierBusy"], fates["RoadClosed"]) >= 5


def test_a_busy_carrier_has_time_later_and_a_closed_road_stays_closed() -> None:
    roads = Roads()
    again = {fate(parcel, roads, 2) for parcel in parcels() if fate(parcel, roads) == "CarrierBusy"}
    assert again == {"delivered"}
    closed = [parcel for parcel in parcels() if fate(parcel, roads) == "RoadClosed"]
    assert {fate(parcel, roads, 3) for parcel in closed} == {"RoadClosed"}
    assert roads.open() == closed[0].district
    assert {fate(parcel, roads, 2) for parcel in closed} == {"delivered"}


def test_another_road_is_closed_then_and_in_the_end_each_has_been() -> None:
    roads = Roads()
    assert [roads.open() for _ in range(DISTRICTS)] == list(range(DISTRICTS))
    assert roads.is_closed(0)


# On a broker


@pytest.fixture
def parts(fresh_broker: BrokerProcess) -> Iterator[list[Component]]:
    bootstrap, roads = fresh_broker.bootstrap_servers, Roads()
    with Penstock(bootstrap) as app:
        for topic in (ORDERS, PARCELS):
            app.create_topic(topic, partitions=2)
    access = BrokerAccess(bootstrap=bootstrap)
    tally, shipping = TopicCounter(access), Shipping(access, roads)
    found = [tally, shipping, RoadRepair(access, tally, roads, EventLog(), pause_s=0.0)]
    for part in found:
        part.start()
    yield found
    for part in found:
        part.stop()
    assert all(part.join(20) for part in found)


def test_all_of_it_is_seen_to_happen(parts: list[Component], fresh_broker: BrokerProcess) -> None:
    tally, shipping, _ = parts
    assert isinstance(tally, TopicCounter)
    assert isinstance(shipping, Shipping)
    producer = Producer({"bootstrap.servers": fresh_broker.bootstrap_servers})
    for number in range(ORDERS_MADE):
        producer.produce(ORDERS, order(number), key=str(number))
    producer.flush()

    eventually(lambda: tally.records[PARCELS_REPLAYED], what="parcels that were sent again")
    eventually(lambda: shipping.handled == ORDERS_MADE, what="every parcel delivered in the end")
    assert tally.records[PARCELS] == ORDERS_MADE
    assert tally.errors["RoadClosed"] == tally.records[PARCEL_DEAD_LETTERS]
    assert tally.errors["CarrierBusy"] == 0
    assert any(retried_topic(topic) == PARCELS for topic in tally.records)
    assert [part.trouble for part in parts] == [None] * 3
