"""A whole group that starts or restarts at once causes a few rebalances, not one for each member."""

import pytest
from tests.unit.groups.classic.many_members import Herd

SIZE = 100
SEEDS = range(3)


def settled(herd: Herd) -> bool:
    members = herd.shard.groups["g"].members
    return len(members) == SIZE and all(consumer.is_stable for consumer in herd.consumers)


def running_herd(seed: int, delay_ms: int, *, static: bool = False) -> Herd:
    herd = Herd(seed=seed, initial_rebalance_delay_ms=delay_ms)
    herd.start(SIZE, within_ms=2_000, static=static)
    herd.run(60_000)
    assert settled(herd)
    return herd


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("delay_ms", "generations_max"), [(0, 10), (3_000, 1)])
def test_a_group_that_starts(seed: int, delay_ms: int, generations_max: int) -> None:
    herd = running_herd(seed, delay_ms)
    assert len(herd.generations) <= generations_max


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delay_ms", [0, 3_000])
def test_a_group_that_crashes_and_restarts(seed: int, delay_ms: int) -> None:
    """The old members are missed only when their sessions end; by then all the new ones are there."""
    herd = running_herd(seed, delay_ms)
    herd.generations.clear()
    herd.crash()
    herd.start(SIZE, within_ms=2_000)
    herd.run(60_000)
    assert settled(herd)
    assert len(herd.generations) <= 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delay_ms", [0, 3_000])
def test_a_group_that_is_redeployed(seed: int, delay_ms: int) -> None:
    """Old members leave while new ones join: each round takes in all who came during the one before."""
    herd = running_herd(seed, delay_ms)
    herd.generations.clear()
    herd.leave(within_ms=1_000)
    herd.start(SIZE, within_ms=2_000)
    herd.run(60_000)
    assert settled(herd)
    assert len(herd.generations) <= 20


@pytest.mark.parametrize("seed", SEEDS)
def test_static_members_restart_without_any_rebalance(seed: int) -> None:
    herd = running_herd(seed, 3_000, static=True)
    generation = herd.shard.groups["g"].generation
    herd.crash()
    herd.start(SIZE, within_ms=2_000, static=True)
    herd.run(60_000)
    assert settled(herd)
    assert herd.shard.groups["g"].generation == generation
