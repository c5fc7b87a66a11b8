"""Where Spark finds `format("penstock")` by itself: it imports every `pyspark_*` package at its first look-up.

So this imports nothing heavy, and never raises: a broken installation of ours must not break the look-up of others.
"""

import contextlib

with contextlib.suppress(Exception):
    from penstock.spark.datasource import PenstockDataSource as DefaultSource

    __all__ = ("DefaultSource",)
