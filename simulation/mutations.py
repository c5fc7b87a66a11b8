"""The mutation score: every classic bug is switched on, and seeds are run until an invariant catches it."""

from __future__ import annotations

from typing import NamedTuple

from simulation.mutation import Mutation
from simulation.mutations_cluster import CONTROLLER_MUTATIONS, QUORUM_MUTATIONS
from simulation.mutations_groups import CONSUMER_MUTATIONS, SCHEDULE_MUTATIONS, SHARE_MUTATIONS
from simulation.mutations_partition import PARTITION_MUTATIONS
from simulation.mutations_transactions import TRANSACTION_MUTATIONS
from simulation.run import run_seed

MUTATIONS: tuple[Mutation, ...] = (
    *PARTITION_MUTATIONS,
    *QUORUM_MUTATIONS,
    *CONTROLLER_MUTATIONS,
    *TRANSACTION_MUTATIONS,
    *CONSUMER_MUTATIONS,
    *SHARE_MUTATIONS,
    *SCHEDULE_MUTATIONS,
)


class Catch(NamedTuple):
    """`invariant` is None when no seed caught the bug."""

    name: str
    seeds: int
    invariant: str | None
    story: str = ""


def hunt(mutation: Mutation, *, first_seed: int, seeds_max: int) -> Catch:
    """Run seed after seed with the bug switched on until one fails that does not fail without it."""
    for number in range(seeds_max):
        with mutation.switched_on():
            outcome = run_seed(first_seed + number, only=mutation.faults, name=mutation.world)
        if outcome.is_clean:
            continue
        if run_seed(outcome.seed, only=mutation.faults, name=mutation.world).is_clean:
            return Catch(mutation.name, number + 1, outcome.invariant, outcome.story)
    return Catch(mutation.name, seeds_max, None)
