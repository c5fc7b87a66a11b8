"""What one share partition's dead letters add up to."""

from uuid import UUID

from penstock.groups.share_state.burials import PartitionBurials
from penstock.groups.share_state.records import Plan, Settled, Target
from penstock.groups.share_state.values import BURIED_LIMIT

GRAVES = Target(UUID(int=9), 0)


def planned(*offsets: tuple[int, int]) -> PartitionBurials:
    burials = PartitionBurials()
    burials.add([(0, 9, BURIED_LIMIT, 5)])
    burials.begin(Plan(7, 0, 0, "graves", GRAVES, offsets, offsets))
    return burials


def test_what_is_lost_was_not_buried() -> None:
    """Given up with its source, or refused for good."""
    burials = planned((0, 3))
    burials.settle(Settled(True, 10, ((0, 9),)))
    assert (burials.pending_count, burials.buried, burials.lost) == (0, 0, 10)


def test_what_was_planned_is_buried_and_the_rest_waits() -> None:
    burials = planned((0, 3))
    burials.settle(Settled(True, 0, (), as_planned=True))
    assert (burials.pending_count, burials.buried, burials.lost) == (6, 4, 0)
