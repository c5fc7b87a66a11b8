"""Runs several nodes as processes: starts them together, watches them, restarts them if wanted, and stops them cleanly.

There is one supervisor, for `cluster start` and for `serve --workers`.
"""

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.cli import os_process
from penstock.cli.errors import CommandError
from penstock.protocol.backoff import ExponentialBackoff

#: Longer than a node takes at most to hand over leadership and finish pending work.
STOP_DEADLINE_S = 30.0
#: A second signal within this time is a duplicate of the first: `timeout` signals both the process and its group.
SECOND_SIGNAL_AFTER_S = 0.5
RESTART_PAUSE = ExponentialBackoff(base_ms=1_000, cap_ms=30_000)
LOG_LINES_SHOWN = 15
LOG_BYTES_READ = 16 << 10


class NodeCommand(NamedTuple):
    """How to run a node: its command, and the file for its output (None: the supervisor's own output).

    `environment` has the settings that are secret: other users can see the arguments of a process.
    """

    id: int
    command: tuple[str, ...]
    log: Path | None
    environment: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorCallbacks:
    """Called by the supervisor on events; `pids` has None for a node that does not run."""

    pids_changed: Callable[[dict[int, int | None]], None]
    all_ready: Callable[[], Awaitable[None]]
    report: Callable[[str], None]


