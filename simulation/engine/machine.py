"""A machine of the simulated cluster, and the shipped node that runs on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from penstock.broker.config.node_settings import load_settings
from penstock.broker.environment import StartFailed
from penstock.broker.node import Node
from simulation.engine.disk import Disk
from simulation.engine.loop import OUTSIDE, Process, ProcessEnded, VirtualLoop
from simulation.engine.network import Network
from simulation.engine.system import close_descriptors

CLIENT_PORT: Final = 9092
NODE_PORT: Final = 9093
#: How long a supervisor waits before it starts a process again that has ended itself.
_RESTART_S: Final = (0.05, 0.5)

logger = logging.getLogger("simulation")


class Machine:
    """Has a host name, a disk and a clock, which outlive the processes on it."""

    def __init__(
        self, loop: VirtualLoop, network: Network, folder: Path, *, node_id: int, settings: Mapping[str, str]
    ) -> None:
        self.loop = loop
        self.network = network
        self.node_id = node_id
        self.host = f"10.0.0.{node_id}"
        self.disk = Disk(loop, folder)
        #: How far the wall clock is ahead of the others.
        self.clock_skew_s = 0.0
        self.process: Process | None = None
        self.node: Node | None = None
        #: False while the node is being stopped, or must stay stopped.
        self.restarts = True
        self.on_started: list[Callable[[Machine], None]] = []
        self._settings = settings
        self._ended: list[Node | None] = []  # kept in memory, as the loop keeps their tasks

    def __repr__(self) -> str:
        return f"<Machine {self.node_id} {self.node}>"

    @property
    def is_running(self) -> bool:
        return self.process is not None

    @property
    def serving(self) -> Node | None:
        """The node, once it serves, and while it is not suspended."""
        node, process = self.node, self.process
        is_there = node is not None and process is not None and not process.is_suspended
        return node if is_there and node is not None and node.state == "serving" else None

    def start(self) -> None:
        """Start the node, unless it runs."""
        if self.process is not None:
            return
        self.restarts = True
        self.network.power_restored(self.host)
        process = self.process = Process(f"node {self.node_id}", self)
        process.on_exit = self._exited
        self.loop.note("start", self.node_id)
        self.loop.spawn(process, self._run(process))

    async def _run(self, process: Process) -> None:
        given = {**self._settings, "node.id": str(self.node_id), "log.dirs": str(self.disk.folder)}
        self.node = node = Node(load_settings(given, {}))
        for started in self.on_started:
            started(self)
        try:
            await node.start()
        except (StartFailed, OSError) as error:
            self.loop.note("start failed", self.node_id, error)
            self._end_process()
            self._restart_later()
            raise ProcessEnded from None
        self.loop.note("serving", self.node_id)

    def _exited(self) -> None:
        """The process has ended itself, for example because a sync failed."""
        self.loop.note("process ended itself", self.node_id)
        self._end_process()
        self._restart_later()

    def _restart_later(self) -> None:
        self.loop.call_later(self.loop.between(*_RESTART_S), self._restart, context=OUTSIDE)

    def _restart(self) -> None:
        if self.restarts:
            self.start()

    def _end_process(self) -> None:
        process = self._forget_process()
        if process is not None:
            self.network.process_ended(process)

    def _forget_process(self) -> Process | None:
        process, self.process = self.process, None
        self._ended.append(self.node)
        self.node = None
        if process is not None:
            self.loop.end(process)
            close_descriptors(process)
        return process

    # -- faults ----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9: the page cache stays, and peers see their connections reset."""
        self._end_process()

    def lose_power(self) -> None:
        self.network.power_lost(self._forget_process(), self.host)
        self.disk.lose_power()

    def lose_disk(self) -> None:
        self.lose_power()
        self.disk.replace()

    def stop(self) -> asyncio.Task[None] | None:
        """Stop the node cleanly, as SIGTERM does."""
        process, node = self.process, self.node
        if process is None or node is None or node.state != "serving":
            return None
        self.loop.note("stop", self.node_id)
        return self.loop.spawn(process, self._stop(process, node))

    async def _stop(self, process: Process, node: Node) -> None:
        await node.stop()
        if self.process is process:
            self.loop.note("stopped cleanly", self.node_id)
            self._end_process()
