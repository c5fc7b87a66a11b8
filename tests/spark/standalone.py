"""Spark in its own processes, from the pip package: a small cluster, and a Spark Connect server.

The cluster has a master and two workers that look like two machines, because Spark starts a speculative attempt only on
another machine.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark
from tests.ports import free_address
from tests.spark.class_archive import QUICK_JAVA
from tests.waiting import eventually

from penstock.spark.session import (
    FILE_MANAGER_SETTING,
    FILE_MANAGER_WITHOUT_PROCESSES,
    find_java,
    home_for_spark,
)

MASTER_HOST, WORKER_HOSTS = "127.0.0.1", ("127.0.0.2", "127.0.0.3")
START_S = 180.0
STOP_S = 30.0
_DAEMON_MEMORY = "256m"


class Standalone:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._address = free_address(MASTER_HOST)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        return "spark://{}:{}".format(*self._address)

    @property
    def settings(self) -> dict[str, str]:
        """Settings for drivers, which find the cluster on loopback and start small executors."""
        return {
            "spark.driver.bindAddress": MASTER_HOST,
            "spark.driver.host": MASTER_HOST,
            "spark.executor.memory": "512m",
            "spark.python.daemon.module": "penstock.spark.daemon",
            "spark.sql.shuffle.partitions": "4",  # each one is a task with its own state in every batch
            FILE_MANAGER_SETTING: FILE_MANAGER_WITHOUT_PROCESSES,
            **{f"spark.executorEnv.{name}": value for name, value in code_path().items()},
        }

    def start(self) -> "Standalone":
        host, port = self._address
        try:
            self._launch("master.Master", "--host", host, "--port", str(port))
            for host in WORKER_HOSTS:
                resources = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / "work"))
                self._launch("worker.Worker", "--host", host, *resources, self.master)
            eventually(self._is_complete, within_s=START_S, what="the registration of all workers")
        except BaseException:
            self.stop()
            raise
        return self

    def _launch(self, kind: str, *arguments: str) -> None:
        command = ["spark-class", f"org.apache.spark.deploy.{kind}", "--webui-port", "0", *arguments]
        self._processes.append(launch(command, self._log, {"SPARK_DAEMON_MEMORY": _DAEMON_MEMORY}))

    @property
    def _log(self) -> Path:
        return self._folder / "standalone.log"

    def _is_complete(self) -> bool:
        return self._log.read_text().count("Successfully registered with master") == len(WORKER_HOSTS)

    def stop(self) -> None:
        for process in reversed(self._processes):
            end(process)


class ConnectServer:
    """A Spark Connect server (`sc://`): driver and tasks in one process."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "connect.log"
        self._port = free_address(MASTER_HOST)[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def master(self) -> str:
        return f"sc://{MASTER_HOST}:{self._port}"

    def start(self) -> "ConnectServer":
        settings = {
            "spark.connect.grpc.binding.address": MASTER_HOST,
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.driver.bindAddress": MASTER_HOST,
            "spark.driver.host": MASTER_HOST,
            "spark.driver.memory": "1g",
            "spark.master": "local[2,4]",
            "spark.sql.shuffle.partitions": "2",
            FILE_MANAGER_SETTING: FILE_MANAGER_WITHOUT_PROCESSES,
            "spark.ui.enabled": "false",
        }
        given = [word for item in settings.items() for word in ("--conf", "=".join(item))]
        server = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        self._process = launch(["spark-submit", *given, *server], self._log)
        try:
            eventually(self._is_started, within_s=START_S, what="the start of the Spark Connect server")
        except BaseException:
            self.stop()
            raise
        return self

    def _is_started(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the Spark Connect server has ended:\n{self._log.read_text()[-3000:]}")
        return "Spark Connect server started" in self._log.read_text()

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)


def launch(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a command of Spark with the same Java and Python as our sessions."""
    program = Path(pyspark.__file__).parent / "bin" / command[0]
    given = {
        **os.environ,
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        **QUICK_JAVA,
        "JAVA_HOME": str(home_for_spark(find_java())),
        "PYSPARK_PYTHON": sys.executable,
        **(environment or {}),
    }
    with log.open("ab") as output:
        return subprocess.Popen([str(program), *command[1:]], stdout=output, stderr=output, env=given)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def code_path() -> dict[str, str]:
    """Return the import path for other processes, in case our code is not installed."""
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
