"""The topics, groups, pipelines and folders of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.deadletters.headers import dead_letter_topic, original_topic, replayed_topic, retry_level
from penstock.spark.pipelines.declaration import pipeline_group

ORDERS: Final = "orders"
CLEAN: Final = "orders.clean"
REVENUE: Final = "revenue"
DEAD_LETTERS: Final = dead_letter_topic(ORDERS)
REPLAYED: Final = replayed_topic(DEAD_LETTERS)
PARCELS: Final = "parcels"
PARCEL_DEAD_LETTERS: Final = dead_letter_topic(PARCELS)
PARCELS_REPLAYED: Final = replayed_topic(PARCEL_DEAD_LETTERS)
#: The topics whose records are counted, in addition to all retry topics of orders and parcels.
TOPICS: Final = frozenset(
    {ORDERS, CLEAN, REVENUE, DEAD_LETTERS, REPLAYED, PARCELS, PARCEL_DEAD_LETTERS, PARCELS_REPLAYED}
)

BILLING: Final = "billing"
PACKING: Final = "packing"
SHIPPING: Final = "shipping"
#: The names of the pipelines.
CLEAN_PIPELINE: Final = "clean-orders"
REVENUE_PIPELINE: Final = "sum-up"
ARCHIVE_PIPELINE: Final = "archive-orders"
PIPELINES: Final = (CLEAN_PIPELINE, REVENUE_PIPELINE, ARCHIVE_PIPELINE)
#: Readers, each with the group whose committed offsets show its progress.
GROUPS: Final = {BILLING: BILLING, SHIPPING: SHIPPING, **{name: pipeline_group(name) for name in PIPELINES}}

PARTITIONS: Final = 3


def retried_topic(topic: str) -> str | None:
    """The original topic of a retry topic of the demo; None for all other topics."""
    found = original_topic(topic) if retry_level(topic) is not None else None
    return found if found in (ORDERS, PARCELS) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """All data of the demo is below one folder, so that a second start continues with it."""

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
        """The schema of the archived orders."""
        return self.root / "order.ddl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def security(self) -> Path:
        """Certificates, passwords and `client.properties` of a secure demo."""
        return self.root / "security"

    @property
    def prices(self) -> Path:
        return self.root / "prices.json"

    def make(self) -> None:
        """Raises OSError."""
        for folder in (self.broker, self.lake, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
