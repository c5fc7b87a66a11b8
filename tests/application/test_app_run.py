"""`penstock app run`: applications by import path, in a process of their own, with restarts when a file changes."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.application.apps import Program

from penstock.cli.app import load_application
from penstock.cli.errors import CommandError
from penstock.client import Penstock

PROGRAM = """
from penstock.client import Penstock

app = Penstock("{servers}", settings={{"session.timeout.ms": 2000, "heartbeat.interval.ms": 200}})

@app.subscribe("{topic}", group="{topic}-{name}")
def {name}(value: int) -> None:
    print(f"{name} has {{value}}\\n", end="", flush=True)  # one write, as several handlers print at the same time

def make() -> Penstock:
    return app
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def begin(*words: str) -> Program:
        command = [sys.executable, "-m", "penstock", "app", "run", *words]
        programs.append(Program(*command, folder=tmp_path))
        return programs[-1]

    yield begin
    for each in programs:
        each.kill()


@pytest.fixture
def write(tmp_path: Path, bootstrap: str, topic: str) -> Callable[[str, str], Path]:
    def written(path: str, name: str) -> Path:
        place = tmp_path / path
        place.parent.mkdir(exist_ok=True)
        place.write_text(PROGRAM.format(servers=bootstrap, topic=topic, name=name))
        return place

    return written


def test_several_applications_run_until_they_are_told_to_stop(
    app: Penstock, topic: str, start: Callable[..., Program], write: Callable[[str, str], Path]
) -> None:
    write("shop/bills.py", "bill")
    write("stock.py", "take")
    app.publish(topic, 7)
    program = start("shop.bills:app", "stock:make")
    program.await_line("bill has 7")
    program.await_line("take has 7")
    assert program.end() == 0, program.lines


@pytest.mark.parametrize("elsewhere", [[], ["--app-dir", "elsewhere"]])
def test_it_starts_again_when_its_file_changes(
    app: Penstock,
    topic: str,
    start: Callable[..., Program],
    write: Callable[[str, str], Path],
    elsewhere: list[str],
) -> None:
    path = write("bills.py", "bill")
    app.publish(topic, 1)
    (path.parent / "elsewhere").mkdir()
    program = start("bills.py", "--reload", *elsewhere)
    program.await_line("bill has 1")
    path.write_text("def broken(:\n")
    program.await_line("bills.py has changed, restarting")
    program.await_line("cannot be imported: invalid syntax")
    program.await_line("waiting for a change")
    write("bills.py", "charge")
    program.await_line("charge has 1")
    assert program.end() == 0, program.lines


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_it_ends_with_what_starts_it_again(
    app: Penstock,
    topic: str,
    start: Callable[..., Program],
    write: Callable[[str, str], Path],
    number: signal.Signals,
) -> None:
    """A terminal that is closed takes the process that watches files, and must not leave the application behind."""
    write("bills.py", "bill")
    app.publish(topic, 1)
    ignored = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # under nohup, processes inherit that it is ignored
    try:
        program = start("bills:app", "--reload")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    program.await_line("bill has 1")
    program.end(number)
    assert not program.is_printing, "the application still has its output open"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere:app", "module nowhere does not exist"),
        ("nowhere.py:app", "file nowhere.py does not exist"),
        ("shop.nowhere:app", "module shop.nowhere does not exist"),
        ("bills:none", "bills has no none"),
        ("bills:Penstock", "bills:Penstock is not an application but type"),
        (":app", "names no module"),
        ("broken:app", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("runs:app", 'put it under `if __name__ == "__main__":` ('),
        ("runs_async:app", 'put it under `if __name__ == "__main__":` ('),
        ("refused:app", "retry='often' must be a Backoff or the number of attempts"),
        ("empty", "names no application, and empty has none"),
        ("empty:app", "empty has no app"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, words: str
) -> None:
    (tmp_path / "bills.py").write_text(PROGRAM.format(servers="127.0.0.1:1", topic="orders", name="bill"))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("")
    bills = (tmp_path / "bills.py").read_text()
    (tmp_path / "runs.py").write_text(f"{bills}\napp.run()\n")
    (tmp_path / "runs_async.py").write_text(f"import asyncio\n{bills}\nasyncio.run(app.arun())\n")
    (tmp_path / "refused.py").write_text(bills.replace("group=", "retry='often', group="))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bills", "broken", "empty", "runs", "runs_async", "refused"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(CommandError) as failed:
        load_application(target)
    assert words in failed.value.message
    if "cannot be imported" in failed.value.message and "async" not in target:
        assert f"({tmp_path}/" in failed.value.message, "the line is the user's"


def test_a_command_that_fails_shows_no_traceback(start: Callable[..., Program], tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("from penstock.client import Penstock\napp = Penstock('127.0.0.1:1')\n")
    for target, words, code in (
        ("idle:app", "has no subscription", 1),
        ("nowhere:app", "module nowhere does not exist", 2),
    ):
        program = start(target)
        assert program.wait() == code
        assert any(words in line for line in program.lines)
        assert not any("Traceback" in line for line in program.lines)
