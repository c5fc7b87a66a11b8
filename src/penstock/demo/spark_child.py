"""The demo's Spark as its parent sees it: a process that tells how its queries are, one JSON document a line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from penstock.demo.children import Child
from penstock.demo.journal import Journal
from penstock.demo.names import PIPELINES, Folders
from penstock.demo.scene import Health

NEEDED: Final = ("pyspark", "pyarrow", "numba", "deltalake")
HOW_TO_GET: Final = "pip install 'penstock[spark]'"
#: To its stdin.
REPLAY_LETTERS: Final = "replay"


def missing() -> list[str]:
    return [name for name in NEEDED if find_spec(name) is None]


@dataclass(slots=True, kw_only=True)
class Query:
    """What is known of a pipeline."""

    #: Rows that it has read since Spark was started.
    rows: int = 0
    batch_ms: int | None = None
    is_running: bool = False
    trouble: str | None = None
    dropped: int = 0


@dataclass(slots=True, kw_only=True)
class Told:
    """What the process has told in its present life."""

    queries: dict[str, Query] = field(default_factory=lambda: {name: Query() for name in PIPELINES})
    archived: int | None = None
    is_up: bool = False
    is_replaying: bool = False


class Spark(Child):
    def __init__(self, bootstrap: str, folders: Folders, journal: Journal) -> None:
        super().__init__("Spark", folders.logs / "spark.log")
        self._bootstrap = bootstrap
        self._folders = folders
        self._journal = journal
        self.told = Told()

    @property
    def health(self) -> Health:
        if self.trouble is not None:
            return Health.TROUBLED
        return Health.UP if self.told.is_up else Health.STARTING

    def command(self) -> list[str]:
        self.told = Told()
        words = {"bootstrap": self._bootstrap, "data": str(self._folders.root)}
        return [sys.executable, "-m", "penstock.demo.spark_main", json.dumps(words)]

    def heard(self, line: str) -> None:
        try:
            document = json.loads(line)
        except ValueError:
            return  # of a library that prints
        if isinstance(document, dict):
            self._learn(document)

    def _learn(self, told: dict[str, Any]) -> None:
        self.trouble = None
        if (text := told.get("event")) is not None:
            self._journal.say(text, is_trouble=told.get("is_trouble", False))
        if "is_up" in told:
            self.told.is_up = told["is_up"]
        if "is_replaying" in told:
            self.told.is_replaying = told["is_replaying"]
        if "archived" in told:
            self.told.archived = told["archived"]
        if (name := told.get("pipeline")) in self.told.queries:
            self._learn_of(self.told.queries[name], told)

    def _learn_of(self, query: Query, told: dict[str, Any]) -> None:
        for fact in ("rows", "batch_ms", "is_running", "trouble", "dropped"):
            if fact in told:
                setattr(query, fact, told[fact])
