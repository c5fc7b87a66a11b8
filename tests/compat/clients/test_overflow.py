"""Overflow policies as producers and consumers see them: produced = kept + dropped, to the message."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import kafka.errors
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaProducer
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

from penstock.client.admin.tenants import Tenant, alter_tenant, tenant_changes, tenant_usage
from penstock.client.admin.topic_drops import topic_drops
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import alter_topic_settings
from penstock.testing import EmbeddedBroker

QUIET = {"log_level": 0}
COUNT = 3000
VALUE = bytes(500)
#: A fraction of what is sent fits.
BOUND = 200_000


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(settings={"penstock.http.listen": "127.0.0.1:0"}) as broker:
        yield broker


@pytest.fixture
def cluster(broker: EmbeddedBroker) -> Iterator[Cluster]:
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": broker.bootstrap_servers})) as cluster:
        yield cluster


def confluent(broker: EmbeddedBroker, topic: str, *, idempotent: bool, value: bytes = VALUE) -> Counter[str]:
    """Send all; return how many had which outcome.

    librdkafka numbers the messages of a batch from its first offset, so only the first one of a dropped batch shows
    that it has none.
    """
    outcomes: Counter[str] = Counter()
    unstored: list[bool] = []

    def done(error: KafkaError | None, message: Any) -> None:
        outcomes[error.name() if error else "success"] += 1
        unstored.append(message.offset() is None or message.offset() < 0)

    settings = {"enable.idempotence": idempotent, "linger.ms": 0, "batch.num.messages": 20}
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, **QUIET, **settings})
    for number in range(COUNT):
        producer.produce(topic, b"%06d" % number + value, partition=0, on_delivery=done)
        producer.poll(0)
    assert producer.flush(60) == 0
    outcomes["without offset"] = sum(unstored)
    return outcomes


def kafka_python(broker: EmbeddedBroker, topic: str) -> Counter[str]:
    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap_servers, enable_idempotence=False, acks="all", batch_size=8000
    )
    outcomes: Counter[str] = Counter()
    sent = [producer.send(topic, b"%06d" % number + VALUE, partition=0) for number in range(COUNT)]
    for future in sent:
        try:
            offset = future.get(60).offset
        except kafka.errors.PolicyViolationError:
            outcomes["POLICY_VIOLATION"] += 1
        else:
            outcomes["success"] += 1
            outcomes["without offset"] += offset < 0
    producer.close()
    return outcomes


PRODUCERS = {
    "confluent idempotent": lambda *args: confluent(*args, idempotent=True),
    "confluent": lambda *args: confluent(*args, idempotent=False),
    "kafka-python": kafka_python,
}


def watermarks(broker: EmbeddedBroker, topic: str) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "w", **QUIET})
    try:
        first, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), 30)
        return first, end
    finally:
        consumer.close()


def read(broker: EmbeddedBroker, topic: str, first: int, end: int) -> list[bytes]:
    """Return the keys from `first` on; fewer if drop-oldest deletes the first ones meanwhile."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": EmbeddedBroker.unique_name("g"),
            "auto.offset.reset": "earliest",
            **QUIET,
        }
    )
    consumer.assign([TopicPartition(topic, 0, first)])
    try:
        found: list[bytes] = []
        offset = first
        while offset < end:
            message = consumer.poll(60)
            assert message is not None
            assert message.error() is None
            found.append(message.value()[:6])
            offset = message.offset() + 1
        return found
    finally:
        consumer.close()


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("policy", ["drop-newest", "drop-oldest"])
def test_produced_is_kept_plus_dropped(
    broker: EmbeddedBroker, cluster: Cluster, policy: str, producer: str
) -> None:
    topic = broker.new_topic(
        "lossy",
        **{"penstock.overflow": policy, "penstock.overflow.bytes": BOUND},  # type: ignore[arg-type]
    )
    outcomes = PRODUCERS[producer](broker, topic)

    def kept_and_dropped() -> tuple[int, int, list[bytes]]:
        first, end = watermarks(broker, topic)
        kept = read(broker, topic, first, end)
        drops = topic_drops(cluster, topic)
        assert {by for by, _ in drops.counts} == {policy}
        assert len(kept) + drops.counts.total() == COUNT
        return first, end, kept

    first, end, kept = eventually(kept_and_dropped)  # drop-oldest deletes a little later than it appends
    assert len({*kept}) == len(kept)
    assert kept == sorted(kept)
    assert outcomes["success"] == COUNT
    if policy == "drop-newest":
        assert first == 0
        assert outcomes["without offset"] > 0
        assert producer != "kafka-python" or outcomes["without offset"] == COUNT - end
    else:
        assert outcomes["without offset"] == 0
        assert kept[-1] == b"%06d" % (COUNT - 1)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_rejected_message_is_reported_and_the_rest_is_there(
    broker: EmbeddedBroker, cluster: Cluster, producer: str
) -> None:
    topic = broker.new_topic(
        "strict",
        **{"penstock.overflow": "reject", "penstock.overflow.bytes": BOUND},  # type: ignore[arg-type]
    )
    outcomes = PRODUCERS[producer](broker, topic)
    first, end = watermarks(broker, topic)
    assert first == 0
    assert (outcomes["success"], outcomes["POLICY_VIOLATION"]) == (end, COUNT - end)
    assert not topic_drops(cluster, topic).counts


