"""Where the replicas of new partitions go: over racks first, then evenly over brokers, starting anywhere.

Each partition takes the next rack as its first, so that leaders spread; inside a rack brokers take turns.
A fenced broker is chosen only when its rack has no other left for the partition, and never leads; a rack without any
live broker only when there are too few others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from penstock.protocol.errors import ApiError, ErrorCode

#: `draw(n)` gives a number from 0 to n - 1.
Draw = Callable[[int], int]
T = TypeVar("T")


class Candidate(NamedTuple):
    id: int
    rack: str | None = None
    fenced: bool = False


def place_replicas(
    brokers: Sequence[Candidate], *, partitions: int, replication_factor: int, draw: Draw
) -> list[tuple[int, ...]]:
    """The replicas of each new partition, leader first. Raises INVALID_REPLICATION_FACTOR."""
    _refuse_impossible(brokers, replication_factor)
    racks = _racks(brokers, draw)
    start = draw(len(racks))
    return [_place_one(racks, start + number, replication_factor) for number in range(partitions)]


class _Rack:
    """Brokers of one rack, who take turns: one round for leading, one for following another rack."""

    __slots__ = ("_follows", "_leads", "fenced", "live")

    def __init__(self, live: list[int], fenced: list[int], draw: Draw) -> None:
        self.live = live
        self.fenced = fenced
        self._leads = draw(max(1, len(live)))
        self._follows = draw(max(1, len(live)))

    def next_leader(self) -> list[int]:
        """The leader of this turn, then who could follow it; who comes second changes with every round."""
        turn, self._leads = self._leads, self._leads + 1
        leader, *others = _rotated(self.live, turn)
        return [leader, *_rotated(others, turn // len(self.live)), *_rotated(self.fenced, turn)]

    def next_followers(self) -> list[int]:
        """Every round starts one further on, so that no leader is always followed by the same broker."""
        turn, self._follows = self._follows, self._follows + 1
        return _rotated(self.live, turn + turn // max(1, len(self.live))) + _rotated(self.fenced, turn)


def _refuse_impossible(brokers: Sequence[Candidate], replication_factor: int) -> None:
    if replication_factor <= 0:
        raise _unplaceable(replication_factor, "the replication factor must be larger than 0.")
    if all(broker.fenced for broker in brokers):
        raise _unplaceable(replication_factor, "All brokers are currently fenced.")
    if replication_factor > len(brokers):
        raise _unplaceable(
            replication_factor,
            f"The target replication factor of {replication_factor} cannot be reached because only "
            f"{len(brokers)} broker(s) are registered.",
        )


def _racks(brokers: Sequence[Candidate], draw: Draw) -> list[_Rack]:
    by_rack: dict[str, tuple[list[int], list[int]]] = {}
    for broker in sorted(brokers):
        live, fenced = by_rack.setdefault(broker.rack or "", ([], []))
        (fenced if broker.fenced else live).append(broker.id)
    return [_Rack(live, fenced, draw) for _, (live, fenced) in sorted(by_rack.items())]


def _place_one(racks: list[_Rack], start: int, replication_factor: int) -> tuple[int, ...]:
    live, fenced = [rack for rack in racks if rack.live], [rack for rack in racks if not rack.live]
    ring = (_rotated(live, start) + _rotated(fenced, start))[:replication_factor]
    orders = [ring[0].next_leader(), *(rack.next_followers() for rack in ring[1:])]
    laps = max(len(order) for order in orders)
    taken = [order[lap] for lap in range(laps) for order in orders if lap < len(order)]
    return tuple(taken[:replication_factor])


def _rotated(items: list[T], by: int) -> list[T]:
    by %= max(1, len(items))
    return items[by:] + items[:by]


def _unplaceable(replication_factor: int, why: str) -> ApiError:
    return ApiError(
        ErrorCode.invalid_replication_factor,
        f"Unable to replicate the partition {replication_factor} time(s): {why}",
    )
