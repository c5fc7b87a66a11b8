"""`penstock group` and `penstock transaction`: share groups, settings of groups, and transactions to be ended."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from tests.brokers import BrokerProcess
from tests.compat import confluent
from tests.compat.message import numbered
from tests.compat.raw import connected, schema
from tests.compat.share import share_consumer, take

from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

#: A batch may begin a transaction that its coordinator has never heard of.
UNVERIFIED = {
    "transaction.partition.verification.enable": "false",
    "inter.broker.listener.name": "PLAINTEXT",  # markers are taken from other nodes only, and from this test
}


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with(UNVERIFIED)


@pytest.fixture(scope="module")
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


def test_a_share_group_is_set_up_shown_moved_and_deleted(
    penstock: Any, answer: Any, bootstrap: str, topic: str, group: str
) -> None:
    penstock("group", "alter", group, "-c", "share.auto.offset.reset=earliest")
    confluent.publish(bootstrap, topic, numbered(10))
    client = share_consumer(bootstrap, group, topic, max_poll_records=10)
    try:
        take(client, 10)
        [described] = answer("group", "describe", group)
        assert (described["type"], described["state"], described["lag"]) == ("share", "stable", 0)
        assert described["settings"] == {"share.auto.offset.reset": "earliest"}
        assert described["partitions"] == [
            {"topic": topic, "partition": 0, "start": 10, "end": 10, "lag": 0, "members": 1}
        ]
        assert "not empty" in penstock("group", "reset", group, "--to-earliest", "--yes", code=1)[1]
        assert "has members" in penstock("group", "delete", group, "--yes", code=1)[1]
    finally:
        client.close()
    assert (group, "share") in {(row["group"], row["type"]) for row in answer("group", "list")}
    moved = answer("group", "reset", group, "--shift-by", "-7", "--yes")
    assert moved["partitions"] == [{"topic": topic, "partition": 0, "from": 10, "to": 3}]
    assert answer("group", "describe", group)[0]["lag"] == 7
    assert answer("group", "delete", group, "--yes") == [{"group": group, "deleted": True}]
    assert group not in {row["group"] for row in answer("group", "list")}


def test_settings_of_a_group_return_to_their_defaults(penstock: Any, answer: Any, group: str) -> None:
    assert "nothing to change" in penstock("group", "alter", group, code=2)[1]
    assert (
        "min.delivery.count.limit"
        in penstock("group", "alter", group, "-c", "share.delivery.count.limit=1", code=1)[1]
    )
    penstock(
        "group", "alter", group, "-c", "penstock.share.backoff=fixed", "-c", "share.delivery.count.limit=3"
    )
    penstock("group", "alter", group, "-d", "share.delivery.count.limit")
    penstock("group", "reset", group, "--topic", "nowhere", "--to-earliest", "--yes", code=1)


def begun(bootstrap: str, name: str, topic: str) -> Any:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "log_level": 0})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(60)
    return producer


def test_an_open_transaction_is_seen_and_aborted(
    penstock: Any, answer: Any, bootstrap: str, topic: str, unique: Callable[[str], str]
) -> None:
    name = unique("id")
    assert "does not exist" in penstock("transaction", "describe", name, code=1)[1]
    producer = begun(bootstrap, name, topic)
    found = answer("transaction", "describe", name)
    assert (found["state"], found["partitions"]) == ("Ongoing", [{"topic": topic, "partition": 0}])
    assert found["open_s"] >= 0
    assert name in {row["transactional_id"] for row in answer("transaction", "list", "--open")}
    assert answer("transaction", "hanging", "--silent", "0") == [], "its coordinator knows it"
    assert "needs a confirmation" in penstock("transaction", "abort", name, code=2)[1]
    penstock("transaction", "abort", name, "--yes")
    assert name not in {row["transactional_id"] for row in answer("transaction", "list", "--open")}
    with pytest.raises(KafkaException):
        producer.commit_transaction(20)
    assert answer("transaction", "describe", name)["open_s"] is None


def test_a_hanging_transaction_is_found_and_aborted(
    penstock: Any,
    answer: Any,
    bootstrap: str,
    broker: BrokerProcess,
    topic: str,
    unique: Callable[[str], str],
) -> None:
    hang(broker, topic, unique("id"))
    assert answer("transaction", "hanging") == [], "it may not be lost yet"
    (found,) = answer("transaction", "hanging", "--silent", "0")
    assert (found["topic"], found["partition"], found["start_offset"]) == (topic, 0, 0)
    (ended,) = answer("transaction", "hanging", "--silent", "0", "--abort", "--yes")
    assert ended["aborted"]
    assert answer("transaction", "hanging", "--silent", "0") == []
    confluent.publish(bootstrap, topic, numbered(1))
    (read,) = confluent.read(bootstrap, topic, 1, isolation_level="read_committed")
    assert read.offset == 2


def hang(broker: BrokerProcess, topic: str, name: str) -> None:
    """A transactional batch without the request that adds its partition, as a late one would be."""
    with connected(broker.address) as connection:
        # The topic of transactions is made for the first one who looks for its coordinator.
        connection.call(schema("find_coordinator", 1, "FindCoordinatorRequest")(key=name, key_type=1))
        request = schema("init_producer_id", 4, "InitProducerIdRequest")(
            transactional_id=name,
            transaction_timeout=timedelta(seconds=60),
            producer_id=-1,
            producer_epoch=-1,
        )
        while (identity := connection.call(request)).error_code.value != 0:
            pass
        batch = encode_batch(
            [Record(0, 1, None, b"hangs", ())],
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=0,
            attributes=TRANSACTIONAL,
        )
        part = schema("produce", 11, "PartitionProduceData")(index=0, records=bytes(batch))
        data = schema("produce", 11, "TopicProduceData")(name=topic, partition_data=(part,))
        produced = connection.call(
            schema("produce", 11, "ProduceRequest")(
                transactional_id=name, acks=-1, timeout=timedelta(seconds=20), topic_data=(data,)
            )
        )
        assert produced.responses[0].partition_responses[0].error_code.value == 0
