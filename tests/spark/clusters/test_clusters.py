"""The same program on a Spark cluster and on a Spark Connect server: only the address differs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.compat import confluent
from tests.spark.class_archive import QUICK_JAVA
from tests.spark.source.topics import Topics
from tests.spark.standalone import ConnectServer, Standalone

ROWS = 100_000
RUN_S = 3000.0
TOPICS = ("orders", "copied", "cleaned", "replayed", "twice", "once", "metrics")
BAD = [number for number in range(ROWS) if number % 10 == 7]
GOOD = [number for number in range(ROWS) if number % 10 != 7]


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path).start()
    yield cluster
    cluster.stop()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[ConnectServer]:
    pytest.importorskip("grpc", reason="needs pip install 'penstock[connect]'")
    server = ConnectServer(tmp_path).start()
    yield server
    server.stop()


@pytest.fixture
def run(broker: Any, unique: Callable[[str], str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the program, and return what it read from each topic."""
    topics = Topics(broker.bootstrap_servers)
    names = {name: topics.create(unique(name), 2) for name in TOPICS}

    def ran(master: str, settings: dict[str, str], deadly: str = "") -> dict[str, Any]:
        given = {
            "master": master,
            "bootstrap": broker.bootstrap_servers,
            "folder": str(tmp_path / "checkpoints"),
            "topics": names,
            "pipeline": unique("clean"),
            "rows": ROWS,
            "deadly": deadly,
        }
        result = json.loads(output_of(given, configured(tmp_path / "conf", settings)).splitlines()[-1])
        retries = confluent.read(
            broker.bootstrap_servers, f"{names['orders']}.retry.1", len(BAD), partitions=2
        )
        retried = sorted(int(each.message.key) for each in retries)
        return {**result["read"], "retried": retried, "processes": result["processes"]}

    return ran


def configured(folder: Path, settings: dict[str, str]) -> dict[str, str]:
    """A machine whose Spark an administrator has set up for a cluster."""
    folder.mkdir()
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    (folder / "spark-defaults.conf").write_text("".join(lines))
    return {**os.environ, **QUICK_JAVA, "SPARK_CONF_DIR": str(folder)}


def output_of(given: dict[str, Any], environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "tests.spark.clusters.program", json.dumps(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def seen(numbers: Collection[int]) -> list[int]:
    """Return the number of ids, the number of different ids, and their sum."""
    return [len(numbers), len(set(numbers)), sum(numbers)]


def check(result: dict[str, Any]) -> None:
    for name in ("orders", "copied", "archived", "replayed"):
        assert result[name] == seen(range(ROWS)), f"{name}: not each record once"
    assert result["cleaned"] == seen(GOOD)
    assert result["retried"] == BAD
    assert result["once"] == seen(range(ROWS // 2)), "duplicates were not dropped"
    assert result["metrics"] == ROWS


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_cluster_that_loses_an_executor(standalone, run, tmp_path):
    """All tasks run on two machines. One of them dies during a stream, and every row is there once."""
    everyone = {"spark.scheduler.minRegisteredResourcesRatio": "1.0"}
    flag = tmp_path / "an executor has died"
    result = run(standalone.master, {**standalone.settings, **everyone}, deadly=str(flag))
    assert flag.exists()
    assert result["processes"] == 2
    check(result)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_connect_server(connect, run):
    """The program has no JVM, and the server discovers the format."""
    result = run(connect.master, {})
    assert result["processes"] == 1
    check(result)
