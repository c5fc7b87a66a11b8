"""Asking the process that runs a local cluster for something, from another shell.

A request is a file in the cluster's folder, and SIGUSR1 says that there is one. The answer takes its place. Whoever may
write into the folder and signal the process may do all that it does, so this needs no other protection.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.cli.cluster_folder import LOCK, ClusterFolder
from penstock.cli.failure import Failure

_REQUESTS = "requests"
_ASKED, _ANSWERED = ".request", ".answer"
#: Longer than a node may take to stop and to start.
PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.05

Request = dict[str, int]


def ask(place: ClusterFolder, request: Request) -> str:
    """What has been done. Raises Failure."""
    cluster = place.load()
    if cluster is None or cluster.supervisor is None or not is_ours(cluster.supervisor, place.path):
        raise Failure(f"nobody watches over the cluster in {place.path}")
    folder = place.path / _REQUESTS
    if not folder.is_dir():
        # SIGUSR1 would end a process that does not expect it.
        raise Failure(
            f"the process that runs the cluster ({cluster.supervisor}) takes no requests",
            hint="it is still starting, or of an earlier release: then stop the cluster and start it again",
        )
    path = folder / (uuid.uuid4().hex + _ASKED)
    _write(path, request)
    os.kill(cluster.supervisor, signal.SIGUSR1)
    answer = path.with_suffix(_ANSWERED)
    deadline = time.monotonic() + PATIENCE_S
    while not answer.exists():
        if time.monotonic() > deadline or not is_ours(cluster.supervisor, place.path):
            path.unlink(missing_ok=True)
            raise Failure(f"the process that runs the cluster ({cluster.supervisor}) does not answer")
        time.sleep(_LOOK_EVERY_S)
    told = json.loads(answer.read_text())
    answer.unlink()
    if told["error"] is not None:
        raise Failure(told["error"], hint=told["hint"])
    return str(told["done"])


@contextmanager
def answering(place: ClusterFolder, carry_out: Callable[[Request], Awaitable[str]]) -> Iterator[None]:
    """In the event loop of the supervisor: one request after the other."""
    loop = asyncio.get_running_loop()
    turn = asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def answer_all() -> None:
        async with turn:
            for path in sorted((place.path / _REQUESTS).glob("*" + _ASKED)):
                told: dict[str, Any] = {"done": None, "error": None, "hint": None}
                try:
                    told["done"] = await carry_out(json.loads(path.read_text()))
                except Failure as failure:
                    told |= {"error": failure.message, "hint": failure.hint}
                path.unlink(missing_ok=True)
                _write(path.with_suffix(_ANSWERED), told)

    def begin() -> None:
        task = loop.create_task(answer_all())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGUSR1, begin)
    shutil.rmtree(place.path / _REQUESTS, ignore_errors=True)
    (place.path / _REQUESTS).mkdir()
    try:
        yield
    finally:
        # The handler stays: somebody may have looked for the folder just before.
        shutil.rmtree(place.path / _REQUESTS, ignore_errors=True)
        for task in tasks:
            task.cancel()


def _write(path: Path, document: object) -> None:
    """Whole, or not there."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document))
    os.replace(temporary, path)


def is_ours(pid: int, folder: Path) -> bool:
    """The lock is held open by the supervisor and its nodes, and by nobody else."""
    descriptors = f"/proc/{pid}/fd"
    if sys.platform != "linux":
        return True
    with suppress(OSError):
        return any(
            os.path.samefile(os.path.join(descriptors, name), folder / LOCK)
            for name in os.listdir(descriptors)
            if os.path.exists(os.path.join(descriptors, name))
        )
    return False
