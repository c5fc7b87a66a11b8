"""A pipeline for tests of the runner. Files make its sink wait or fail."""

import os
import time
from pathlib import Path
from typing import Any

from penstock.spark import pipeline

FOLDER = Path(os.environ["EXAMPLE_FOLDER"])
#: While this file exists, every batch fails.
FAILS = FOLDER / "fails"
#: While this file exists, a batch does not end.
HOLDS = FOLDER / "holds"
#: A line for each batch that has started, and one more when it is done.
DIARY = FOLDER / "diary"


class Diary:
    def prepare(self, spark: Any, run: Any) -> None:
        pass

    def describe(self) -> str:
        return "a diary"

    def write(self, rows: Any, batch: Any) -> None:
        if FAILS.exists():
            raise ConnectionError("the shop is closed")
        self._note(f"begun {batch.number}")
        while HOLDS.exists():
            time.sleep(0.05)
        self._note(f"done {batch.number} with {rows.count()}")

    def _note(self, line: str) -> None:
        with DIARY.open("a") as file:
            file.write(line + "\n")


@pipeline("example", source=os.environ["EXAMPLE_SOURCE"], sink=Diary(), every="200ms")
def example(rows: Any) -> Any:
    return rows
