"""The price list: a file that people mend while orders flow. What it lacks is what dead letters are about."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

BASICS: Final = {
    "apples": 2.4,
    "bread": 3.2,
    "cheese": 6.5,
    "coffee": 8.9,
    "honey": 5.8,
    "olives": 4.1,
}
_SPECIAL: Final = "special offer "
_SPECIAL_PRICE: Final = 9.9


def special(number: int) -> str:
    """The name of the special offer with this number, from 1."""
    return f"{_SPECIAL}{number}"


class PriceList:
    """Of one process, which reads the file again when it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._prices: dict[str, float] = {}

    def all(self) -> dict[str, float]:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return BASICS
        version = (found.st_ino, found.st_mtime_ns)
        if version != self._version:
            self._prices = json.loads(self._path.read_text())
            self._version = version
        return self._prices

    @property
    def specials(self) -> int:
        """How many special offers have a price."""
        return sum(product.startswith(_SPECIAL) for product in self.all())

    def add_special(self) -> str:
        """Give the next special offer its price; returns its name."""
        product = special(self.specials + 1)
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({**self.all(), product: _SPECIAL_PRICE}, indent=2))
        temporary.replace(self._path)
        return product
