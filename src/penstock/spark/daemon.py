"""The daemon that forks Spark's Python workers, with our kernels loaded before the first fork.

The Spark setting `spark.python.daemon.module` names this module. It is optional: without it each new worker takes a
little longer to start.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

#: The worker module that runs tasks. Daemons of planning workers need no kernels.
_TASK_WORKER: Final = "pyspark.worker"


def main() -> None:
    # Imports are late so that a daemon of planning workers does not load the kernels.
    if sys.argv[1:2] == [_TASK_WORKER]:
        # A worker that needs the kernels will report the error itself.
        with contextlib.suppress(Exception):
            from penstock.spark.columns import preload

            preload()
    from pyspark import daemon

    daemon.worker = _without_broken_pipe_errors(daemon.worker)
    # Workers collect garbage after every task. Without the freeze they would scan all objects loaded here each time.
    gc.collect()
    gc.freeze()
    daemon.manager()


def _without_broken_pipe_errors(worker: Callable[..., int]) -> Callable[..., int]:
    """Wrap the worker to end quietly if Spark closes the socket before the last bytes; PySpark prints a traceback."""

    def ended(*given: Any) -> int:
        try:
            return worker(*given)
        except (BrokenPipeError, ConnectionResetError):
            return 1

    return ended


if __name__ == "__main__":
    main()
