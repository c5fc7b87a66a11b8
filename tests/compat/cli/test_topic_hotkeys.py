"""`penstock topic hotkeys` on a real topic."""

import gzip
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer


@pytest.fixture
def fill(bootstrap: str) -> Callable[..., None]:
    """`fill(topic, [(key, value), ...], partition=1, **settings)`."""

    def publish(
        topic: str, pairs: list[tuple[bytes | None, bytes]], partition: int = 0, **settings: Any
    ) -> None:
        given = {name.replace("_", "."): value for name, value in settings.items()}
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, **given})
        if "transactional.id" in given:
            producer.init_transactions()
            producer.begin_transaction()
        for key, value in pairs:
            producer.produce(topic, value, key, partition=partition)
            producer.poll(0)
        assert producer.flush(30) == 0
        if "transactional.id" in given:
            producer.abort_transaction()

    return publish


def test_the_heaviest_keys_of_a_small_topic(penstock: Any, answer: Any, new_topic: Any, fill: Any) -> None:
    topic = new_topic(3)
    fill(topic, [(b"hot", b"v" * 7)] * 60 + [(b"warm", b"v" * 6)] * 20 + [(None, b"v" * 10)] * 20)
    fill(topic, [(b"%d" % number, b"v") for number in range(40)], partition=1, compression_type="gzip")
    found = answer("topic", "hotkeys", topic, "--top", "2")
    assert found["topic"] == topic
    first, second, third = found["partitions"]
    assert {name: first[name] for name in first if name != "keys"} == {
        "partition": 0,
        "first_offset": 0,
        "next_offset": 100,
        "sampled": 100,
        "without_key": 20,
        "whole": True,
    }
    assert first["keys"][0] == {
        "key": "hot",
        "records": 60,
        "bytes": 600,
        "share": 0.6,
        "share_error": 0.0,
        "bytes_share": 0.6,
        "bytes_share_error": 0.0,
        "hot": True,
    }
    assert [key["key"] for key in first["keys"]] == ["hot", "warm"]
    assert second["sampled"] == 40
    assert not any(key["hot"] for key in second["keys"])
    assert (third["sampled"], third["keys"]) == (0, [])

    out, err = penstock("topic", "hotkeys", topic, "--top", "1")
    assert [line.split() for line in out.splitlines()[1:2]] == [["0", "hot", "60", "600", "60.0%", "60.0%"]]
    assert "read all 140 records: shares are exact" in err
    assert "penstock.client.salting spreads a key over several partitions" in err
    out, err = penstock("topic", "hotkeys", topic, "--partition", "1")
    assert "salting" not in err


def test_a_sample_of_a_larger_topic(penstock: Any, answer: Any, new_topic: Any, fill: Any) -> None:
    topic = new_topic(2)
    for partition in range(2):
        pairs = [(b"hot" if number % 10 < 4 else b"%d" % number, b"v" * 20) for number in range(5_000)]
        fill(topic, pairs, partition=partition, batch_size=2_000)
    found = answer("topic", "hotkeys", topic, "--sample", "2000", "--top", "1")
    for each in found["partitions"]:
        assert each["whole"] is False
        assert 900 <= each["sampled"] <= 1_000
        (hot,) = each["keys"]
        assert hot["key"] == "hot"
        assert abs(hot["share"] - 0.4) <= max(hot["share_error"], 0.02)
        assert 0 < hot["share_error"] < 0.1
    out, err = penstock("topic", "hotkeys", topic, "--sample", "2000")
    assert "±" in out
    assert "of about 10000 records: shares are exact to within" in err


def test_what_was_aborted_does_not_count(answer: Any, new_topic: Any, fill: Any, unique: Any) -> None:
    topic = new_topic(1)
    fill(topic, [(b"kept", b"v")] * 3)
    fill(topic, [(b"aborted", b"v")] * 50, transactional_id=unique("tx"))
    (found,) = answer("topic", "hotkeys", topic)["partitions"]
    assert [(key["key"], key["records"]) for key in found["keys"]] == [("kept", 3)]
    assert found["sampled"] == 3


def test_a_key_that_is_no_text(penstock: Any, answer: Any, topic: str, fill: Any) -> None:
    key = gzip.compress(b"", mtime=0)[:4] + b"\xff"
    fill(topic, [(key, b"v")])
    (found,) = answer("topic", "hotkeys", topic)["partitions"]
    assert list(found["keys"][0]["key"]) == ["base64"]
    assert "\\x1f\\x8b\\x08" in penstock("topic", "hotkeys", topic)[0]


def test_topics_without_records_or_keys_say_so(penstock: Any, answer: Any, topic: str, fill: Any) -> None:
    assert penstock("topic", "hotkeys", topic) == ("", f"{topic} is empty\n")
    assert answer("topic", "hotkeys", topic)["partitions"][0]["keys"] == []
    fill(topic, [(None, b"v")] * 3)
    assert penstock("topic", "hotkeys", topic) == ("", "none of the 3 sampled records has a key\n")


def test_what_is_not_there_is_told(penstock: Any, topic: str) -> None:
    assert f"topic {topic}x does not exist" in penstock("topic", "hotkeys", topic + "x", code=1)[1]
    assert "did you mean" in penstock("topic", "hotkeys", topic + "x", code=1)[1]
    err = penstock("topic", "hotkeys", topic, "--partition", "7", code=1)[1]
    assert f"topic {topic} has no partition 7" in err
    assert "no broker at localhost:1" in penstock("topic", "hotkeys", topic, "-b", "localhost:1", code=1)[1]
    assert "--property" in penstock("topic", "hotkeys", topic, "-X", "nonsense", code=2)[1]
    penstock("topic", "hotkeys", topic, "--sample", "0", code=2)
