"""Errors for people: what Spark shows of an error of ours is its sentence, not where in our code it was raised."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.client.errors import ClientError

#: Spark's workers look at it when they tell of an error, and end afterwards.
_HIDES: Final = "SPARK_HIDE_TRACEBACK"
#: An error of ours in what Spark says: its whole name, and its sentence.
OURS: Final = re.compile(r"\b(penstock\.[\w.]+\.\w+): ([^\n]*)")
_LOG: Final = logging.getLogger("penstock.spark")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Around all that Spark calls, as a context or as a decorator."""
    try:
        yield
    except ClientError:
        _LOG.debug("told without this:", exc_info=True)
        os.environ[_HIDES] = "1"
        raise
