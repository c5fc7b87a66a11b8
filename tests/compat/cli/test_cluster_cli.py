"""`penstock cluster` on the command line, in processes of its own, on free ports."""

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.brokers import environment, executable
from tests.waiting import eventually

from penstock.cli.cluster.description import describe_cluster
from penstock.cli.cluster.status import check_health, status_document
from penstock.cli.connection import ConnectionOptions, open_cluster

#: Nodes start in a second on an idle machine, and take much longer beside other tests.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(900)
QUICK = [
    "--set=broker.session.timeout.ms=1500",
    "--set=broker.heartbeat.interval.ms=300",
    "--set=offsets.topic.num.partitions=3",
]


class Starting:
    """`penstock cluster start` while it runs, and all that it has written."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.folder = folder
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [*executable(), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            # A suite that runs in the background ignores Ctrl-C, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)

    @property
    def text(self) -> str:
        return "".join(self.output)

    @property
    def document(self) -> dict[str, Any]:
        return json.loads((self.folder / "cluster.json").read_text())

    @property
    def bootstrap(self) -> str:
        return str(self.document["bootstrap"])

    def pid(self, node: int) -> int:
        return int(self.document["nodes"][node - 1]["pid"])

    def await_ready(self) -> "Starting":
        eventually(
            lambda: "bootstrap.servers=" in self.text or self.process.poll() is not None, within_s=TIMEOUT_S
        )
        assert self.process.poll() is None, self.text
        return self

    def await_end(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


@contextmanager
def cluster(folder: Path, *words: str) -> Iterator[Starting]:
    starting = Starting(folder, ("cluster", "start", "--dir", str(folder), *words, *QUICK))
    try:
        yield starting
    finally:
        if starting.process.poll() is None:
            starting.process.terminate()
            starting.await_end()


def run(*words: str, code: int | None = 0, given: str = "") -> tuple[str, str]:
    done = subprocess.run(
        [*executable(), *words],
        input=given,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout, done.stderr


def status(bootstrap: str) -> dict[str, Any]:
    """What `cluster status --json` prints, without the start of an interpreter for each look."""
    with open_cluster(ConnectionOptions(bootstrap=bootstrap)) as connected:
        view = describe_cluster(connected, quorum_timeout_s=10)
    return status_document(view, check_health(view))


def test_a_cluster_from_start_to_stop_and_back(tmp_path: Path) -> None:
    with cluster(tmp_path, "--port", "0") as first:
        first.await_ready()
        document = first.document
        assert [node["id"] for node in document["nodes"]] == [1, 2, 3]
        assert all(node["roles"] == ["broker", "controller"] for node in document["nodes"])
        run("topic", "create", "orders", "-p", "6", "-b", first.bootstrap)
        run("produce", "orders", "-b", first.bootstrap, given="one\ntwo\n")

        seen = json.loads(run("cluster", "status", "-b", first.bootstrap, "--json")[0])
        assert seen["cluster_id"] == document["cluster_id"]
        assert len(seen["quorum"]["voters"]) == 3
        assert [(row["node"], row["state"], row["replicas"]) for row in seen["brokers"]] == [
            (1, "active", 6), (2, "active", 6), (3, "active", 6),
        ]  # fmt: skip
        assert "is running" in run("cluster", "start", "--dir", str(tmp_path), code=1)[1]
        run("cluster", "stop", "--dir", str(tmp_path))
        assert first.await_end() == 0, first.text
    assert [node["pid"] for node in first.document["nodes"]] == [None, None, None]

    with cluster(tmp_path) as second:
        second.await_ready()
        kept = ("id", "address", "data_dir", "log")
        assert [[node[name] for name in kept] for node in second.document["nodes"]] == [
            [node[name] for name in kept] for node in document["nodes"]
        ]
        assert second.document["cluster_id"] == document["cluster_id"]
        assert sorted(run("consume", "orders", "-e", "-b", second.bootstrap)[0].split()) == ["one", "two"]
        second.process.send_signal(signal.SIGINT)
        assert second.await_end() == 0, second.text


def test_one_node_grows_into_three_with_its_data(tmp_path: Path) -> None:
    with cluster(tmp_path, "--nodes", "1", "--port", "0") as alone:
        alone.await_ready()
        run("topic", "create", "orders", "-b", alone.bootstrap)
        run("produce", "orders", "-b", alone.bootstrap, given="one\ntwo\n")
        run("consume", "orders", "-e", "--group", "billing", "-b", alone.bootstrap)
        warnings = [found["message"] for found in status(alone.bootstrap)["findings"]]
        assert [text for text in warnings if "__consumer_offsets has 1 of 3 replicas" in text], warnings
        run("cluster", "stop", "--dir", str(tmp_path))

    with cluster(tmp_path, "--nodes", "3") as grown:
        grown.await_ready()
        eventually(
            lambda: len(status(grown.bootstrap)["quorum"]["voters"]) == 3,
            within_s=TIMEOUT_S,
            what="three voters",
        )
        eventually(
            lambda: not _low_internal_topics(grown.bootstrap), what="internal topics with three copies"
        )
        run("cluster", "rebalance", "-b", grown.bootstrap, "--replication-factor", "3", "--yes")
        os.kill(grown.pid(1), signal.SIGKILL)
        eventually(
            lambda: _state_of(grown.bootstrap, 1) != "active",
            within_s=TIMEOUT_S,
            what="node 1 noticed as gone",
        )
        others = ",".join(grown.bootstrap.split(",")[1:])
        # What the one node had, and how far its group had come, is with the others by now.
        assert run("consume", "orders", "-e", "-b", others)[0].split() == ["one", "two"]
        assert run("consume", "orders", "-e", "--group", "billing", "-b", others)[0] == ""


def _low_internal_topics(bootstrap: str) -> list[str]:
    return [f["message"] for f in status(bootstrap)["findings"] if "__consumer_offsets" in f["message"]]


def _state_of(bootstrap: str, node: int) -> str:
    return next(row["state"] for row in status(bootstrap)["brokers"] if row["node"] == node)


def test_a_node_that_dies_and_loses_its_disk_is_told_and_comes_back(tmp_path: Path) -> None:
    with cluster(tmp_path, "--port", "0", "--restart") as running:
        running.await_ready()
        run("topic", "create", "orders", "-p", "3", "-b", running.bootstrap)
        killed = running.pid(2)
        os.kill(killed, signal.SIGKILL)
        shutil.rmtree(tmp_path / "node-2")
        eventually(
            lambda: "node 2 has ended (killed by SIGKILL)" in running.text,
            within_s=TIMEOUT_S,
            what="the news",
        )
        run("produce", "orders", "-b", running.bootstrap, given="one\n")
        eventually(lambda: "node 2 is back" in running.text, within_s=TIMEOUT_S, what="its return")
        assert running.pid(2) != killed
        eventually(
            lambda: not status(running.bootstrap)["troubles"],
            within_s=TIMEOUT_S,
            what="everything in sync and in place",
        )
        eventually(
            lambda: len(status(running.bootstrap)["quorum"]["voters"]) == 3,
            within_s=TIMEOUT_S,
            what="its vote back",
        )
        assert run("consume", "orders", "-e", "-b", running.bootstrap)[0] == "one\n"


def test_a_running_cluster_restarts_a_node_and_grows(tmp_path: Path) -> None:
    at = ("--dir", str(tmp_path))
    with cluster(tmp_path, "--port", "0") as running:
        running.await_ready()
        run("topic", "create", "orders", "-p", "3", "-b", running.bootstrap)
        first = running.pid(2)
        assert "node 2 is back" in run("cluster", "restart", "2", *at)[1]
        assert running.pid(2) != first
        os.kill(running.pid(3), signal.SIGKILL)
        eventually(lambda: "node 3 has ended" in running.text, within_s=TIMEOUT_S, what="the news")
        eventually(
            lambda: "voter 3 is gone: one more loss ends the quorum" in _told(running), what="a finding"
        )
        run("cluster", "restart", "3", *at)
        assert "has no node 9" in run("cluster", "restart", "9", *at, code=2)[1]

        assert "node 4 joined; 4 nodes are up" in run("cluster", "start", "--nodes", "4", *at)[1]
        eventually(
            lambda: _state_of(running.bootstrap, 4) == "active", within_s=TIMEOUT_S, what="the fourth broker"
        )
        assert "is running" in run("cluster", "start", "--nodes", "4", *at, code=1)[1]
        assert len(running.document["nodes"]) == 4
        eventually(
            lambda: not status(running.bootstrap)["troubles"],
            within_s=TIMEOUT_S,
            what="everything in sync and in place",
        )
        run("cluster", "stop", *at)
        assert running.await_end() == 0 or "node 3 has ended" in running.text
    assert "is not running" in run("cluster", "restart", "2", *at, code=1)[1]


def _told(running: Starting) -> str:
    return " | ".join(found["message"] for found in status(running.bootstrap)["findings"])


def test_a_voter_that_is_gone_is_removed_and_acks_all_refused_is_an_error(tmp_path: Path) -> None:
    with cluster(tmp_path, "--port", "0") as running:
        running.await_ready()
        at = ("-b", running.bootstrap)
        run("topic", "create", "orders", "-r", "3", *at, "-c", "min.insync.replicas=3")
        voters = json.loads(run("cluster", "voters", "list", "--json", *at)[0])
        leader = next(row["node"] for row in voters if row["state"] == "leader")
        victim = next(row["node"] for row in voters if row["state"] == "voter")
        assert "is alive" in run("cluster", "voters", "remove", str(victim), "--yes", *at, code=1)[1]
        os.kill(running.pid(victim), signal.SIGKILL)
        eventually(
            lambda: f"voter {victim} is gone: one more loss" in _told(running),
            within_s=TIMEOUT_S,
            what="a finding",
        )
        eventually(
            lambda: "acks=all is refused" in _told(running), within_s=TIMEOUT_S, what="a smaller in-sync set"
        )
        assert "acks=all is refused" in run("cluster", "status", *at, code=1)[0]
        run("cluster", "voters", "remove", str(victim), "--yes", *at)
        left = json.loads(run("cluster", "voters", "list", "--json", *at)[0])
        assert {row["node"] for row in left} == {1, 2, 3} - {victim}
        assert leader in {row["node"] for row in left}
        assert "is not a voter" in run("cluster", "voters", "remove", str(victim), "--yes", *at, code=1)[1]


def test_nodes_end_with_their_supervisor(tmp_path: Path) -> None:
    with cluster(tmp_path, "--nodes", "1", "--port", "0") as running:
        running.await_ready()
        running.process.kill()
        running.await_end()
        run("cluster", "stop", "--dir", str(tmp_path))
    last = (tmp_path / "node-1.log").read_text().splitlines()[-1]
    assert "at once" not in last
    assert (tmp_path / "node-1" / ".kafka_cleanshutdown").exists()


def test_a_node_that_cannot_start_is_shown_with_its_last_words(tmp_path: Path) -> None:
    with cluster(tmp_path, "--port", "0", "--set", "num.partitions=none") as failing:
        assert failing.await_end() == 1
    assert "did not start: exit code 2" in failing.text
    assert "num.partitions" in failing.text
    assert [node["pid"] for node in failing.document["nodes"]] == [None, None, None]


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with cluster(tmp_path, "--nodes", "1", "--port", str(port)) as failing:
            assert failing.await_end() == 1
    assert f"node 1 cannot listen on 127.0.0.1:{port}" in failing.text
    assert not (tmp_path / "cluster.json").exists()


def test_workers_form_a_cluster_on_one_host(tmp_path: Path) -> None:
    words = ("serve", "--workers", "4", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path), *QUICK)
    workers = Starting(tmp_path, words)
    try:
        eventually(
            lambda: "4 nodes are up" in workers.text or workers.process.poll() is not None, within_s=60
        )
        assert workers.process.poll() is None, workers.text
        seen = eventually(
            lambda: _with_voters(workers.bootstrap, 3), within_s=TIMEOUT_S, what="three of the four voting"
        )
        assert {row["rack"] for row in seen["brokers"]} == {os.uname().nodename}
        assert [observer["node"] for observer in seen["quorum"]["observers"]] == [4]
    finally:
        workers.process.terminate()
        assert workers.await_end() == 0, workers.text


def _with_voters(bootstrap: str, count: int) -> dict[str, Any] | None:
    seen = status(bootstrap)
    return seen if len(seen["quorum"]["voters"]) == count and len(seen["brokers"]) == count + 1 else None


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starting]:
    with cluster(tmp_path_factory.mktemp("four"), "--nodes", "4", "--port", "0") as running:
        yield running.await_ready()


def test_rebalance_empties_a_broker_and_fills_it_again(four: Starting) -> None:
    run("topic", "create", "moved", "-p", "8", "-b", four.bootstrap)
    run("produce", "moved", "-b", four.bootstrap, given="".join(f"{n}\n" for n in range(1000)))
    rebalance = ("cluster", "rebalance", "-b", four.bootstrap, "--topic", "moved")

    plan = json.loads(run(*rebalance, "--remove-broker", "4", "--dry-run", "--json")[0])
    assert plan["moves"]
    assert "add --yes" in run(*rebalance, "--remove-broker", "4", code=2)[1]
    assert _held(four.bootstrap, 4) > 0

    out, err = run(*rebalance, "--remove-broker", "4", "--yes")
    assert "replicas then" in out
    assert "done" in err
    # The controller has said so; the broker that is asked for the status may hear of it a moment later.
    eventually(lambda: _held(four.bootstrap, 4) == 0, within_s=TIMEOUT_S, what="broker 4 without replicas")
    assert status(four.bootstrap)["partitions"]["reassigning"] == 0

    run(*rebalance, "--yes", "--throttle", "10000000")
    eventually(lambda: _held(four.bootstrap, 4) > 0, within_s=TIMEOUT_S, what="replicas on broker 4")
    assert "nothing to move" in run(*rebalance, "--yes")[1]
    read = run("consume", "moved", "-e", "-b", four.bootstrap)[0].split()
    assert sorted(map(int, read)) == list(range(1000))


def _held(bootstrap: str, node: int) -> int:
    return int(next(row["replicas"] for row in status(bootstrap)["brokers"] if row["node"] == node))


def test_a_broker_that_is_gone_for_good_is_forgotten(four: Starting) -> None:
    assert "alive" in run("cluster", "unregister", "4", "--yes", "-b", four.bootstrap, code=1)[1]
    os.kill(four.pid(4), signal.SIGKILL)
    eventually(lambda: _state_of(four.bootstrap, 4) == "fenced", within_s=TIMEOUT_S, what="broker 4 fenced")
    run("cluster", "rebalance", "--remove-broker", "4", "--yes", "-b", four.bootstrap)
    run("cluster", "unregister", "4", "--yes", "-b", four.bootstrap)
    assert [row["node"] for row in status(four.bootstrap)["brokers"]] == [1, 2, 3]
