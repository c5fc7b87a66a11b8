"""Spark's Python workers: what their parent has loaded, and how they end when Spark wants no more of them."""

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


def test_workers_do_not_collect_what_is_preloaded() -> None:
    command = [sys.executable, "-c", PROGRAM, "pyspark.worker"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["loaded"]
    assert told["frozen"] > 100 * told["left"]


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
#: In a process that Spark has started to plan: writes to Spark may end it, writes to brokers may not.
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


def test_a_worker_that_spark_does_not_listen_to_any_more_ends_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("worker", "handlers"),
    [
        ("pyspark.sql.worker.plan_data_source_read", "SIG_DFL SIG_IGN SIG_DFL SIG_DFL"),
        ("pyspark.worker", "SIG_IGN SIG_IGN SIG_DFL SIG_IGN"),
    ],
)
def test_a_broken_pipe_ends_workers_while_spark_takes_what_they_made(worker: str, handlers: str) -> None:
    command = [sys.executable, "-c", PLANNER.format(worker=worker)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == handlers.split()
