"""Load generator processes: forked, counted in shared memory, moved from phase to phase by the driver."""

import ctypes
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple, Self

from benchmarks.brokers import procfs

# The generators start from memory that is already filled with their frames, so they must be forks.
_FORK = multiprocessing.get_context("fork")
_STARTUP_S = 60.0
_SHUTDOWN_S = 120.0


class Phase(IntEnum):
    PREPARE = 0
    RUN = 1
    MEASURE = 2
    #: Producers send no more and wait for what is in flight.
    STOP = 3
    #: Consumers read to the end and leave.
    DRAIN = 4


class Counters(NamedTuple):
    """The record count comes last: the lag is computed from where it lies."""

    requests: int
    records: int

    def since(self, earlier: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(self, earlier, strict=True)))


_FIELDS = 1 + len(Counters._fields)


class WorkerFailed(Exception):
    """A load generator ended with an error; the message carries its traceback."""


class Slot:
    """One worker's place in the shared block: it reads the phase and writes its counters."""

    def __init__(self, shared: Any, index: int, producers: int) -> None:
        self._shared = shared
        self._at = 1 + index * _FIELDS
        self._record_counters = range(_FIELDS, len(shared), _FIELDS)
        self._producers = producers

    @property
    def phase(self) -> int:
        return int(self._shared[0])

    def set_ready(self) -> None:
        self._shared[self._at] = 1

    @property
    def is_ready(self) -> bool:
        return bool(self._shared[self._at])

    def wait_for(self, phase: Phase) -> None:
        while self._shared[0] < phase:
            time.sleep(0.001)

    def publish(self, requests: int, records: int) -> None:
        self._shared[self._at + 1 : self._at + _FIELDS] = (requests, records)

    def lag_records(self) -> int:
        """How far all consumers together are behind all producers."""
        counts = [self._shared[at] for at in self._record_counters]
        return int(sum(counts[: self._producers]) - sum(counts[self._producers :]))

    def read(self) -> Counters:
        return Counters(*self._shared[self._at + 1 : self._at + _FIELDS])


Work = Callable[..., Any]


class Job(NamedTuple):
    """What one process does: `work(slot, *arguments)`; what it returns comes back to the driver."""

    work: Work
    arguments: tuple[Any, ...]


class LoadProcesses:
    """Producers and consumers of one run. Leaving the context ends whatever still runs."""

    def __init__(self, producers: Sequence[Job], consumers: Sequence[Job]) -> None:
        self._shared = RawArray(ctypes.c_int64, 1 + (len(producers) + len(consumers)) * _FIELDS)
        self._workers = [
            _Worker(Slot(self._shared, index, len(producers)), job)
            for index, job in enumerate((*producers, *consumers))
        ]
        self._producers = self._workers[: len(producers)]
        self._consumers = self._workers[len(producers) :]

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _STARTUP_S
        try:
            while not all(worker.slot.is_ready for worker in self._workers):
                self._check(deadline, "load generators did not become ready")
                time.sleep(0.002)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def enter(self, phase: Phase, duration_s: float = 0) -> None:
        """Start a phase and stay in it for a while, watching for workers that fail."""
        self._shared[0] = phase
        end = time.monotonic() + duration_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
            self._check(None, "")

    def produced(self) -> Counters:
        return _total(self._producers)

    def consumed(self) -> Counters:
        return _total(self._consumers)

    def cpu_seconds(self) -> float:
        return sum(worker.cpu_seconds() for worker in self._workers)

    def finish(self) -> tuple[list[Any], list[Any]]:
        """What producers and consumers return, once all was acknowledged and all was read."""
        self.enter(Phase.STOP)
        produced = self._results(self._producers)
        self.enter(Phase.DRAIN)
        return produced, self._results(self._consumers)

    def _results(self, workers: "Sequence[_Worker]") -> list[Any]:
        deadline = time.monotonic() + _SHUTDOWN_S
        while not all(worker.is_done() for worker in workers):
            self._check(deadline, "load generators did not finish")
            time.sleep(0.002)
        return [worker.result for worker in workers]

    def _check(self, deadline: float | None, complaint: str) -> None:
        for worker in self._workers:
            worker.is_done()
        if deadline is not None and time.monotonic() > deadline:
            raise WorkerFailed(complaint)


class _Worker:
    def __init__(self, slot: Slot, job: Job) -> None:
        self.slot = slot
        self.result: Any = None
        self._done = False
        self._pipe, theirs = _FORK.Pipe(duplex=False)
        self._process: BaseProcess = _FORK.Process(target=_main, args=(theirs, slot, job), daemon=True)
        self._process.start()
        theirs.close()

    def is_done(self) -> bool:
        if not self._done and self._pipe.poll():
            try:
                error, self.result = self._pipe.recv()
            except EOFError:
                error = f"load generator {self._process.pid} was killed"
            self._done = True
            if error:
                raise WorkerFailed(error)
        return self._done

    def cpu_seconds(self) -> float:
        assert self._process.pid is not None, "not started"
        return procfs.cpu_seconds(self._process.pid)

    def end(self) -> None:
        if not self._done:
            self._process.kill()
        self._process.join()
        self._pipe.close()


def _main(pipe: Pipe, slot: Slot, job: Job) -> None:
    outcome: tuple[str | None, Any]
    try:
        outcome = (None, job.work(slot, *job.arguments))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    pipe.send(outcome)
    pipe.close()
    # A librdkafka thread that still runs must not see the interpreter taken apart.
    os._exit(0)


def _total(workers: Sequence[_Worker]) -> Counters:
    counters = [worker.slot.read() for worker in workers]
    return Counters(*(sum(column) for column in zip(*counters, strict=True))) if counters else Counters(0, 0)
