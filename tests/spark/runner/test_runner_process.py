"""`penstock pipeline run` in its own process, watched and stopped from outside."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.spark.source.topics import Topics
from tests.waiting import eventually

from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.pipelines.status import read_statuses, with_lag

EXAMPLE = Path(__file__).with_name("example.py")
#: Spark takes seconds to start on an idle machine, and longer if tests run in parallel.
PATIENCE_S = 800
pytestmark = pytest.mark.timeout(1800)


class Shell:
    """The command, with a folder and a source for the example."""

    def __init__(self, folder: Path, source: str, bootstrap: str) -> None:
        self.folder = folder
        self.diary = folder / "diary"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.environment = kept | {
            "PENSTOCK_BOOTSTRAP": bootstrap,
            "EXAMPLE_FOLDER": str(folder),
            "EXAMPLE_SOURCE": source,
        }

    def __call__(self, *words: str, code: int = 0) -> tuple[str, str]:
        with self.start(*words) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, (words, out, err)
        assert "Traceback" not in err
        return out, err

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "pipeline", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def running(self, name: str) -> Iterator[subprocess.Popen[str]]:
        spark = ("--master", "local[2,4]", "-c", "spark.driver.memory=512m")
        with self.start("run", str(EXAMPLE), "--name", name, *spark) as process:
            try:
                yield process
            finally:
                process.kill()

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", name, "--json")[0])
        return found

    def lines(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []


class Looking:
    """What `penstock pipeline status` shows, without a process for each look."""

    def __init__(self, bootstrap: str) -> None:
        self._board = DocumentStore(Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})))

    def look(self, name: str) -> dict[str, Any]:
        found = read_statuses(self._board).get(name)
        return with_lag(self._board.cluster, found).to_json() if found is not None else {}


@pytest.fixture
def shell(tmp_path: Path, broker: Any, unique: Callable[[str], str]) -> Shell:
    topics = Topics(broker.bootstrap_servers)
    return Shell(tmp_path, topics.create(unique("source")), broker.bootstrap_servers)


def fill(shell: Shell, bootstrap: str, numbers: range) -> None:
    Topics(bootstrap).count(shell.environment["EXAMPLE_SOURCE"], numbers)


@pytest.mark.slow
def test_run_watch_fail_stop_reset_and_end(
    shell: Shell, bootstrap: str, unique: Callable[[str], str]
) -> None:
    name, store = unique("p"), Looking(bootstrap)
    fill(shell, bootstrap, range(100))
    with shell.running(name) as process:

        def status(**wanted: object) -> dict[str, Any]:
            def look() -> dict[str, Any] | None:
                if process.poll() is not None:
                    pytest.fail(f"it ended by itself: {process.communicate()}")
                found = store.look(name)
                return found if all(found.get(key) == value for key, value in wanted.items()) else None

            return eventually(look, within_s=PATIENCE_S, what=f"{wanted} of {store.look(name)}")

        status(state="idle", lag=0)
        found = shell.status(name)
        assert (found["rows"]["in"], found["batch"], found["generation"]) == (100, 0, 1)
        assert found["checkpoint"] == str(shell.folder / "checkpoints" / name / "1")
        _, complaint = shell("run", str(EXAMPLE), "--name", name, code=1)
        assert complaint.startswith(
            f"error: {name} is already running on {found['host']} (process {process.pid})"
        )

        (shell.folder / "fails").touch()
        fill(shell, bootstrap, range(10))
        found = status(state="restarting")
        assert found["error"] == {"kind": "ConnectionError", "message": "the shop is closed"}
        assert found["lag"] == 10
        (shell.folder / "fails").unlink()
        found = status(state="idle", lag=0, error=None)
        assert found["rows"]["in"] == 110
        assert found["restarts"] >= 1

        assert shell("stop", name) == ("", f"{name} stopped\n")
        assert process.wait(PATIENCE_S) == 0
        out, err = process.communicate()
        assert "restarting" in out
        assert "ConnectionError: the shop is closed; restart in" in out
        assert err == ""
    assert shell.status(name)["state"] == "stopped"
    assert (shell.folder / "checkpoints" / name / "spark.log").exists()

    shell("reset", name, "--to", "earliest", "--yes")
    shell.diary.unlink()
    (shell.folder / "holds").touch()
    with shell.running(name) as process:
        eventually(lambda: shell.lines() == ["begun 0"], within_s=PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        # A batch that has started is not interrupted.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        (shell.folder / "holds").unlink()
        assert process.wait(PATIENCE_S) == 0, process.communicate()
    assert shell.lines() == ["begun 0", "done 0 with 110"]
    found = shell.status(name)
    assert (found["state"], found["generation"], found["rows"]["in"]) == ("stopped", 2, 110)
    # The batch is complete: Spark has recorded it.
    [commit] = (shell.folder / "checkpoints" / name / "2").glob("*/commits/0")
    assert commit.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("def broken(:\n", "line 1: invalid syntax"),
        ("import nothing_of_this_name\n", "No module named 'nothing_of_this_name'"),
        ("x = 1 / 0\n", "wrong.py, line 1: ZeroDivisionError: division by zero"),
        ("x = 1\n", "declares no pipeline"),
        (
            "from penstock.spark import pipeline\n"
            "@pipeline('p', source='a', sink='b', delivery='twice')\ndef p(rows): return rows\n",
            "pipeline p: delivery='twice' must be one of at-most-once, at-least-once, exactly-once",
        ),
    ],
)
def test_a_wrong_declaration_is_one_sentence(shell: Shell, content: str, complaint: str) -> None:
    (shell.folder / "wrong.py").write_text(content)
    _, error = shell("run", "wrong.py", code=2)
    assert complaint in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
