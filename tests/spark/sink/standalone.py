"""A small Spark cluster from the pip package: a master and two workers that look like two machines.

Spark starts a twin of a slow task only on another machine than the task's own.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pyspark
from tests.clusters import free_address
from tests.waiting import eventually

from penstock.spark.java import find_java, home_for_spark

MASTER_HOST, WORKER_HOSTS = "127.0.0.1", ("127.0.0.2", "127.0.0.3")
START_S = 60.0


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
        """For drivers: workers know nothing of where our code is."""
        return {
            "spark.driver.bindAddress": MASTER_HOST,
            "spark.driver.host": MASTER_HOST,
            "spark.executor.memory": "512m",
            "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
            "spark.python.daemon.module": "penstock.spark.daemon",
        }

    def start(self) -> "Standalone":
        host, port = self._address
        self._launch("master.Master", "--host", host, "--port", str(port))
        for host in WORKER_HOSTS:
            resources = ("--cores", "1", "--memory", "1g", "--work-dir", str(self._folder / "work"))
            self._launch("worker.Worker", "--host", host, *resources, self.master)
        eventually(self._is_complete, within_s=START_S, what="the registration of all workers")
        return self

    def _launch(self, kind: str, *arguments: str) -> None:
        launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
        command = [str(launcher), f"org.apache.spark.deploy.{kind}", "--webui-port", "0", *arguments]
        environment: dict[str, Any] = {**os.environ, "JAVA_HOME": str(home_for_spark(find_java()))}
        environment |= {"SPARK_DAEMON_MEMORY": "256m"}
        with self._log.open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    @property
    def _log(self) -> Path:
        return self._folder / "standalone.log"

    def _is_complete(self) -> bool:
        return self._log.read_text().count("Successfully registered with master") == len(WORKER_HOSTS)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(START_S)
