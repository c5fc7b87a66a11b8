"""The election of a partition's leader. `elect` decides every election in the cluster."""

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from penstock.cluster.metadata_records import NO_LEADER

Replicas = tuple[int, ...]


class Election(Enum):
    """The purpose of an election."""

    ONLINE = "keep the leader while it can lead"
    PREFERRED = "the first replica, if it can lead"
    UNCLEAN = "any live replica, even if committed records are lost"


class ElectionInput(NamedTuple):
    """A partition's new state, before its leader is elected."""

    replicas: Replicas
    leader: int  # the leader before the election
    isr: Replicas
    elr: Replicas
    last_known_elr: Replicas
    is_active: Callable[[int], bool]
    #: The last leader may be elected again without an operator, although it may have lost records.
    trusts_last_leader: bool


class Elected(NamedTuple):
    leader: int
    unclean: bool = False


NONE_ELECTED: Final = Elected(NO_LEADER)


def elect(candidates: ElectionInput, election: Election) -> Elected:
    """Elects a replica known to have every acknowledged record; otherwise, only where allowed, one that is alive."""
    leader = first_complete(candidates, election)
    if leader is not None:
        return Elected(leader)
    if may_elect_last_leader(candidates):
        return Elected(candidates.last_known_elr[0], unclean=True)
    if election is Election.UNCLEAN:
        return first_alive(candidates)
    return NONE_ELECTED


def first_complete(candidates: ElectionInput, election: Election) -> int | None:
    order = candidates.replicas
    if election is not Election.PREFERRED:
        order = (candidates.leader, *order)  # a leader that can lead stays
    else:
        order = (order[0], candidates.leader, *order)
    return next((replica for replica in order if is_complete(candidates, replica)), None)


def is_complete(candidates: ElectionInput, replica: int) -> bool:
    """Whether the replica is active and known to have every acknowledged record."""
    known = candidates.isr or candidates.elr
    return replica in known and candidates.is_active(replica)


def may_elect_last_leader(candidates: ElectionInput) -> bool:
    """Whether no replica is known to be complete, and the last leader, the next best, is known and active."""
    return (
        candidates.trusts_last_leader
        and not candidates.isr
        and not candidates.elr
        and len(candidates.last_known_elr) == 1
        and candidates.is_active(candidates.last_known_elr[0])
    )


def first_alive(candidates: ElectionInput) -> Elected:
    alive = next(filter(candidates.is_active, candidates.replicas), None)
    return NONE_ELECTED if alive is None else Elected(alive, unclean=True)
