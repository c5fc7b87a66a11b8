"""A Spark session that needs nothing set up: on this machine by default, on a cluster by its address."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.spark.java import find_java, home_for_spark

#: All cores; a task that fails is tried three times more, as it would be on a cluster.
LOCAL: Final = "local[*,4]"
_CONNECT: Final = "sc://"

#: For every session that we make; what a user sets wins.
SETTINGS: Final = {
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
    master: str = LOCAL,
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
        _prepare(os.environ)
        builder = builder.master(master)
        if log is not None:
            _launch(name, master, all_settings, log)
    for key, value in all_settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def is_remote(master: str) -> bool:
    """Whether the driver is a server of Spark Connect, and none of ours."""
    return master.startswith(_CONNECT)


def settings_for(master: str) -> dict[str, str]:
    if is_remote(master):
        return dict(SETTINGS)
    return {**SETTINGS, **DRIVER_SETTINGS, **(LOCAL_SETTINGS if master.startswith("local") else {})}


def _prepare(environment: Any) -> None:
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
            raise SparkFailed(f"Spark does not start: {_last_words(log, output_at)} ({log})") from None


def _last_words(log: Path, position: int) -> str:
    """The last line that is no step of a Java stack trace."""
    text = log.read_bytes()[position:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith(("at ", "..."))]
    return told[-1] if told else "it says nothing"


def is_dead() -> bool:
    """Whether the JVM that this process started is gone."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


def forget_dead() -> bool:
    """Whether it is gone; then the next session starts another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if not is_dead():
        return False
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    return True
