"""The demo's Spark, in a process of its own: one session for all pipelines, and for replays when they are asked for.

Tells its parent how things are, one JSON document a line; ends with SIGTERM or with its stdin.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from penstock.client.signals import SignalEvent
from penstock.demo.archived import Archived
from penstock.demo.names import Folders
from penstock.demo.queries import Duplicates, Queries
from penstock.demo.replaying import Replayer
from penstock.demo.spark_child import REPLAY_LETTERS
from penstock.spark.session import LOCAL, session

_LOOK_EVERY_S: Final = 1.0
#: What comes in is little, and three queries share the machine with everything else.
_SETTINGS: Final = {
    "spark.driver.memory": "1g",
    # Half the time until the first batch on a small machine: nothing runs hot enough to be worth the second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "WARN",
}


class Parent:
    """Who started this process: hears of everything, and may want something."""

    def __init__(self) -> None:
        # What libraries and the Java machine print is for the log.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()
        self.wants_end = SignalEvent()
        self.wants_replay = threading.Event()
        self._is_ready = False

    def tell(self, **facts: Any) -> None:
        try:
            with self._lock:
                print(json.dumps(facts), file=self._out, flush=True)
        except OSError:
            self.wants_end.set()

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def is_ready(self) -> None:
        """From now on there is something to end in good order."""
        self._is_ready = True

    def _read(self) -> None:
        for line in sys.stdin:
            if line.strip() == REPLAY_LETTERS:
                self.wants_replay.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_ready:
            os._exit(0)  # nothing has begun, and starting Java is not waited for
        self.wants_end.set()


def main(words: dict[str, str]) -> int:
    parent = Parent()
    parent.listen()
    parent.tell(event="Spark is starting, which takes some seconds; everything else flows already")
    folders = Folders(root=Path(words["data"]))
    spark = session("penstock-demo", master=LOCAL, settings=_SETTINGS)
    java = spark.sparkContext._gateway.proc
    parent.is_ready()
    parent.tell(is_up=True, event="Spark is up")
    queries = Queries(spark, words["bootstrap"], folders, parent.tell)
    queries.start()
    replayer = Replayer(spark, words["bootstrap"], parent.tell, parent.wants_end)
    watched = (Duplicates(spark, parent.tell), Archived(folders.archive, parent.tell))
    try:
        while not parent.wants_end.wait(_LOOK_EVERY_S):
            if java.poll() is not None:
                os._exit(1)  # without Java there is nothing to end in good order; the parent starts us again
            for each in watched:
                _try(each.look)
            if parent.wants_replay.is_set():
                parent.wants_replay.clear()
                replayer.begin()
    finally:
        replayer.join()
        queries.stop()
        spark.stop()
    return 0


def _try(look: Callable[[], None]) -> None:
    """What is only for show must not end what it shows."""
    try:
        look()
    except Exception:
        logging.getLogger("penstock.demo").exception("looking")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
