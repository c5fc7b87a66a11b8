"""Snapshots of the metadata: the image as records, the voters, and the way over the network in parts."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.cluster.image import ClusterImage
from penstock.cluster.image_snapshot import snapshot_records
from penstock.raft.types import OffsetAndEpoch, VoterSet


class Snapshot(NamedTuple):
    id: OffsetAndEpoch
    voters: VoterSet
    records: tuple[Any, ...]

    @classmethod
    def of(cls, id: OffsetAndEpoch, image: ClusterImage, voters: VoterSet) -> Snapshot:
        return cls(id, voters, tuple(record for batch in snapshot_records(image) for record in batch))

    @classmethod
    def from_items(cls, items: tuple[Any, ...]) -> Snapshot:
        id, voters, *records = items
        return cls(id, voters, tuple(records))

    @property
    def items(self) -> tuple[Any, ...]:
        """What it is made of, to be sent in parts."""
        return (self.id, self.voters, *self.records)

    def image(self) -> ClusterImage:
        image = ClusterImage()
        image.apply(self.records)
        return image
