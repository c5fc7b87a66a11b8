"""Spark's Python workers: what the daemon has loaded, and how workers end when Spark closes the socket."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, sys
import pyspark.daemon
from penstock.spark import daemon

def manager():
    loaded = "penstock.spark.columns" in sys.modules
    print(json.dumps({"loaded": loaded, "frozen": gc.get_freeze_count(), "left": len(gc.get_objects())}))

pyspark.daemon.manager = manager
daemon.main()
"""


def test_workers_do_not_collect_preloaded_objects() -> None:
    command = [sys.executable, "-c", PROGRAM, "pyspark.worker"]
    counts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert counts["loaded"]
    assert counts["frozen"] > 100 * counts["left"]


WORKER = """
import sys
import pyspark.daemon
from penstock.spark import daemon

def worker(socket, authenticated):
    raise BrokenPipeError(32, "Broken pipe")

pyspark.daemon.worker = worker
pyspark.daemon.manager = lambda: print(pyspark.daemon.worker(None, True))
daemon.main()
"""
#: In a planning process: a failed write to Spark may end it, a failed write to a broker may not.
PLANNER = """
import signal, sys
sys.argv[1:] = [{worker!r}]
from penstock.spark.datasource import PenstockDataSource
from penstock.spark.workers import until_reader_closes, without_traceback

def now():
    return signal.getsignal(signal.SIGPIPE).name

seen = [now()]
with without_traceback():
    seen.append(now())
for _ in until_reader_closes(iter([1])):
    seen.append(now())
print(*seen, now())
"""


def test_a_worker_ends_without_a_traceback_if_spark_closes_the_socket() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("worker", "handlers"),
    [
        ("pyspark.sql.worker.plan_data_source_read", "SIG_DFL SIG_IGN SIG_DFL SIG_DFL"),
        ("pyspark.worker", "SIG_IGN SIG_IGN SIG_DFL SIG_IGN"),
    ],
)
def test_a_broken_pipe_ends_workers_while_spark_takes_a_batch(worker: str, handlers: str) -> None:
    command = [sys.executable, "-c", PLANNER.format(worker=worker)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == handlers.split()
