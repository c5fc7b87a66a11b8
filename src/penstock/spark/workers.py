"""Behaviour of Spark's Python workers: errors of ours without a traceback, and no error if Spark closes the socket.

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

#: A PySpark worker reads this variable when it reports an error, and exits afterwards.
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
#: An error of ours in a message of Spark: the full class name, and the message.
OWN_ERROR: Final = re.compile(r"\b(penstock\.[\w.]+\.\w+): ([^\n]*)")
_LOG: Final = logging.getLogger("penstock.spark")
#: PySpark starts the daemon of planning workers with a module name that has this prefix as the first argument.
_PLANNING_WORKERS: Final = "pyspark.sql.worker."


@contextmanager
def without_traceback() -> Iterator[None]:
    """Wrap everything that Spark calls: a ClientError is reported without its traceback. Also works as a decorator."""
    with _sigpipe_handler(signal.SIG_IGN) if is_planning_worker() else nullcontext():
        try:
            yield
        except ClientError:
            _LOG.debug("reported to Spark without this traceback:", exc_info=True)
            os.environ[_HIDE_TRACEBACK] = "1"
            raise


def is_planning_worker() -> bool:
    """Return whether this process is a worker that Spark has started only to plan a query."""
    return sys.argv[1:2] != [] and sys.argv[1].startswith(_PLANNING_WORKERS)


def exit_on_sigpipe() -> None:
    """End this process if it writes to a socket that Spark has closed, except inside of `without_traceback`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def until_reader_closes(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches to Spark. If Spark closes the socket instead of taking the next one, the process ends."""
    for batch in batches:
        with _sigpipe_handler(signal.SIG_DFL):
            yield batch


@contextmanager
def _sigpipe_handler(handler: signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers, and Spark's workers have no other thread
        return
    before = signal.signal(signal.SIGPIPE, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, before)
