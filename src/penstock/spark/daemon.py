"""The parent of Spark's Python workers, with our kernels loaded before the first of them is forked.

`spark.python.daemon.module` names it. Without it everything works, and each new worker takes a moment longer.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

#: What runs tasks; the daemons of workers that only plan need no kernels.
_TASKS: Final = "pyspark.worker"


def main() -> None:
    if sys.argv[1:2] == [_TASKS]:
        # A worker that cannot do without them will say so itself.
        with contextlib.suppress(Exception):
            from penstock.spark.columns import preload

            preload()
    from pyspark import daemon

    daemon.worker = _ending_quietly(daemon.worker)
    # Workers collect garbage after every task, and would walk through all that is loaded here each time.
    gc.collect()
    gc.freeze()
    daemon.manager()


def _ending_quietly(worker: Callable[..., int]) -> Callable[..., int]:
    """PySpark prints a traceback where Spark has closed the socket before the last bytes were written."""

    def ended(*given: Any) -> int:
        try:
            return worker(*given)
        except (BrokenPipeError, ConnectionResetError):
            return 1

    return ended


if __name__ == "__main__":
    main()
