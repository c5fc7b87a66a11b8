"""What people see of Spark's Python workers: our errors as sentences, and nothing of readers that have gone.

Spark closes its end of a worker's socket as soon as it has what it needs: after the first rows of `limit`, or before a
worker that plans has said goodbye. PySpark's daemon prints a traceback of BrokenPipeError for each. A worker that has
SIGPIPE as other Unix filters do ends silently instead. Python ignores that signal so that a write to a *broker* that
has gone is an error, so it counts only while nothing of ours is running.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from penstock.client.errors import ClientError

#: Spark's workers look at it when they tell of an error, and end afterwards.
_HIDES: Final = "SPARK_HIDE_TRACEBACK"
#: An error of ours in what Spark says: its whole name, and its sentence.
OURS: Final = re.compile(r"\b(penstock\.[\w.]+\.\w+): ([^\n]*)")
_LOG: Final = logging.getLogger("penstock.spark")
#: What daemons of workers that plan are started with, as their first argument.
_PLANNERS: Final = "pyspark.sql.worker."


@contextmanager
def told_plainly() -> Iterator[None]:
    """Around all that Spark calls, as a context or as a decorator."""
    with _sigpipe(signal.SIG_IGN) if is_planner() else nullcontext():
        try:
            yield
        except ClientError:
            _LOG.debug("told without this:", exc_info=True)
            os.environ[_HIDES] = "1"
            raise


def is_planner() -> bool:
    """Whether this process is a worker that Spark has started to plan a query, and that does nothing else."""
    return sys.argv[1:2] != [] and sys.argv[1].startswith(_PLANNERS)


def end_with_reader() -> None:
    """From now on a write to a Spark that does not listen any more ends this process, except in `told_plainly`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def handed(batches: Iterator[Any]) -> Iterator[Any]:
    """To Spark, which may want no more of them while it takes one."""
    for batch in batches:
        with _sigpipe(signal.SIG_DFL):
            yield batch


@contextmanager
def _sigpipe(handler: signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change it, and Spark's workers have no other
        return
    before = signal.signal(signal.SIGPIPE, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
