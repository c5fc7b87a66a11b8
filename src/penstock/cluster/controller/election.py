"""Who leads a partition. Every election in the cluster is decided by `elect`."""

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from penstock.cluster.records import NO_LEADER

Replicas = tuple[int, ...]


class Election(Enum):
    """What a change of leader is wanted for."""

    ONLINE = "keep the leader while it can lead"
    PREFERRED = "the first replica, if it can lead"
    UNCLEAN = "somebody, whatever is lost"


class Candidates(NamedTuple):
    """A partition as it will be, but for its leader."""

    replicas: Replicas
    leader: int  # as it was
    isr: Replicas
    elr: Replicas
    last_known_elr: Replicas
    is_active: Callable[[int], bool]
    #: The last leader may come back on its own, although it may have lost something.
    trusts_last_leader: bool


class Elected(NamedTuple):
    leader: int
    unclean: bool = False


NOBODY: Final = Elected(NO_LEADER)


def elect(candidates: Candidates, election: Election) -> Elected:
    """First who is known to have everything, then, only where allowed, who is there."""
    leader = first_complete(candidates, election)
    if leader is not None:
        return Elected(leader)
    if may_return(candidates):
        return Elected(candidates.last_known_elr[0], unclean=True)
    if election is Election.UNCLEAN:
        return first_alive(candidates)
    return NOBODY


def first_complete(candidates: Candidates, election: Election) -> int | None:
    order = candidates.replicas
    if election is not Election.PREFERRED:
        order = (candidates.leader, *order)  # who leads well goes on leading
    else:
        order = (order[0], candidates.leader, *order)
    return next((replica for replica in order if is_complete(candidates, replica)), None)


def is_complete(candidates: Candidates, replica: int) -> bool:
    """Alive, and known to have everything that was acknowledged."""
    known = candidates.isr or candidates.elr
    return replica in known and candidates.is_active(replica)


def may_return(candidates: Candidates) -> bool:
    """Nobody is known to have everything, and the last leader alone knows best."""
    return (
        candidates.trusts_last_leader
        and not candidates.isr
        and not candidates.elr
        and len(candidates.last_known_elr) == 1
        and candidates.is_active(candidates.last_known_elr[0])
    )


def first_alive(candidates: Candidates) -> Elected:
    alive = next(filter(candidates.is_active, candidates.replicas), None)
    return NOBODY if alive is None else Elected(alive, unclean=True)
