"""Replays of real Spark killed at seeded points until they are done: each record is written once.

python -m tests.spark.replay.campaign --kills 8 --seed 1
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.brokers import BrokerProcess
from tests.spark.replay.replays import Replays
from tests.spark.replay.test_dead_letters_spark import dead_letter
from tests.spark.sink.ambushed import WRITER_POINTS, kill_session
from tests.spark.source.topics import Topics

from penstock.client.deadletters.headers import dead_letter_topic
from penstock.spark.session import session

RECORDS, PARTITIONS, RATE = 600, 3, 50
RUN_TIMEOUT_S = 400.0


def killed_run(folder: Path, bootstrap: str, settings: dict[str, str], point: str, number: int) -> bool:
    """Return whether the driver reached the point."""
    counter = Path(tempfile.mkdtemp(dir=folder)) / "count"
    ambush = {"ambush": f"{point}:{number}", "ambushFile": str(counter), "ambushKills": "true"}
    given = {"bootstrap": bootstrap, "settings": settings, "ambush": ambush}
    command = [sys.executable, "-m", "tests.spark.replay.ambushed", json.dumps(given)]
    with (folder / "drivers.log").open("ab") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        return driver.wait(RUN_TIMEOUT_S) < 0
    finally:
        kill_session(driver.pid)


def campaign(folder: Path, broker: BrokerProcess, chance: random.Random, kills: int) -> Counter[str]:
    topics = Topics(broker.bootstrap_servers)
    source, target = topics.create("in", PARTITIONS), topics.create("out", PARTITIONS)
    orders = topics.create("orders", PARTITIONS)
    dead = topics.create(dead_letter_topic(orders), 1)
    for partition in range(PARTITIONS):
        topics.count(source, range(partition, RECORDS, PARTITIONS), partition=partition)
    topics.fill(
        dead, [dead_letter(orders, number, partition=number % PARTITIONS) for number in range(RECORDS)]
    )
    tally: Counter[str] = Counter()
    runs = [{"topic": source, "to": target, "rate": str(RATE)}, {"letters": dead, "rate": str(RATE)}]
    for _ in range(kills):
        point, number = chance.choice(list(WRITER_POINTS)), chance.randint(1, 4)
        settings = chance.choice(runs)
        is_killed = killed_run(folder, broker.bootstrap_servers, settings, point, number)
        tally[f"{'killed' if is_killed else 'not come to'}: {point}"] += 1
        print(point, number, "killed" if is_killed else "not come to", flush=True)
    spark = session("campaign", master="local[2,4]", settings={"spark.log.level": "OFF"})
    replays = Replays(spark, topics)
    for settings in runs:
        print(replays.run(**settings), flush=True)
    for topic in (target, orders):
        assert replays.numbers(topic) == list(range(RECORDS)), f"records are lost or duplicated in {topic}"
    spark.stop()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerProcess(Path(folder) / "data").start()
        try:
            tally = campaign(Path(folder), broker, random.Random(arguments.seed), arguments.kills)
        finally:
            broker.stop()
    print(dict(tally))
    print(f"{2 * RECORDS} records, each once")


if __name__ == "__main__":
    main()
