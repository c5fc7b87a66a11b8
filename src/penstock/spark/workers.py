"""What users see of Spark's Python workers: our errors without a traceback, and no error when Spark closes the socket.

Spark closes its end of a worker's socket as soon as it has what it needs: after the first rows of `limit`, or before a
worker that plans a query has finished. PySpark's daemon then prints a BrokenPipeError traceback. A worker with the
default action for SIGPIPE ends silently instead, like other Unix filters. Python ignores SIGPIPE so that a write to a
closed connection to a *broker* raises an error; so the default action is set only while none of our code runs.
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
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
#: An error of ours in what Spark says: its whole name, and its sentence.
OWN_ERROR: Final = re.compile(r"\b(penstock\.[\w.]+\.\w+): ([^\n]*)")
_LOG: Final = logging.getLogger("penstock.spark")
#: What daemons of workers that plan are started with, as their first argument.
_PLANNING_WORKERS: Final = "pyspark.sql.worker."


@contextmanager
def without_traceback() -> Iterator[None]:
    """Around all that Spark calls, as a context or as a decorator."""
    with _sigpipe_handler(signal.SIG_IGN) if is_planning_worker() else nullcontext():
        try:
            yield
        except ClientError:
            _LOG.debug("told without this:", exc_info=True)
            os.environ[_HIDE_TRACEBACK] = "1"
            raise


def is_planning_worker() -> bool:
    """Whether this process is a worker that Spark has started to plan a query, and that does nothing else."""
    return sys.argv[1:2] != [] and sys.argv[1].startswith(_PLANNING_WORKERS)


def exit_on_sigpipe() -> None:
    """From now on a write to a Spark that does not listen any more ends this process, except in `told_plainly`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def until_reader_closes(batches: Iterator[Any]) -> Iterator[Any]:
    """To Spark, which may want no more of them while it takes one."""
    for batch in batches:
        with _sigpipe_handler(signal.SIG_DFL):
            yield batch


@contextmanager
def _sigpipe_handler(handler: signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change it, and Spark's workers have no other
        return
    before = signal.signal(signal.SIGPIPE, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
