"""A Spark session that needs nothing set up: on this machine by default, on a cluster by its address."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

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
#: Where driver and tasks share one machine and one interpreter.
LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.python.daemon.module": "penstock.spark.daemon",
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


def session(name: str = "penstock", *, master: str = LOCAL, settings: Mapping[str, str] | None = None) -> Any:
    """A session with `format("penstock")`: the one of this process if there is one. Raises NoJava."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master.startswith(_CONNECT):
        builder = builder.remote(master)
    else:
        _prepare(os.environ)
        builder = builder.master(master)
    for key, value in {**settings_for(master), **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def settings_for(master: str) -> dict[str, str]:
    return {**SETTINGS, **(LOCAL_SETTINGS if master.startswith("local") else {})}


def _prepare(environment: Any) -> None:
    """Spark's launcher takes its Java from the environment; a session that runs has been launched already."""
    environment["JAVA_HOME"] = str(home_for_spark(find_java(environment)))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
