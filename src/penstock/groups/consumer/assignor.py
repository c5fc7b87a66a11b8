"""What an assignor is given, and the assignors by name."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple
from uuid import UUID

from penstock.groups.consumer.values import Assignment
from penstock.groups.topics import Topic


class Candidate(NamedTuple):
    """A member, as an assignor sees it."""

    topics: frozenset[UUID]
    rack: str | None
    #: Its target until now, of which as much as possible is kept.
    target: Assignment
    #: Static members keep their place in an order by this.
    instance_id: str | None = None


#: By member id, in an order that does not depend on when members came.
Candidates = Mapping[str, Candidate]
Targets = dict[str, Assignment]
#: Gives every partition of these topics to one of the members that are subscribed to it, if there are any.
Assignor = Callable[[Candidates, Mapping[UUID, Topic]], Targets]


@cache
def assignor(name: str) -> Assignor:
    from penstock.groups.consumer.range_assignor import assign_ranges
    from penstock.groups.consumer.uniform_assignor import assign_uniformly

    return {"uniform": assign_uniformly, "range": assign_ranges}[name]