@pytest.mark.parametrize("idempotent", [True, False])
def test_blocked_producers_are_held_and_everything_arrives_once_there_is_room(
    broker: EmbeddedBroker, cluster: Cluster, idempotent: bool
) -> None:
    topic = broker.new_topic(
        "blocking",
        **{"penstock.overflow": "block", "penstock.overflow.bytes": BOUND},  # type: ignore[arg-type]
    )
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "enable.idempotence": idempotent,
            "batch.num.messages": 20,
            **QUIET,
        }
    )
    errors: list[Any] = []
    count = 1000
    for number in range(count):
        producer.produce(
            topic, b"%06d" % number + VALUE, partition=0, on_delivery=lambda error, _: errors.append(error)
        )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
    taken: list[bytes] = []
    refused = ("penstock_topic_refused_records_total", "block", "bytes", topic)
    eventually(lambda: producer.poll(0.05) is not None and samples(broker).get(refused))
    while len(taken) < count:
        first, end = eventually(lambda: producer.poll(0.05) is not None and _filled(broker, topic))
        taken += read(broker, topic, first, end)
        for done in admin.delete_records([TopicPartition(topic, 0, end)]).values():
            done.result(60)
    assert producer.flush(60) == 0
    assert errors == [None] * count
    assert Counter(taken).most_common(1)[0][1] == 1
    assert not idempotent or taken == sorted(taken)
    assert not topic_drops(cluster, topic).counts


def _filled(broker: EmbeddedBroker, topic: str) -> tuple[int, int] | None:
    first, end = watermarks(broker, topic)
    return (first, end) if end > first else None


def samples(broker: EmbeddedBroker) -> dict[tuple[str, ...], float]:
    with urlopen(f"{broker.http_url}/metrics", timeout=20) as answer:
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        }


def test_a_transaction_is_never_stored_in_part(broker: EmbeddedBroker, cluster: Cluster) -> None:
    topic = broker.new_topic(
        "whole",
        **{"penstock.overflow": "drop-newest", "penstock.overflow.records": 4},  # type: ignore[arg-type]
    )
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic, "linger.ms": 0, **QUIET}
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    for _ in range(4):
        producer.produce(topic, b"x", partition=0)
    producer.flush(60)
    for _ in range(4):
        producer.produce(topic, b"x", partition=0)
    with pytest.raises(KafkaException):
        producer.commit_transaction(60)
    producer.abort_transaction(60)
    assert not topic_drops(cluster, topic).counts
    eventually(lambda: watermarks(broker, topic)[1] == 5, what="four records and a marker")


def test_consumers_of_drop_oldest_are_reset_and_their_loss_is_counted(broker: EmbeddedBroker) -> None:
    topic = broker.new_topic(
        "passing",
        **{"penstock.overflow": "drop-oldest", "penstock.overflow.records": 100},  # type: ignore[arg-type]
    )
    group = EmbeddedBroker.unique_name("late")
    settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group, **QUIET}
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "batch.num.messages": 10, **QUIET})
    numbers = itertools.count()

    def send(count: int) -> None:
        for number in itertools.islice(numbers, count):
            producer.produce(topic, b"%06d" % number, partition=0)
        assert producer.flush(60) == 0

    def consumer() -> Consumer:
        made = Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})
        made.subscribe([topic])
        return made

    send(50)
    member = consumer()
    message = member.poll(60)
    assert message is not None
    member.commit(offsets=[TopicPartition(topic, 0, 10)], asynchronous=False)
    member.close()
    # What a group has lost before it was sampled for the first time is not counted.
    eventually(lambda: broker._node().group_drops.knows(group))
    send(450)
    eventually(lambda: watermarks(broker, topic) == (400, 500))
    name = "penstock_group_dropped_records_total"
    eventually(lambda: samples(broker).get((name, group, topic)) == 390)
    member = consumer()
    message = member.poll(60)
    assert message is not None
    assert message.offset() == 400
    member.close()
    assert samples(broker)["penstock_topic_dropped_records_total", "drop-oldest", "records", topic] == 400


