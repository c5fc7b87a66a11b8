"""The hand on the proxy: starts it, and says which paths between nodes are cut, slow or refused."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any

from tests.chaos.proxy import OUTSIDE, Path

ROOT = FilePath(__file__).parents[2]


class ProxyProcess:
    """The proxy in a process of its own. Commands are answered in order; any thread may give one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.proxy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def open(self, node: int, host: str, behind: tuple[str, int]) -> int:
        """Returns the port on `host` through which others reach this address of the node."""
        return int(self._ask(do="open", node=str(node), host=host, behind=list(behind)))

    def introduce(self, node: int, pid: int) -> None:
        """Calls of this process are the node's, whatever address they come from."""
        self._ask(do="introduce", node=str(node), pid=pid)

    def cut(self, paths: Iterable[Path]) -> None:
        self._ask(do="cut", paths=list(paths))

    def join(self, paths: Iterable[Path]) -> None:
        """Of paths that are cut, while others stay so."""
        self._ask(do="join", paths=list(paths))

    def refuse(self, paths: Iterable[Path]) -> None:
        self._ask(do="refuse", paths=list(paths))

    def delay(self, paths: Iterable[Path], delay_s: float) -> None:
        self._ask(do="delay", paths=list(paths), delay_s=delay_s)

    def heal(self, *, reset: bool = False) -> int:
        return int(self._ask(do="heal", reset=reset))

    def watch(self) -> None:
        """From now on requests of clients can be held."""
        self._ask(do="watch")

    def lie_in_wait(self, api_key: int) -> None:
        """Hold the next request of that kind, and what comes behind it."""
        self._ask(do="lie in wait", api_key=api_key)

    def call_off(self) -> None:
        """Hold no more requests than those that are held."""
        self._ask(do="call off")

    def let_go(self) -> int:
        """What is held arrives now."""
        return int(self._ask(do="let go"))

    def held(self) -> dict[str, int]:
        """How many requests are `held`, and how many were let go and it is `over` with them: answered or cut off."""
        found: dict[str, int] = self._ask(do="held")
        return found

    def links(self) -> list[Path]:
        return [Path(*pair) for pair in self._ask(do="links")]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=10)

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the proxy has ended"
        return json.loads(answer)


def both_ways(one: int | str, others: Iterable[int | str]) -> list[Path]:
    return [path for other in others for path in (Path(str(one), str(other)), Path(str(other), str(one)))]


def to(target: int | str, sources: Iterable[int | str]) -> list[Path]:
    return [Path(str(source), str(target)) for source in sources]


def out_of(source: int | str, targets: Iterable[int | str]) -> list[Path]:
    return [Path(str(source), str(target)) for target in targets]


def clients() -> str:
    return OUTSIDE
