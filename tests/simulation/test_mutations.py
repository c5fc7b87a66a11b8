"""The mutation score: every known bug that can be switched on is caught within a bounded number of seeds."""

import importlib
import os
import pkgutil

import pytest
from simulation.campaign import hunts
from simulation.mutation import Traps
from simulation.mutations import MUTATIONS
from simulation.run import WORLDS

from simulation import mutations

SEEDS_MAX = 800
#: Mutations that few seeds catch, at least one of each module.
QUICK = (
    "ack-before-sync",
    "elect-anyone",
    "given-up-too-early",
    "group-answers-uncommitted",
    "pending-offsets-lost-at-failover",
    "released-early",
    "vote-not-saved",
)


def missed(names: list[str], seeds_max: int) -> list[str]:
    """Return the names of mutations that no seed catches."""
    chosen = [each for each in MUTATIONS if each.name in names]
    assert len(chosen) == len(names)
    workers = min(2, os.cpu_count() or 1)
    found = hunts(chosen, first_seed=0, seeds_max=seeds_max, workers=workers)
    return [catch.name for catch in found if catch.invariant is None]


@pytest.mark.timeout(900)
def test_some_mutations_of_each_module_are_caught() -> None:
    assert missed(list(QUICK), 60) == []


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_every_mutation_is_caught() -> None:
    assert missed([each.name for each in MUTATIONS], SEEDS_MAX) == []


def test_quick_mutations_come_from_every_module() -> None:
    for module in pkgutil.iter_modules(mutations.__path__):
        found = importlib.import_module(f"simulation.mutations.{module.name}").MUTATIONS
        assert {each.name for each in found} & set(QUICK), module.name


def test_every_trap_has_a_mutation() -> None:
    traps = {value for name, value in vars(Traps).items() if name.isupper()}
    assert traps == {each.trap for each in MUTATIONS}
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS) >= 105
    assert {each.world for each in MUTATIONS} == set(WORLDS)


def test_mutations_change_shipped_code_and_are_undone() -> None:
    for mutation in MUTATIONS:
        originals = []
        for patch in mutation.patches:
            module = getattr(patch.owner, "__module__", None) or patch.owner.__name__
            assert module.startswith("penstock."), (mutation.name, patch.owner)
            originals.append((patch.owner, patch.name, patch.owner.__dict__[patch.name]))
        with mutation.applied():
            for owner, name, original in originals:
                assert owner.__dict__[name] is not original, mutation.name
        for owner, name, original in originals:
            assert owner.__dict__[name] is original, mutation.name
