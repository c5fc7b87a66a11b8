"""Millions of held records, a kill and a restart in between: `python -m benchmarks.schedule_campaign`.

Holds records that are due at random times within a minute, all after the restart, and reads them back. Reports what
holding, starting again and releasing cost; fails when one is lost, comes twice or comes early.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess
from tests.ports import free_port

from benchmarks.reports.results_file import add_json_argument, run_facts, write_results


class Broker(BrokerProcess):
    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._http = f"localhost:{free_port()}"
        super().__init__(folder / "data", log=folder / "log")
        # Without the settings of tests, which would cost CPU time.
        self.settings = {**settings, "penstock.http.listen": self._http}

    def timed_start(self) -> float:
        """Returns how long it took until clients could connect."""
        started = time.monotonic()
        self.start()
        return time.monotonic() - started

    def memory_mb(self) -> tuple[float, float]:
        """Now, and at most."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        values = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status))
        return int(values["VmRSS"]) / 1024, int(values["VmHWM"]) / 1024

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://{self._http}/metrics").read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        facts = run_facts("schedule", Path(folder), rounds=1)
        report = _run(options, Path(folder))
    print(json.dumps(report, indent=2))
    if options.json is not None:
        write_results(options.json, {**facts, "results": [{"name": "schedule", **report}]})
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--hold-s", type=int, default=420, help="from the start until the first is due")
    parser.add_argument("--spread-s", type=int, default=60)
    parser.add_argument("--folder", default=None)
    add_json_argument(parser)
    return parser.parse_args()


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = {"penstock.schedule.topic.num.partitions": "4", "penstock.flush": "interval"}
    broker = Broker(folder, settings)
    report: dict[str, Any] = {"records": options.records, "start_s": broker.timed_start()}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    topic = NewTopic("jobs", options.partitions, 1, config={"penstock.schedule.enable": "true"})
    admin.create_topics([topic])["jobs"].result(30)
    report["rss_empty_mb"] = broker.memory_mb()[0]
    first_due_ms = time.time_ns() // 1_000_000 + options.hold_s * 1000
    started = time.monotonic()
    _produce(broker.bootstrap_servers, options, first_due_ms)
    report["produce_s"] = time.monotonic() - started
    while (held := broker.metric("penstock_schedule_held")) < options.records:
        _say(f"{held:.0f} are held")
        time.sleep(1)
    report["hold_s"] = time.monotonic() - started
    report["held_per_s"] = options.records / report["hold_s"]
    report["rss_held_mb"], report["rss_peak_holding_mb"] = broker.memory_mb()
    report["ahead_s"] = first_due_ms / 1000 - time.time()
    broker.kill()
    report["restart_s"] = broker.timed_start()
    started = time.monotonic()
    while (held := broker.metric("penstock_schedule_held")) < options.records:
        time.sleep(0.2)
    report["load_s"] = time.monotonic() - started
    report["rss_loaded_mb"], report["rss_peak_loading_mb"] = broker.memory_mb()
    _say(json.dumps(report))
    report |= _consume(broker, options, first_due_ms)
    report["rss_after_mb"], report["rss_peak_mb"] = broker.memory_mb()
    broker.kill()
    return report


def _produce(bootstrap: str, options: argparse.Namespace, first_due_ms: int) -> None:
    chance = random.Random(5)
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 50, "queue.buffering.max.messages": 200_000}
    )
    failures: list[Any] = []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    padding = b"." * options.bytes
    for number in range(options.records):
        due_ms = first_due_ms + chance.randrange(options.spread_s * 1000)
        while True:
            try:
                producer.produce(
                    "jobs",
                    b"%d %s" % (number, padding),
                    partition=number % options.partitions,
                    headers=[("penstock-deliver-at", b"%d" % due_ms)],
                    on_delivery=delivered,
                )
                break
            except BufferError:
                producer.poll(0.05)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(600) == 0
    assert not failures, failures[0]


def _consume(broker: Broker, options: argparse.Namespace, first_due_ms: int) -> dict[str, Any]:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader", "auto.offset.reset": "earliest"}
    )
    consumer.assign([TopicPartition("jobs", index, 0) for index in range(options.partitions)])
    came = bytearray(options.records)
    count, early, late_ms_max, rss_mb = 0, 0, 0, 0.0
    first, told = 0.0, time.monotonic()
    last_due_ms = [0] * options.partitions
    disorder = 0
    while count < options.records:
        for message in consumer.consume(10_000, 0.5):
            assert message.error() is None, message.error()
            number = int(message.value().split(b" ", 1)[0])
            assert not came[number], f"{number} came twice"
            came[number] = 1
            count += 1
            due_ms, stamped_ms = (
                int(dict(message.headers())["penstock-scheduled-for"]),
                message.timestamp()[1],
            )
            early += stamped_ms < due_ms
            disorder += due_ms < last_due_ms[message.partition()]
            last_due_ms[message.partition()] = due_ms
            late_ms_max = max(late_ms_max, stamped_ms - due_ms)
            first = first or time.monotonic()
        if time.monotonic() - told > 5:
            told = time.monotonic()
            rss_mb = max(rss_mb, broker.memory_mb()[0])
            _say(f"{count} have come, {broker.memory_mb()[0]:.0f} MB")
        assert time.time() * 1000 < first_due_ms + 1_200_000, f"{options.records - count} never came"
    seconds = time.monotonic() - first
    consumer.close()
    assert early == 0
    assert disorder == 0
    return {
        "release_s": seconds,
        "released_per_s": options.records / seconds,
        "late_ms_max": late_ms_max,
        "rss_releasing_mb": rss_mb,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
