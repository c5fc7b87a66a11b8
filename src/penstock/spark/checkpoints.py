"""Checkpoints on a local disk without a process for every file.

Spark's first choice for local files asks `chmod` and others, as processes, where Hadoop's native library is not
installed, which it never is from PyPI; that is most of what a small batch costs. Its other choice makes the same files
in the same steps (a temporary file, then one rename(2)) without them. On other file systems their steps differ, so it
is for local disks alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
WITHOUT_PROCESSES: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
#: The setting is the session's, and pipelines that share one may start at the same time.
_STARTING: Final = threading.Lock()


@contextmanager
def local_checkpoints(spark: Any, location: str) -> Iterator[None]:
    """For queries that are started within, with their checkpoint there: each keeps the setting that it began with.

    Does nothing where the disk may be another machine's, or the user has chosen.
    """
    with _STARTING:
        if not _is_for(spark, location):
            yield
            return
        spark.conf.set(FILE_MANAGER, WITHOUT_PROCESSES)
        try:
            yield
        finally:
            spark.conf.unset(FILE_MANAGER)


def _is_for(spark: Any, location: str) -> bool:
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none
    if context is None or not context.master.startswith("local"):
        return False
    return is_local(location, _default_system(spark)) and spark.conf.get(FILE_MANAGER, None) is None


def is_local(location: str, default_system: str) -> bool:
    """`default_system` is the URI of the file system that locations without one are on."""
    scheme = urlsplit(location).scheme or urlsplit(default_system).scheme
    return scheme == "file"


def _default_system(spark: Any) -> str:
    return str(spark._jsc.hadoopConfiguration().get("fs.defaultFS") or "")
