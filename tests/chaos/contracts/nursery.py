"""`python -m tests.chaos.contracts.nursery`: has imported everything, and forks a life for each job that it is told.

A life costs a fork then, and not the start of an interpreter. Nothing that belongs to the client library is made here,
for its threads would not live in the children. Commands come as JSON lines, and so does what became of children.
"""

import contextlib
import gc
import importlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from tests.chaos.contracts.jobs import Job
from tests.chaos.network import ROOT

BORN, STOPPED, ENDED = "born", "stopped", "ended"
ANSWER_S = 30.0
#: What applications import when they need it.
NEEDED_LATER = (
    "encodings.idna",
    "kio.schema.api_versions.v3.response",
    "kio.schema.metadata.v12.response",
    "penstock.client.databases.sqlite",
    "penstock.client.wire.settings",
    "penstock.client.databases.sqlite",
    "penstock.client.opentelemetry_spans",
    "psycopg",
)


class Nursery:
    """The hand on it. Any thread may have a life begun; each slot has at most one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.contracts.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._lock = threading.Lock()
        self._news: dict[str, queue.SimpleQueue[tuple[str, int]]] = {}
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._reader.start()

    def begin(self, job: Job) -> "Life":
        with self._lock:
            news = self._news[job.slot] = queue.SimpleQueue()
            assert self._process.stdin is not None
            self._process.stdin.write(job.as_text() + "\n")
            self._process.stdin.flush()
        event, pid = news.get(timeout=ANSWER_S)
        assert event == BORN, f"{job.slot}: {event}"
        return Life(pid, news)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            slot, event, number = json.loads(line)
            with self._lock:
                self._news[slot].put((event, number))

    def close(self) -> None:
        """Children go with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)


class Life:
    def __init__(self, pid: int, news: "queue.SimpleQueue[tuple[str, int]]") -> None:
        self._pid = pid
        self._news = news
        #: As `os.waitpid` tells it, once it has ended.
        self.status: int | None = None
        self.is_frozen = False

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended; returns early if it stands still."""
        if self.status is None:
            with contextlib.suppress(queue.Empty):
                event, status = self._news.get(timeout=timeout_s)
                if event == STOPPED:
                    self.is_frozen = True
                else:
                    self.status = status
        return self.status is not None

    def kill(self) -> None:
        """Returns when it has ended."""
        self._signal(signal.SIGKILL)
        while not self.wait(ANSWER_S):
            assert self.is_frozen, f"{self._pid} does not die"

    def ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)

    def show_stack(self) -> None:
        self._signal(signal.SIGUSR1)

    def thaw(self) -> None:
        self.is_frozen = False
        self._signal(signal.SIGCONT)

    @property
    def was_killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status)

    def _signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)


class _Forking:
    def __init__(self) -> None:
        self._slots: dict[int, str] = {}
        self._rest = b""

    def serve(self) -> None:
        from tests.chaos.contracts import life

        for name in NEEDED_LATER:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # children need not copy what they never change
        woken, waking = socket.socketpair()
        for end in (woken, waking):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
                self._reap()
            if 0 in ready and not self._take_orders(life.begin):
                break
        for pid in self._slots:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _take_orders(self, begin: Any) -> bool:
        """False when there will be no more."""
        data = os.read(0, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            job = Job.from_text(line.decode())
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                begin(job)
            self._slots[pid] = job.slot
            self._tell(job.slot, BORN, pid)
        return bool(data)

    def _reap(self) -> None:
        while self._slots:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self._tell(self._slots[pid], STOPPED, pid)
            else:
                self._tell(self._slots.pop(pid), ENDED, status)

    def _tell(self, slot: str, event: str, number: int) -> None:
        os.write(1, json.dumps([slot, event, number]).encode() + b"\n")


if __name__ == "__main__":
    _Forking().serve()
