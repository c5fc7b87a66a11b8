"""The pipelines and jobs that come with Penstock, by the names that `penstock pipeline run` knows them by."""

from __future__ import annotations

from typing import Final, NamedTuple


class BuiltIn(NamedTuple):
    #: `module:function` of what makes it. Settings are its parameters.
    factory: str
    help: str


BUILT_IN: Final = {
    "archive": BuiltIn("penstock.spark.archive:archive", "topic -> Delta table, every record once"),
    "dedupe": BuiltIn("penstock.spark.analytics:dedupe", "topic -> topic, less what comes again"),
    "hotkeys": BuiltIn("penstock.spark.analytics:hotkeys", "the heaviest keys of a topic's partitions"),
    "metrics": BuiltIn(
        "penstock.spark.analytics:metrics", "windowed rates, sizes, lag and errors -> topic, table"
    ),
    "replay": BuiltIn(
        "penstock.spark.replay:replay", "archive, range or dead letters -> topic, every record once"
    ),
}
