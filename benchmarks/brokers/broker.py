"""A broker under measurement: started in its own process, on loopback, with its own data folder."""

import compileall
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from tests.brokers import executable, set_flags
from tests.ports import free_port

from benchmarks.brokers import procfs
from benchmarks.brokers.security import OPEN, Security
from benchmarks.wire.access import ADMIN
from benchmarks.wire.raw_client import Address, BrokerError, Connection

HOST = "127.0.0.1"
_STOP_S = 60.0
#: Deleted topics of an earlier run must not occupy the page cache of the next one.
_COMMON_TOPIC_CONFIGS = {"file.delete.delay.ms": "1000"}

#: Some groups ask for a session this short; the shipped bound would have a crash take most of a minute.
SESSION_TIMEOUT_MIN_S = 6.0
COMMON_SETTINGS = {"group.consumer.min.session.timeout.ms": str(int(SESSION_TIMEOUT_MIN_S * 1000))}


class Subject(Protocol):
    """What is measured: one broker, or a cluster of them."""

    name: str
    #: Copies of each partition of a topic that the load writes to.
    replication_factor: int

    def __init__(self, folder: Path) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def start(self) -> None: ...
    def connect(self, timeout_s: float = 60) -> Connection: ...
    def flush_config(self, *, fsync: bool) -> Mapping[str, str]: ...
    def topic_configs(self, *, fsync: bool) -> dict[str, str]: ...
    def settings(self) -> Mapping[str, str]: ...
    def cpu_seconds(self) -> float: ...
    def memory_bytes(self) -> tuple[int, int]: ...


class Broker(ABC):
    """One instance of a broker; `start` execs it, leaving the context stops it and removes its data."""

    name: str
    replication_factor = 1

    def __init__(self, folder: Path, security: Security = OPEN) -> None:
        self.folder = folder
        self.security = security
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> Address:
        return HOST, self.port

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        """The topic setting that makes every acknowledged batch synced, or leaves it to the kernel."""

    @abstractmethod
    def settings(self) -> Mapping[str, str]:
        """What a reader of the results needs to know to repeat them."""

    @abstractmethod
    def prepare(self) -> None:
        """What has to be done once before the first start on an empty folder."""

    def topic_configs(self, *, fsync: bool) -> dict[str, str]:
        return {**_COMMON_TOPIC_CONFIGS, **self.flush_config(fsync=fsync)}

    def start(self) -> None:
        with (self.folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def connect(self, timeout_s: float = 60) -> Connection:
        """Connect as soon as the broker listens."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return Connection(self.address, access=self.security.access(self.folder))
            except ConnectionRefusedError:
                self._assert_alive()
                if time.monotonic() > deadline:
                    raise BrokerError(f"{self.name} does not listen after {timeout_s:.0f} s") from None
                time.sleep(0.0005)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        return procfs.cpu_seconds(self.pid)

    def memory_bytes(self) -> tuple[int, int]:
        return procfs.memory_bytes(self.pid)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self.security.prepare(self.folder)
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def _assert_alive(self) -> None:
        assert self._process is not None, "not started"
        if self._process.poll() is not None:
            tail = (self.folder / "broker.log").read_text(errors="replace")[-2000:]
            raise BrokerError(f"{self.name} ended with code {self._process.returncode}:\n{tail}")


class PenstockBroker(Broker):
    name = "penstock"

    def prepare(self) -> None:
        """Bytecode, which an installed package has and an edited checkout may lack."""
        import penstock

        compileall.compile_dir(Path(penstock.__file__).parent, quiet=1)

    def command(self) -> list[str]:
        given = ["--listen", f"{HOST}:{self.port}", "--data-dir", str(self.folder / "data")]
        common = COMMON_SETTINGS
        if self.security != OPEN:
            given = []
            common = (
                common
                | self.security.settings(self.folder)
                | {
                    "listeners": f"{self.security.protocol}://{HOST}:{self.port}",
                    "log.dirs": str(self.folder / "data"),
                }
            )
        if self.security.users:
            common |= {"authorizer.class.name": "StandardAuthorizer", "super.users": f"User:{ADMIN}"}
        return [*executable(), "serve", *given, *set_flags(common), *self.flags()]

    def flags(self) -> list[str]:
        """What one among several nodes has to be told besides."""
        return []

    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        return {"penstock.flush": "ack" if fsync else "never"}

    def settings(self) -> Mapping[str, str]:
        from penstock import __version__

        return {"version": __version__, "settings": f"defaults but {COMMON_SETTINGS}"}
