"""The plan of a replay: which offsets, in how many pieces. Made once, and the same for whoever goes on with it.

It is on the board under `replay/<id>/<something that nobody else has>`. Should two have planned at the same time, the
plan that came to the board first counts, and both see which one that is.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.board import Board
from penstock.spark.replay.chunks import chunk, count, total
from penstock.spark.replay.request import ReplayError, Request

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ranges: tuple[OffsetRange, ...]
    #: Of each piece.
    offsets_max: int

    @property
    def pieces(self) -> int:
        return count(self.ranges, self.offsets_max)

    @property
    def total(self) -> int:
        """In offsets."""
        return total(self.ranges)

    def piece(self, index: int) -> list[OffsetRange]:
        return chunk(self.ranges, self.offsets_max, index)

    def to_json(self, request: Request) -> dict[str, Any]:
        ranges = [
            [each.topic, str(each.topic_id) if each.topic_id else None, each.partition, each.start, each.end]
            for each in self.ranges
        ]
        return {
            "version": _VERSION,
            "id": request.id,
            "asked": request.identity,
            "ranges": ranges,
            "offsets_max": self.offsets_max,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Plan:
        ranges = tuple(
            OffsetRange(topic, UUID(topic_id) if topic_id else None, partition, start, end)
            for topic, topic_id, partition, start, end in told["ranges"]
        )
        return cls(ranges=ranges, offsets_max=told["offsets_max"])


def agreed(board: Board, request: Request, make: Callable[[], Plan]) -> tuple[Plan, bool]:
    """The plan of this replay, and whether it was there before.

    Raises ReplayError where the id belongs to another replay; Unavailable, Refused, and what `make` raises.
    """
    found = _first(board, request)
    if found is not None:
        return found, True
    board.write(f"{_prefix(request)}{uuid.uuid4().hex}", make().to_json(request))
    found = _first(board, request)
    if found is None:
        raise ReplayError(f"replay {request.id}: its plan is not on the board, where it was written")
    return found, False


def _prefix(request: Request) -> str:
    return f"replay/{request.id}/"


def _first(board: Board, request: Request) -> Plan | None:
    """In the order of the board: every plan has a key of its own, written once, so none takes another's place."""
    for key, document in board.read().items():
        if key.startswith(_prefix(request)):
            return _checked(document, request)
    return None


def _checked(document: Mapping[str, Any], request: Request) -> Plan:
    if document.get("version") != _VERSION:
        raise ReplayError(f"replay {request.id} was planned by another version, and cannot be gone on with")
    if document["asked"] != request.identity:
        differing = sorted(
            name for name, value in request.identity.items() if document["asked"].get(name) != value
        )
        raise ReplayError(
            f"replay {request.id} was begun with another {', '.join(differing)}: give this one another id="
        )
    return Plan.from_json(document)
