"""What the parts of the demo call each other by: topics, groups, and folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.letters import dead_letter_topic, original_topic, replayed_topic, retry_level
from penstock.spark.pipelines.declaration import group_of

ORDERS: Final = "orders"
CLEAN: Final = "orders.clean"
REVENUE: Final = "revenue"
LETTERS: Final = dead_letter_topic(ORDERS)
REPLAYED: Final = replayed_topic(LETTERS)
PARCELS: Final = "parcels"
PARCEL_LETTERS: Final = dead_letter_topic(PARCELS)
PARCELS_REPLAYED: Final = replayed_topic(PARCEL_LETTERS)
#: Those that are counted, with all retry topics of orders and parcels.
TOPICS: Final = frozenset(
    {ORDERS, CLEAN, REVENUE, LETTERS, REPLAYED, PARCELS, PARCEL_LETTERS, PARCELS_REPLAYED}
)

BILLING: Final = "billing"
PACKING: Final = "packing"
SHIPPING: Final = "shipping"
#: Pipelines by their names.
CLEANING: Final = "clean-orders"
SUMMING: Final = "sum-up"
ARCHIVING: Final = "archive-orders"
PIPELINES: Final = (CLEANING, SUMMING, ARCHIVING)
#: Readers, and the groups that tell how far they are.
GROUPS: Final = {BILLING: BILLING, SHIPPING: SHIPPING, **{name: group_of(name) for name in PIPELINES}}

PARTITIONS: Final = 3


def retries_of(topic: str) -> str | None:
    """Whose records wait there to be tried again, where that is of the story."""
    found = original_topic(topic) if retry_level(topic) is not None else None
    return found if found in (ORDERS, PARCELS) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Everything that the demo keeps is below one folder, so that a second start goes on with it."""

    root: Path

    @property
    def broker(self) -> Path:
        return self.root / "broker"

    @property
    def lake(self) -> Path:
        return self.root / "lake"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def archive(self) -> Path:
        return self.lake / "orders"

    @property
    def schema(self) -> Path:
        """Of what is archived."""
        return self.root / "order.ddl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def prices(self) -> Path:
        return self.root / "prices.json"

    def make(self) -> None:
        """Raises OSError."""
        for folder in (self.broker, self.lake, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
