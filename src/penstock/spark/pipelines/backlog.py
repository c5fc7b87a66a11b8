"""How much a run that has an end has to read, and how much of that it has read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.metadata import Isolation, Place
from penstock.client.positions import EARLIEST, LATEST, committed, list_offsets
from penstock.spark.offsets import Position
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.status import Extent

_STEP_OPTION: Final = "maxOffsetsPerTrigger"
#: Large enough that what a batch costs by itself does not count, small enough to fit anywhere.
_STEP: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    starts: Mapping[Place, int]
    ends: Mapping[Place, int]

    @classmethod
    def of(cls, cluster: Cluster, pipeline: Pipeline, starting: str | None) -> Backlog:
        """From where the group stands, else from where the pipeline begins. Raises Unavailable, Refused."""
        source = pipeline.source
        wanted = re.compile(source.pattern) if source.pattern is not None else source.topics
        places = [
            (name, part.index) for name, topic in cluster.topics(wanted).items() for part in topic.partitions
        ]
        ends = _offsets(cluster, places, LATEST)
        known = committed(cluster, pipeline.group, places, stable=False) if places else {}
        is_latest = (starting or source.starting) == "latest"
        starts = ends if is_latest else _offsets(cluster, places, EARLIEST)
        return cls(starts=starts | {place: at.offset for place, at in known.items()}, ends=ends)

    @property
    def total(self) -> int:
        return sum(max(end - self.starts.get(place, end), 0) for place, end in self.ends.items())

    def extent(self, reached: Position) -> Extent:
        at = dict(self.starts) | reached.offsets
        left = sum(max(end - at.get(place, end), 0) for place, end in self.ends.items())
        return Extent(done=max(self.total - left, 0), total=self.total)


def _offsets(cluster: Cluster, places: list[Place], edge: int) -> dict[Place, int]:
    wanted = dict.fromkeys(places, edge)
    found = list_offsets(cluster, wanted, isolation=Isolation.READ_COMMITTED) if places else {}
    return {place: at.offset for place, at in found.items() if at is not None}


def in_steps(pipeline: Pipeline) -> Pipeline:
    """A backlog is not read in one go, however large it is, so that it can be seen getting smaller."""
    options = pipeline.source.options
    if any(name.lower() == _STEP_OPTION.lower() for name in options):
        return pipeline
    source = replace(pipeline.source, options={**options, _STEP_OPTION: str(_STEP)})
    return replace(pipeline, source=source)
