"""Several nodes as processes: started together, watched, restarted where wanted, and stopped without hurry or loss.

The one supervisor, for `cluster start` and for `serve --workers`.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.cli import notify
from penstock.cli.failure import Failure

#: Longer than a node gives itself to hand over and to finish what it owes.
STOP_DEADLINE_S = 30.0
#: A second signal within this time is the first one by another way: `timeout` sends it to the process and its group.
IMPATIENT_AFTER_S = 0.5
RESTART_PAUSE_MIN_S = 1.0
RESTART_PAUSE_MAX_S = 30.0
LOG_LINES_SHOWN = 15
LOG_BYTES_READ = 16 << 10


class Node(NamedTuple):
    """What it takes to run one: its command, and the file for its output (None: ours)."""

    id: int
    command: tuple[str, ...]
    log: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Whom the supervisor tells what happens; `pids` has None for a node that does not run."""

    pids_changed: Callable[[dict[int, int | None]], None]
    all_ready: Callable[[], Awaitable[None]]
    say: Callable[[str], None]


class Supervisor:
    def __init__(
        self, nodes: Sequence[Node], watcher: Watcher, *, restart: bool = False, inherited: Sequence[int] = ()
    ) -> None:
        """`inherited` are descriptors that the nodes hold open for as long as they live."""
        self._nodes = list(nodes)
        self._watcher = watcher
        self._restart = restart
        self._inherited = tuple(inherited)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready = {node.id: asyncio.Event() for node in nodes}
        self._stop = asyncio.Event()
        self._stopped_at = 0.0
        self._log_starts: dict[int, int] = {}  # where in its log a node's present life begins
        self._minding: dict[int, asyncio.Task[None]] = {}
        self._reported: set[int] = set()  # pids that were ready at some time
        self._minds = asyncio.Event()  # all that were to start have started
        self._changed = asyncio.Event()  # there is somebody more to mind
        self._wanted_back: dict[int, asyncio.Future[None]] = {}  # nodes that were asked to restart
        self._socket_path = ""

    async def run(self) -> int:
        """Until told to stop; returns 1 when a node did not end cleanly. Raises Failure when a node does not start,
        or none is left."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        folder = tempfile.mkdtemp(prefix="penstock-")
        self._socket_path = os.path.join(folder, "ready")
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Reports(self._has_reported), local_addr=self._socket_path, family=_unix()
        )
        try:
            return await self._live()
        finally:
            transport.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def _live(self) -> int:
        for node in self._nodes:
            await self._launch(node)
        watching = [asyncio.create_task(self._watch_start(node)) for node in self._nodes]
        try:
            await self._unless_stopped(*watching)
            if not self._stop.is_set():
                await self._unless_stopped(asyncio.ensure_future(self._watcher.all_ready()))
                await self._keep_running()
        finally:
            for task in watching:
                task.cancel()
            await self._end_all()
        return 1 if any(process.returncode for process in self._processes.values()) else 0

    # -- coming --------------------------------------------------------------------------------------

    async def _launch(self, node: Node) -> None:
        self._ready[node.id].clear()
        output = None
        if node.log is not None:
            output = os.open(node.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._log_starts[node.id] = os.fstat(output).st_size
        try:
            # A group of its own: a Ctrl-C at the terminal is ours to pass on, in our own time.
            self._processes[node.id] = await asyncio.create_subprocess_exec(
                *node.command,
                stdin=asyncio.subprocess.PIPE,  # held open: its end is the end of us, and the node's
                stdout=output,
                stderr=output,
                env={**os.environ, notify.VARIABLE: self._socket_path},
                process_group=0,
                pass_fds=self._inherited,
            )
        finally:
            if output is not None:
                os.close(output)
        if self._processes[node.id].pid in self._reported:
            self._ready[node.id].set()  # it was ready before we knew its pid
        self._tell_pids()

    async def _watch_start(self, node: Node) -> None:
        """Returns when it is ready. Raises Failure when it ends before."""
        process = self._processes[node.id]
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._ready[node.id].wait())
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() and not self._stop.is_set():
                raise Failure(
                    f"node {node.id} did not start: {_ending(ended.result())}{self._last_lines(node)}",
                    hint=None if node.log is None else f"all of it is in {node.log}",
                )
        finally:
            ended.cancel()
            ready.cancel()

    def _last_lines(self, node: Node) -> str:
        """The end of its log, to be shown below a sentence."""
        if node.log is None:
            return ""
        with suppress(OSError), node.log.open("rb") as file:
            file.seek(max(self._log_starts[node.id], node.log.stat().st_size - LOG_BYTES_READ))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            return "".join(f"\n  {line}" for line in lines)
        return ""

    def _has_reported(self, pid: int) -> None:
        self._reported.add(pid)
        for node_id, process in self._processes.items():
            if process.pid == pid:
                self._ready[node_id].set()

    async def _unless_stopped(self, *tasks: "asyncio.Task[None]") -> None:
        """Until all are done, the first has failed, or we are told to stop."""
        stopped = asyncio.create_task(self._stop.wait())
        together = asyncio.gather(*tasks)
        try:
            await asyncio.wait((together, stopped), return_when=asyncio.FIRST_COMPLETED)
            if together.done():
                together.result()
        finally:
            stopped.cancel()
            together.cancel()
            with suppress(asyncio.CancelledError, Failure):
                await together

    # -- staying -------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        for node in self._nodes:
            self._mind_from_now_on(node)
        self._minds.set()
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set() and any(not task.done() for task in self._minding.values()):
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                waiting = {stopped, changed, *(task for task in self._minding.values() if not task.done())}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done - {stopped, changed}:
                    task.result()
        finally:
            for task in (stopped, *self._minding.values()):
                task.cancel()
        if not self._stop.is_set():
            raise Failure("no node is left")

    def _mind_from_now_on(self, node: Node) -> None:
        self._minding[node.id] = asyncio.create_task(self._mind(node))
        self._changed.set()

    async def add(self, node: Node) -> None:
        """One more, while the others run. Raises Failure when it does not start; then it is none of them."""
        await self._minds.wait()
        self._ready[node.id] = asyncio.Event()
        await self._launch(node)
        await self._watch_start(node)
        self._nodes.append(node)
        self._mind_from_now_on(node)
        self._watcher.say(f"node {node.id} has joined")

    async def restart(self, node_id: int) -> None:
        """Stop a node without hurry and start it again, or start one that has ended. Raises Failure."""
        await self._minds.wait()
        node = next(node for node in self._nodes if node.id == node_id)
        if self._minding[node_id].done():
            await self._launch(node)
            self._mind_from_now_on(node)
            await self._watch_start(node)
            self._watcher.say(f"node {node_id} is back")
            return
        back = self._wanted_back[node_id] = asyncio.get_running_loop().create_future()
        await self._end(self._processes[node_id], f"node {node_id}")
        await back

    async def _end(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Without hurry, and by force where that does not help."""
        if process.returncode is not None:
            return
        os.kill(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await process.wait()
        except TimeoutError:
            self._watcher.say(f"{name} has not stopped within {STOP_DEADLINE_S:g} s, killing it")
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    async def _mind(self, node: Node) -> None:
        """Returns when the node has ended and is not to come back."""
        pause_s = RESTART_PAUSE_MIN_S
        while True:
            code = await self._processes[node.id].wait()
            if self._stop.is_set():
                return
            self._tell_pids()
            if node.id not in self._wanted_back:
                where = "" if node.log is None else f"; its log is {node.log}"
                again = f", starting it again in {pause_s:g} s" if self._restart else ""
                self._watcher.say(f"node {node.id} has ended ({_ending(code)}){again}{where}")
                if not self._restart:
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)
            await self._launch(node)
            back = self._wanted_back.pop(node.id, None)
            try:
                await self._watch_start(node)
            except Failure as failure:
                if back is not None:
                    back.set_exception(failure)
                continue
            pause_s = RESTART_PAUSE_MIN_S
            self._watcher.say(f"node {node.id} is back")
            if back is not None:
                back.set_result(None)

    # -- going ---------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._stop.is_set():
            self._stopped_at = now
        elif now - self._stopped_at > IMPATIENT_AFTER_S:
            self._watcher.say("killing what is left; the next start recovers")
            self._signal_all(signal.SIGKILL)
        self._stop.set()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._alive():
            # Not the process's own method, which may reap it behind the loop's back.
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _alive(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self._processes.values() if process.returncode is None]

    async def _end_all(self) -> None:
        """Together: there is nobody to hand over to when all of them go."""
        if self._alive():
            self._watcher.say("stopping")
        self._stop.set()
        self._signal_all(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._all_ended()
        except TimeoutError:
            self._watcher.say(f"not stopped within {STOP_DEADLINE_S:g} s, killing; the next start recovers")
            self._signal_all(signal.SIGKILL)
            await self._all_ended()
        self._tell_pids()

    async def _all_ended(self) -> None:
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    def _tell_pids(self) -> None:
        self._watcher.pids_changed(
            {
                id: None if process.returncode is not None else process.pid
                for id, process in self._processes.items()
            }
        )


class _Reports(asyncio.DatagramProtocol):
    def __init__(self, is_ready: Callable[[int], None]) -> None:
        self._is_ready = is_ready

    def datagram_received(self, data: bytes, addr: object) -> None:
        pid = notify.pid_that_is_ready(data)
        if pid is not None:
            self._is_ready(pid)


def _unix() -> int:
    import socket

    return socket.AF_UNIX


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
