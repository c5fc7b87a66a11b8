"""Replays whose processes die and that are run again: each record is written once."""

import json
import subprocess
import sys

import pytest
from py4j.protocol import Py4JJavaError
from tests.spark.replay.ambushed import ambushed
from tests.spark.replay.test_dead_letters_spark import dead_letter
from tests.spark.sink.ambushed import kill_session

from penstock.client.deadletters.headers import dead_letter_topic

RUN_TIMEOUT_S = 800.0


@pytest.fixture
def source(topics, unique):
    topic = topics.create(unique("in"), 2)
    for partition in range(2):
        topics.count(topic, range(partition, 40, 2), partition=partition)
    return topic


@pytest.fixture
def target(topics, unique):
    return topics.create(unique("out"), 2)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("task prepared:3", marks=pytest.mark.slow),
        "in the decision:2",
        pytest.param("after the decision:2", marks=pytest.mark.slow),
        "between two commits:3",
    ],
)
def test_a_process_of_the_sink_dies(spark, replays, tmp_path, source, target, point):
    settings = {"topic": source, "to": target, "rate": "7"}
    ambush = {"ambush": point, "ambushFile": str(tmp_path / "count")}
    with ambushed(spark, ambush):
        if point.startswith("task"):
            replays.run(**settings)
        else:
            with pytest.raises(Py4JJavaError):
                replays.run(**settings)
            assert replays.progress[-1] == (13, 40)
    assert (tmp_path / "count.sprung").exists()
    if not point.startswith("task"):
        replays.run(**settings)
    assert replays.numbers(target) == list(range(40))


def test_a_process_dies_while_dead_letters_are_replayed(spark, replays, topics, tmp_path, unique):
    orders = topics.create(unique("orders"), 3)
    dead = topics.create(dead_letter_topic(orders), 1)
    topics.fill(dead, [dead_letter(orders, number) for number in range(20)])
    ambush = {"ambush": "between two commits:2", "ambushFile": str(tmp_path / "count")}
    with ambushed(spark, ambush), pytest.raises(Py4JJavaError):
        replays.run(letters=dead, rate="3", id="first")
    replays.run(letters=dead, id="second")
    assert replays.numbers(orders) == list(range(20))


@pytest.mark.slow
def test_the_driver_dies(replays, topics, tmp_path, source, target):
    """The driver dies with its JVM and all workers, between the decision about the second piece and its commit."""
    settings = {"topic": source, "to": target, "rate": "7"}
    ambush = {
        "ambush": "between two commits:3",
        "ambushFile": str(tmp_path / "count"),
        "ambushKills": "true",
    }
    given = {"bootstrap": topics.bootstrap, "settings": settings, "ambush": ambush}
    command = [sys.executable, "-m", "tests.spark.replay.ambushed", json.dumps(given)]
    driver = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert driver.wait(RUN_TIMEOUT_S) < 0
    finally:
        kill_session(driver.pid)
    assert (tmp_path / "count.sprung").exists()
    notes = replays.run(**settings)
    assert "continues after 2 of 3 pieces" in notes
    assert replays.numbers(target) == list(range(40))
