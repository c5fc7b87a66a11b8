"""Elections on a network slower than the timeouts: they end, and the leader stays."""

import pytest
from tests.unit.raft.world import Member, RandomWorld, voter

from penstock.raft.types import Role, Timings, VoterSet


class StarvedWorld(RandomWorld):
    """Processes that get so little of the processor that a message takes as long as an election may."""

    timings = Timings()

    def __init__(self, seed: int, *, delay_ms: tuple[int, int]) -> None:
        super().__init__(seed)
        self._delay_ms = delay_ms

    def latency_ms(self) -> int:
        return self.random.randint(*self._delay_ms)

    def answer_ms_max(self) -> int:
        return 10_000

    def found(self) -> None:
        self.members.update({id: Member(self, id, None) for id in (1, 2, 3)})
        founders = VoterSet(tuple(voter(member.key) for member in self.members.values()))
        for member in self.members.values():
            member.founders = founders
            member.start()

    @property
    def epoch(self) -> int:
        return max(member.node.epoch for member in self.members.values() if member.node)

    @property
    def leaders(self) -> list[int]:
        roles = {member.id: member.node.role for member in self.members.values() if member.node}
        return [id for id, role in roles.items() if role is Role.LEADER]


@pytest.mark.parametrize("delay_ms", [(300, 900), (700, 1_500), (1_000, 2_000)])
@pytest.mark.parametrize("seed", range(8))
def test_elections_end_and_their_leader_stays(seed: int, delay_ms: tuple[int, int]) -> None:
    world = StarvedWorld(seed, delay_ms=delay_ms)
    world.found()
    world.run(120_000)
    epoch, leaders = world.epoch, world.leaders
    assert len(leaders) == 1, world.members
    assert epoch <= 12
    world.run(180_000)
    assert (world.epoch, world.leaders) == (epoch, leaders), "who leads slowly leads on"


def test_where_processors_are_free_again_silence_is_noticed_as_soon_as_before() -> None:
    world = StarvedWorld(1, delay_ms=(700, 1_500))
    world.found()
    world.run(120_000)
    world._delay_ms = (1, 5)
    world.run(160_000)
    (leader,) = world.leaders
    others = [member.node for member in world.members.values() if member.id != leader]
    assert all(node and node.fetch_timeout_ms == world.timings.fetch_timeout_ms for node in others)
    world.cuts |= {(leader, 1), (leader, 2), (leader, 3), (1, leader), (2, leader), (3, leader)}
    began_ms = world.now_ms
    while leader in world.leaders or not world.leaders:
        assert world.step(began_ms + 60_000)
    assert world.now_ms - began_ms <= 3 * world.timings.fetch_timeout_ms
