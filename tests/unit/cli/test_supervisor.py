"""The supervisor of a local cluster, with small programs as nodes: start, death, restart, stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually_async

from penstock.cli.cluster import supervisor
from penstock.cli.cluster.supervisor import NodeCommand, Supervisor, SupervisorCallbacks
from penstock.cli.errors import CommandError
from penstock.protocol.backoff import ExponentialBackoff

READY = "from penstock.cli import os_process; import time; os_process.notify_ready(); time.sleep(60)"
SLEEP = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
DIES = "import sys; print('the disk is on fire'); sys.exit(3)"


class World:
    """What a supervisor has told, and a way to meddle once all are ready."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reported: list[str] = []
        self.pids: dict[int, int | None] = {}
        self.lives: dict[int, set[int]] = {}
        self.meddle: Callable[[], None] = lambda: None

    def node(self, number: int, program: str) -> NodeCommand:
        return NodeCommand(number, (sys.executable, "-c", program), self.folder / f"{number}.log")

    async def run(self, *programs: str, restart: bool = False) -> int:
        nodes = [self.node(number, program) for number, program in enumerate(programs, 1)]
        watcher = SupervisorCallbacks(
            pids_changed=self._pids, all_ready=self._ready, report=self.reported.append
        )
        self.supervisor = Supervisor(nodes, watcher, restart=restart)
        return await self.supervisor.run()

    def _pids(self, pids: dict[int, int | None]) -> None:
        self.pids = pids
        for id, pid in pids.items():
            if pid is not None:
                self.lives.setdefault(id, set()).add(pid)

    async def _ready(self) -> None:
        self.meddle()


async def until(happened: Callable[[], bool]) -> None:
    async def check() -> bool:
        return happened()

    await eventually_async(check)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_stops_all_of_them(world: World) -> None:
    world.meddle = interrupt
    assert await world.run(SLEEP, SLEEP) == 0
    assert world.pids == {1: None, 2: None}
    assert world.reported == ["stopping"]


async def test_a_node_may_be_ready_before_its_pid_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the process has started, and its parent has not run since."""
    real = asyncio.create_subprocess_exec

    async def slowly(*words: Any, **given: Any) -> Any:
        process = await real(*words, **given)
        await until(lambda: process.pid in world.supervisor._ready_pids)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    world.meddle = interrupt
    assert await world.run(SLEEP) == 0


async def test_a_node_that_dies_while_starting_stops_the_others_and_is_quoted(world: World) -> None:
    with pytest.raises(CommandError, match=r"node 2 did not start: exit code 3\n  the disk is on fire"):
        await world.run(SLEEP, DIES)
    assert world.pids == {1: None, 2: None}


async def test_a_node_that_dies_later_is_told_and_the_others_go_on(world: World) -> None:
    world.meddle = lambda: os.kill(world.pids[2] or 0, signal.SIGKILL)
    running = asyncio.create_task(world.run(SLEEP, SLEEP))
    await until(lambda: world.pids.get(2, 0) is None)
    assert world.pids[1] is not None
    assert "node 2 has ended (killed by SIGKILL)" in world.reported[0]
    interrupt()
    assert await running == 1  # not all of them ended as they should


async def test_when_none_is_left_there_is_nothing_to_watch(world: World) -> None:
    world.meddle = lambda: os.kill(world.pids[1] or 0, signal.SIGKILL)
    with pytest.raises(CommandError, match="all nodes have ended"):
        await world.run(SLEEP)


async def test_a_node_that_dies_comes_back_where_wanted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PAUSE", ExponentialBackoff(base_ms=10))
    world.meddle = lambda: os.kill(world.pids[1] or 0, signal.SIGKILL)
    running = asyncio.create_task(world.run(SLEEP, restart=True))
    await until(lambda: "node 1 is back" in world.reported)
    assert len(world.lives[1]) == 2
    interrupt()
    assert await running == 0


async def test_one_of_them_is_restarted_whether_it_runs_or_has_ended(world: World) -> None:
    ready = asyncio.Event()
    world.meddle = ready.set
    running = asyncio.create_task(world.run(SLEEP, SLEEP))
    await ready.wait()
    await world.supervisor.restart(2)
    assert len(world.lives[2]) == 2
    assert world.reported == ["node 2 is back"], "a requested restart is not reported as a failure"
    os.kill(world.pids[2] or 0, signal.SIGKILL)
    await until(lambda: world.pids[2] is None)
    await world.supervisor.restart(2)
    assert (len(world.lives[1]), len(world.lives[2])) == (1, 3)
    os.kill(world.pids[1] or 0, signal.SIGKILL)
    await until(lambda: world.pids[1] is None)
    assert not running.done(), "the one that is back is minded"
    interrupt()
    assert await running == 1


async def test_one_more_joins_those_that_run(world: World) -> None:
    ready = asyncio.Event()
    world.meddle = ready.set
    running = asyncio.create_task(world.run(SLEEP))
    await ready.wait()
    with pytest.raises(CommandError, match="node 3 did not start"):
        await world.supervisor.add(world.node(3, DIES))
    await world.supervisor.add(world.node(2, SLEEP))
    os.kill(world.pids[1] or 0, signal.SIGKILL)
    await until(lambda: world.pids[1] is None)
    assert world.pids[2] is not None
    interrupt()
    await running
    assert world.pids[2] is None


async def test_what_does_not_stop_is_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_DEADLINE_S", 0.1)
    world.meddle = interrupt
    assert await world.run(STUBBORN) == 1
    assert "killing" in world.reported[-1]


async def test_a_second_signal_does_not_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SECOND_SIGNAL_AFTER_S", 0.0)
    world.meddle = interrupt
    running = asyncio.create_task(world.run(STUBBORN))
    await until(lambda: "stopping" in world.reported)
    interrupt()
    assert await running == 1
    assert world.reported[-1] == "killing what is left; the next start recovers"


async def test_the_end_of_stdin_is_the_end_of_the_node() -> None:
    program = "from penstock.cli import os_process; import time; os_process.stop_with_stdin(); time.sleep(60)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGTERM
