"""Metrics of the schedule: held, overdue and released records."""

import urllib.request

from confluent_kafka.admin import AdminClient
from tests.compat import confluent
from tests.compat.message import Message
from tests.waiting import eventually

from penstock.testing import EmbeddedBroker

SETTINGS = {"penstock.schedule.topic.num.partitions": "1", "penstock.http.listen": "127.0.0.1:0"}


def later(value: bytes, delay: bytes) -> Message:
    return Message(value, headers=(("penstock-deliver-after", delay),))


def scraped(broker: EmbeddedBroker) -> dict[str, float]:
    with urllib.request.urlopen(f"{broker.http_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_a_scrape_tells_what_is_held_and_what_was_released() -> None:
    with EmbeddedBroker(settings=SETTINGS) as broker:
        broker.create_topic("jobs", penstock_schedule_enable="true")
        messages = [later(b"soon", b"100"), later(b"next week", b"P1W"), later(b"tomorrow", b"P1D")]
        confluent.publish(broker.bootstrap_servers, "jobs", messages)
        confluent.read(broker.bootstrap_servers, "jobs", 1)
        eventually(lambda: scraped(broker)["penstock_schedule_released_total"] == 1, what="one released")
        found = scraped(broker)
        assert found["penstock_schedule_held"] == 2
        assert found["penstock_schedule_overdue_seconds"] == 0
        assert found["penstock_schedule_waiting_partitions"] == 0
        assert found["penstock_schedule_lateness_seconds_count"] == 1
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.delete_topics(["jobs"])["jobs"].result(20)
        eventually(lambda: scraped(broker)["penstock_schedule_dropped_total"] == 2, what="the rest dropped")
        assert scraped(broker)["penstock_schedule_held"] == 0