class Supervisor:
    def __init__(
        self,
        nodes: Sequence[NodeCommand],
        watcher: SupervisorCallbacks,
        *,
        restart: bool = False,
        inherited: Sequence[int] = (),
    ) -> None:
        """`inherited` are descriptors that the nodes keep open as long as they live."""
        self._nodes = list(nodes)
        self._callbacks = watcher
        self._restart = restart
        self._inherited = tuple(inherited)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready = {node.id: asyncio.Event() for node in nodes}
        self._stop = asyncio.Event()
        self._stopped_at = 0.0
        self._log_starts: dict[
            int, int
        ] = {}  # the size of a node's log file when its current process started
        self._monitors: dict[int, asyncio.Task[None]] = {}
        self._ready_pids: set[int] = set()  # pids that were ready at some time
        self._all_started = asyncio.Event()  # all initial nodes have started
        self._nodes_changed = asyncio.Event()  # there is a new monitor to wait for
        self._requested_restarts: dict[
            int, asyncio.Future[None]
        ] = {}  # by node id, done when the node is back
        self._socket_path = ""

    async def run(self) -> int:
        """Runs until a signal stops it. Returns 1 when a node did not end cleanly.

        Raises CommandError when a node does not start, or none is left.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        folder = tempfile.mkdtemp(prefix="penstock-")
        self._socket_path = os.path.join(folder, "ready")
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _ReadinessProtocol(self._on_ready),
            local_addr=self._socket_path,
            family=socket.AF_UNIX,
        )
        try:
            return await self._run_nodes()
        finally:
            transport.close()
            shutil.rmtree(folder, ignore_errors=True)

    async def _run_nodes(self) -> int:
        for node in self._nodes:
            await self._launch(node)
        watching = [asyncio.create_task(self._watch_start(node)) for node in self._nodes]
        try:
            await self._wait_unless_stopped(*watching)
            if not self._stop.is_set():
                await self._wait_unless_stopped(asyncio.ensure_future(self._callbacks.all_ready()))
                await self._keep_running()
        finally:
            for task in watching:
                task.cancel()
            await self._stop_all()
        return 1 if any(process.returncode for process in self._processes.values()) else 0

    # -- starting ------------------------------------------------------------------------------------

    async def _launch(self, node: NodeCommand) -> None:
        self._ready[node.id].clear()
        output = None
        if node.log is not None:
            output = os.open(node.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._log_starts[node.id] = os.fstat(output).st_size
        try:
            # Its own process group, so that Ctrl-C at the terminal reaches only the supervisor, which stops the nodes.
            self._processes[node.id] = await asyncio.create_subprocess_exec(
                *node.command,
                stdin=asyncio.subprocess.PIPE,  # held open: when the supervisor dies it closes, and the node stops
                stdout=output,
                stderr=output,
                env={**os.environ, **node.environment, os_process.NOTIFY_SOCKET: self._socket_path},
                process_group=0,
                pass_fds=self._inherited,
            )
        finally:
            if output is not None:
                os.close(output)
        if self._processes[node.id].pid in self._ready_pids:
            self._ready[node.id].set()  # it reported ready before we knew its pid
        self._report_pids()

    async def _watch_start(self, node: NodeCommand) -> None:
        """Returns when the node is ready. Raises CommandError when it ends before."""
        process = self._processes[node.id]
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._ready[node.id].wait())
        try:
            await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() and not self._stop.is_set():
                raise CommandError(
                    f"node {node.id} did not start: {_exit_text(ended.result())}{self._last_lines(node)}",
                    hint=None if node.log is None else f"its log is {node.log}",
                )
        finally:
            ended.cancel()
            ready.cancel()

    def _last_lines(self, node: NodeCommand) -> str:
        """The end of the node's log, indented to be shown below a message."""
        if node.log is None:
            return ""
        with suppress(OSError), node.log.open("rb") as file:
            file.seek(max(self._log_starts[node.id], node.log.stat().st_size - LOG_BYTES_READ))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            return "".join(f"\n  {line}" for line in lines)
        return ""

    def _on_ready(self, pid: int) -> None:
        self._ready_pids.add(pid)
        for node_id, process in self._processes.items():
            if process.pid == pid:
                self._ready[node_id].set()

    async def _wait_unless_stopped(self, *tasks: "asyncio.Task[None]") -> None:
        """Waits until all tasks are done, the first fails, or a signal stops the supervisor."""
        stopped = asyncio.create_task(self._stop.wait())
        together = asyncio.gather(*tasks)
        try:
            await asyncio.wait((together, stopped), return_when=asyncio.FIRST_COMPLETED)
            if together.done():
                together.result()
        finally:
            stopped.cancel()
            together.cancel()
            with suppress(asyncio.CancelledError, CommandError):
                await together

    # -- running -------------------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        for node in self._nodes:
            self._start_monitor(node)
        self._all_started.set()
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set() and any(not task.done() for task in self._monitors.values()):
                self._nodes_changed.clear()
                changed = asyncio.create_task(self._nodes_changed.wait())
                waiting = {stopped, changed, *(task for task in self._monitors.values() if not task.done())}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                for task in done - {stopped, changed}:
                    task.result()
        finally:
            for task in (stopped, *self._monitors.values()):
                task.cancel()
        if not self._stop.is_set():
            raise CommandError("all nodes have ended", hint="--restart starts a node again when it ends")

    def _start_monitor(self, node: NodeCommand) -> None:
        self._monitors[node.id] = asyncio.create_task(self._monitor(node))
        self._nodes_changed.set()

    async def add(self, node: NodeCommand) -> None:
        """Starts another node while the others run. Raises CommandError, and adds nothing, when it does not start."""
        await self._all_started.wait()
        self._ready[node.id] = asyncio.Event()
        await self._launch(node)
        await self._watch_start(node)
        self._nodes.append(node)
        self._start_monitor(node)
        self._callbacks.report(f"node {node.id} has joined")

    async def restart(self, node_id: int) -> None:
        """Stops a node cleanly and starts it again, or starts a node that has ended. Raises CommandError."""
        await self._all_started.wait()
        node = next(node for node in self._nodes if node.id == node_id)
        if self._monitors[node_id].done():
            await self._launch(node)
            self._start_monitor(node)
            await self._watch_start(node)
            self._callbacks.report(f"node {node_id} is back")
            return
        back = self._requested_restarts[node_id] = asyncio.get_running_loop().create_future()
        await self._stop_process(self._processes[node_id], f"node {node_id}")
        await back

    async def _stop_process(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Stops the process cleanly, and kills it after STOP_DEADLINE_S."""
        if process.returncode is not None:
            return
        os.kill(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await process.wait()
        except TimeoutError:
            self._callbacks.report(f"{name} has not stopped within {STOP_DEADLINE_S:g} s, killing it")
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    async def _monitor(self, node: NodeCommand) -> None:
        """Restarts the node as needed. Returns when it has ended and is not to be restarted."""
        failures = 0
        while True:
            code = await self._processes[node.id].wait()
            if self._stop.is_set():
                return
            self._report_pids()
            if node.id not in self._requested_restarts:
                pause_s = RESTART_PAUSE.minimum_ms(failures) / 1000
                where = "" if node.log is None else f"; its log is {node.log}"
                again = f", starting it again in {pause_s:g} s" if self._restart else ""
                self._callbacks.report(f"node {node.id} has ended ({_exit_text(code)}){again}{where}")
                if not self._restart:
                    return
                await asyncio.sleep(pause_s)
                failures += 1
            await self._launch(node)
            back = self._requested_restarts.pop(node.id, None)
            try:
                await self._watch_start(node)
            except CommandError as failure:
                if back is not None:
                    back.set_exception(failure)
                continue
            failures = 0
            self._callbacks.report(f"node {node.id} is back")
            if back is not None:
                back.set_result(None)

    # -- stopping ------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._stop.is_set():
            self._stopped_at = now
        elif now - self._stopped_at > SECOND_SIGNAL_AFTER_S:
            self._callbacks.report("killing what is left; the next start recovers")
            self._signal_all(signal.SIGKILL)
        self._stop.set()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._alive():
            # Not Process.send_signal, which may reap the process without the event loop noticing.
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _alive(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self._processes.values() if process.returncode is None]

    async def _stop_all(self) -> None:
        """Stops all nodes at the same time: none would be left to take over leadership anyway."""
        if self._alive():
            self._callbacks.report("stopping")
        self._stop.set()
        self._signal_all(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._wait_for_all()
        except TimeoutError:
            self._callbacks.report(
                f"not stopped within {STOP_DEADLINE_S:g} s, killing; the next start recovers"
            )
            self._signal_all(signal.SIGKILL)
            await self._wait_for_all()
        self._report_pids()

    async def _wait_for_all(self) -> None:
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    def _report_pids(self) -> None:
        self._callbacks.pids_changed(
            {
                id: None if process.returncode is not None else process.pid
                for id, process in self._processes.items()
            }
        )


class _ReadinessProtocol(asyncio.DatagramProtocol):
    def __init__(self, is_ready: Callable[[int], None]) -> None:
        self._is_ready = is_ready

    def datagram_received(self, data: bytes, addr: object) -> None:
        pid = os_process.parse_ready_pid(data)
        if pid is not None:
            self._is_ready(pid)


def _exit_text(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
