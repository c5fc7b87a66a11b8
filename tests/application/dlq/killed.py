"""`penstock dlq` in processes that die: forked from one that has loaded everything, each with a point to be killed at.

python -m tests.application.dlq.killed reads runs as JSON lines: [{"words": [...], "ambush": "sent:3", "mutation": ""}],
starts those of a line at the same time, and answers with their exit codes, negative for those that were killed.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from penstock.cli import commands as _app  # loaded before anybody is forked
from penstock.cli import main
from penstock.client.deadletters import replay, writer
from penstock.client.wire import transactions
from penstock.client.wire.producer import RawProducer
from penstock.spark.replay.lock import SparkReplayLock

#: What is wrapped, and whether the process dies before or after it: on the way to the turn,
BEFORE_WORK: dict[str, tuple[Any, str, bool]] = {
    "in the turn": (transactions, "end_transaction", True),
    "turn taken": (SparkReplayLock, "take", True),
    "begun": (RawProducer, "init", True),
    "list read": (replay, "read_resolutions", True),
}
#: and from then on.
AT_WORK: dict[str, tuple[Any, str, bool]] = {
    "sent": (RawProducer, "send", True),
    "acknowledged": (RawProducer, "flush", True),
    "before the end": (transactions, "end_transaction", False),
    "after the end": (transactions, "end_transaction", True),
}
#: Small, so that there are many transactions.
LETTERS_IN_ONE = 4


class Run(NamedTuple):
    words: Sequence[str]
    #: POINT:N dies the Nth time; empty for one that lives.
    ambush: str = ""
    mutation: str = ""


# In the process that dies


def _lay(ambush: str) -> None:
    name, _, number = ambush.rpartition(":")
    if name in BEFORE_WORK:
        _wrap(*BEFORE_WORK[name], int(number))
        return
    read_resolutions = replay.read_resolutions

    def read_and_lay(*args: Any, is_settled: bool) -> Any:
        answer = read_resolutions(*args, is_settled=is_settled)
        if is_settled:
            _wrap(*AT_WORK[name], int(number))
        return answer

    replay.read_resolutions = read_and_lay  # type: ignore[attr-defined]


def _wrap(owner: Any, attribute: str, dies_after: bool, number: int) -> None:
    real, passed = getattr(owner, attribute), itertools.count(1)

    def wrapped(*args: Any, **options: Any) -> Any:
        is_now = next(passed) == number
        if is_now and not dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*args, **options)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, attribute, wrapped)


def _write_without_marks(desk: Any, entries: Any) -> Any:
    sent = desk._send(writer.by_topic_partition(entry.out for entry in entries))
    desk._producer.end(commit=True)
    return sent


def _write_marks_afterwards(desk: Any, entries: Any) -> Any:
    sent = _write_without_marks(desk, entries)
    desk._send(writer.by_topic_partition(desk._resolution_record(entry) for entry in entries))
    desk._producer.end(commit=True)
    return sent


def _write_marks_first(desk: Any, entries: Any) -> Any:
    desk._send(writer.by_topic_partition(desk._resolution_record(entry) for entry in entries))
    desk._producer.end(commit=True)
    return _write_without_marks(desk, entries)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "": lambda: None,
    "without marks": lambda: mock.patch.object(
        writer.DeadLetterWriter, "write_all", _write_without_marks
    ).start(),
    "marks afterwards": lambda: mock.patch.object(
        writer.DeadLetterWriter, "write_all", _write_marks_afterwards
    ).start(),
    "marks first": lambda: mock.patch.object(
        writer.DeadLetterWriter, "write_all", _write_marks_first
    ).start(),
}


def _live(run: Run) -> int:
    """Once, and then never again: what is changed here stays changed."""
    replay.ENTRIES_MAX = LETTERS_IN_ONE  # type: ignore[misc]
    MUTATIONS[run.mutation]()
    if run.ambush:
        _lay(run.ambush)
    return main(list(run.words))


def _fork(run: Run) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        code = _live(run)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def serve() -> None:
    assert _app.root_app is not None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what commands print is no answer
    for line in sys.stdin:
        children = [_fork(Run(**each)) for each in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=answers, flush=True)


# In the test


class Executioner:
    """Has runs killed."""

    def __init__(self, log: Any = subprocess.DEVNULL) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.application.dlq.killed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def __enter__(self) -> "Executioner":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    def run(self, *runs: Run) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([each._asdict() for each in runs]), file=self._process.stdin, flush=True)
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes


if __name__ == "__main__":
    serve()
