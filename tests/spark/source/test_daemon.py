"""The parent of Python workers: what it has loaded is there in each of them, and is not walked through by each."""

import json
import subprocess
import sys

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
