"""Replays that are killed and run again: each record is in the target once."""

import json
import subprocess
import sys

import pytest
from py4j.protocol import Py4JJavaError
from tests.spark.replay.ambushed import ambushed
from tests.spark.replay.test_letters_spark import letter
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
        "between two ends:3",
    ],
)
def test_a_process_of_the_sink_dies(spark, desk, tmp_path, source, target, point):
    settings = {"topic": source, "to": target, "rate": "7"}
    ambush = {"ambush": point, "ambushFile": str(tmp_path / "count")}
    with ambushed(spark, ambush):
        if point.startswith("task"):
            desk.run(**settings)
        else:
            with pytest.raises(Py4JJavaError):
                desk.run(**settings)
            assert desk.progress[-1] == (13, 40)
    assert (tmp_path / "count.sprung").exists()
    if not point.startswith("task"):
        desk.run(**settings)
    assert desk.numbers(target) == list(range(40))


def test_dead_letters_and_a_process_that_dies(spark, desk, topics, tmp_path, unique):
    orders = topics.create(unique("orders"), 3)
    dead = topics.create(dead_letter_topic(orders), 1)
    topics.fill(dead, [letter(orders, number) for number in range(20)])
    ambush = {"ambush": "between two ends:2", "ambushFile": str(tmp_path / "count")}
    with ambushed(spark, ambush), pytest.raises(Py4JJavaError):
        desk.run(letters=dead, rate="3", id="first")
    desk.run(letters=dead, id="second")
    assert desk.numbers(orders) == list(range(20))


@pytest.mark.slow
def test_everything_dies(desk, topics, tmp_path, source, target):
    """The driver with its Java machine and all workers, between the decision about the second piece and its end."""
    settings = {"topic": source, "to": target, "rate": "7"}
    ambush = {
        "ambush": "between two ends:3",
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
    told = desk.run(**settings)
    assert "goes on after 2 of 3 pieces" in told
    assert desk.numbers(target) == list(range(40))