def test_the_storage_of_a_tenant_is_a_bound_of_its_topics(broker: EmbeddedBroker, cluster: Cluster) -> None:
    tenant = Tenant("acme", ("ann",), "acme.", {"storage_bytes_max": 1})
    plain, lossy = (broker.new_topic("acme." + name) for name in ("plain", "lossy"))
    other = broker.new_topic("other")
    alter_topic_settings(cluster, lossy, {"penstock.overflow": "drop-newest"})
    for topic in (plain, lossy):
        assert outcome(broker, topic) is None
    alter_tenant(cluster, tenant.name, tenant_changes(tenant, None))
    try:
        eventually(lambda: outcome(broker, lossy) is None and topic_drops(cluster, lossy).counts)
        assert {*topic_drops(cluster, lossy).counts} == {("drop-newest", "tenant")}
        assert outcome(broker, plain, timeout_ms=1500) == KafkaError._MSG_TIMED_OUT
        assert outcome(broker, other) is None
    finally:
        alter_tenant(cluster, tenant.name, {"storage_bytes_max": None})
    assert outcome(broker, plain) is None


def test_topics_of_little_value_are_shed_while_the_storage_of_their_tenant_is_short(
    broker: EmbeddedBroker, cluster: Cluster
) -> None:
    tenant = Tenant("globex", ("bob",), "globex.", {"storage_bytes_max": 1 << 40})
    plain, debug = (broker.new_topic("globex." + name) for name in ("plain", "debug"))
    alter_topic_settings(cluster, debug, {"penstock.shed.priority": "0"})
    alter_tenant(cluster, tenant.name, tenant_changes(tenant, None))

    def stored_bytes() -> int:
        return tenant_usage(cluster)[tenant.name].stored_bytes

    sent = 0

    def send_one() -> bool:
        nonlocal sent
        sent += 1
        return outcome(broker, debug) is None

    def dropped() -> Counter[tuple[str, str]]:
        return topic_drops(cluster, debug).counts

    try:
        assert confluent(broker, plain, idempotent=True) == {"success": COUNT, "without offset": 0}
        stored = eventually(lambda: used if (used := stored_bytes()) > COUNT * len(VALUE) else 0)
        assert send_one()
        assert not dropped()
        # 2 % of the bound are left: too little for topics that may be shed, and enough for one more message.
        alter_tenant(cluster, tenant.name, {"storage_bytes_max": str(int(stored / 0.98))})
        eventually(lambda: send_one() and dropped(), what="records that are shed")
        assert {*dropped()} == {("shed", "tenant")}
        assert outcome(broker, plain) is None
    finally:
        alter_tenant(cluster, tenant.name, {"storage_bytes_max": None})
    end = watermarks(broker, debug)[1]
    eventually(lambda: send_one() and watermarks(broker, debug)[1] > end, what="a record that is kept")
    assert watermarks(broker, debug)[1] + dropped().total() == sent
    assert watermarks(broker, plain) == (0, COUNT + 1)


def outcome(broker: EmbeddedBroker, topic: str, timeout_ms: int = 60_000) -> Any:
    outcomes: list[Any] = []
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "message.timeout.ms": timeout_ms, **QUIET}
    )
    producer.produce(topic, b"x", partition=0, on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(60) == 0
    return outcomes[0] and outcomes[0].code()


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("policy", ["drop-newest", "drop-oldest"])
def test_on_a_full_disk_produced_is_kept_plus_dropped(tmp_path: Path, policy: str, idempotent: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 << 20}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    try:
        settings = {"penstock.disk.reserve.bytes": 65536, "offsets.topic.num.partitions": 1}
        with EmbeddedBroker(data_dir=folder, settings=settings) as broker:
            topic_settings: dict[str, Any] = {"penstock.overflow": policy, "segment.bytes": 500_000}
            topic = broker.create_topic("t", **topic_settings)
            outcomes = confluent(broker, topic, idempotent=idempotent, value=bytes(4000))
            assert outcomes["success"] == COUNT
            connection = ConnectionSettings.parse({"bootstrap.servers": broker.bootstrap_servers})
            with Cluster(connection) as cluster:

                def balanced() -> list[bytes]:
                    found = read(broker, topic, *watermarks(broker, topic))
                    assert len(found) + topic_drops(cluster, topic).counts.total() == COUNT
                    return found

                kept = eventually(balanced)
                assert {*topic_drops(cluster, topic).counts} == {(policy, "disk")}
            assert len({*kept}) == len(kept)
            # Without idempotence, a batch that has to wait is overtaken.
            assert not idempotent or kept == sorted(kept)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
