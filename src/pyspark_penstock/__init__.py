"""Lets Spark find `format("penstock")` without registration: it imports every `pyspark_*` package at its first look-up.

So this module imports nothing heavy and never raises: a broken installation of Penstock must not break the look-up of
other data sources.
"""

import contextlib

with contextlib.suppress(Exception):
    from penstock.spark.datasource import PenstockDataSource as DefaultSource

    __all__ = ("DefaultSource",)
