"""Somebody who looks after dead letters: enters the price that was missing, and has those orders replayed."""

from __future__ import annotations

import time
from typing import Final

from penstock.demo.journal import Journal
from penstock.demo.names import REPLAYED
from penstock.demo.parts import Part
from penstock.demo.prices import PriceList
from penstock.demo.spark_child import REPLAY_LETTERS, Spark
from penstock.demo.tally import Tally

#: The class of the errors that a price mends.
MENDABLE: Final = "NoPrice"
#: So many must wait, and so much time must have passed since the last time.
_LETTERS_MIN: Final = 5
_PAUSE_S: Final = 20.0
_LOOK_EVERY_S: Final = 1.0


class Repairs(Part):
    def __init__(self, tally: Tally, spark: Spark, prices: PriceList, journal: Journal) -> None:
        super().__init__("repairs")
        self._tally = tally
        self._spark = spark
        self._prices = prices
        self._journal = journal

    @property
    def waiting(self) -> int:
        """Letters that can be mended and are not replayed yet."""
        return self._tally.errors[MENDABLE] - self._tally.records[REPLAYED]

    def work(self) -> None:
        rested_from = time.monotonic()
        while not self.stopping.wait(_LOOK_EVERY_S):
            told = self._spark.told
            is_time = time.monotonic() - rested_from >= _PAUSE_S
            if told.is_replaying or not told.is_up:
                rested_from = time.monotonic()
            elif is_time and self._tally.is_current and self.waiting >= _LETTERS_MIN:
                product = self._prices.add_special()
                self._journal.say(f"{product} has a price now, its dead letters go back to the topic")
                self._spark.tell(REPLAY_LETTERS)
                rested_from = time.monotonic()
