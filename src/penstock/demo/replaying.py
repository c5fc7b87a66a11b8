"""Dead letters that are mended go back to where they are from, each once, while everything else goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from penstock.demo.names import LETTERS
from penstock.demo.pipelines import NoPrice
from penstock.spark import register
from penstock.spark.pipelines.jobs import JobContext
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.pipelines.watching import trouble_of
from penstock.spark.replay import replay

#: Those that a price has mended; the poison stays where it is.
_WHERE: Final = f"error_class like '%{NoPrice.__name__}'"


class Replayer:
    """One replay at a time."""

    def __init__(
        self, spark: Any, bootstrap: str, tell: Callable[..., None], wants_end: threading.Event
    ) -> None:
        self._spark = spark
        self._run = RunSettings(bootstrap=bootstrap, checkpoint="")
        self._tell = tell
        self._wants_end = wants_end
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._tell(is_replaying=True)
            self._thread = threading.Thread(target=self._replay, name="replay")
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _replay(self) -> None:
        job = replay(letters=LETTERS, where=_WHERE, id=f"demo-{int(time.time() * 1000)}")
        context = JobContext(
            spark=self._spark,
            run=self._run,
            progress=lambda done, total: None,
            should_stop=self._wants_end.is_set,
            note=lambda text: self._tell(event=f"replay: {text.partition(': ')[2]}"),
        )
        try:
            register(self._spark)
            job.run(context)
        except Exception as error:
            self._tell(event=f"replay: {trouble_of(error).message}", is_trouble=True)
        finally:
            self._tell(is_replaying=False)
