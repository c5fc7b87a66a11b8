"""One partition, three replicas, a controller, and a scheduler that drops, delays, repeats and crashes.

The rules are the real ones; the world around them is a page. A crash is a power loss: what was not synced is gone.
Every seed must keep what was committed, and the classic bugs, switched on one by one, must not get away.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from penstock.log.leader_epochs import LeaderEpochCache
from penstock.protocol.errors import ErrorCode
from penstock.replication.follower import (
    Append,
    EpochEndOffset,
    FetchPosition,
    FollowerRules,
    RaiseHighWatermark,
    ReplicaFetchReply,
    Truncate,
)
from penstock.replication.leader import IsrProposal, LeaderRules

REPLICAS = (1, 2, 3)
LAG_MS = 60
SEEDS = 1000


class BrokenPromise(AssertionError):
    pass


class Replica:
    """A log of (epoch, value) and what a process knows; `synced` survives a crash, the rest does not."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.log: list[tuple[int, int]] = []
        self.epochs = LeaderEpochCache()
        self.synced = self.saved_high = 0
        self.high_watermark = 0
        self.start_offset = 0
        self.is_up = True
        self.broker_epoch = number
        self.epoch = -1
        self.leading: LeaderRules | None = None
        self.following: FollowerRules | None = None

    @property
    def end_offset(self) -> int:
        return len(self.log)

    @property
    def durable_offset(self) -> int:
        return self.synced

    def epoch_at(self, offset: int) -> int:
        return self.epochs.epoch_at(offset)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        return self.epochs.end_offset_for(epoch, len(self.log))

    def append(self, entry: tuple[int, int]) -> None:
        if entry[0] > self.epochs.latest:
            self.epochs.assign(entry[0], len(self.log))
        self.log.append(entry)

    def truncate(self, offset: int) -> None:
        del self.log[offset:]
        self.epochs.truncate_end(offset)
        self.synced = min(self.synced, offset)
        self.high_watermark = min(self.high_watermark, offset)

    def crash(self) -> None:
        self.truncate(self.synced)
        self.high_watermark = min(self.saved_high, len(self.log))
        self.is_up = False
        self.leading = self.following = None
        self.epoch = -1


class World:
    def __init__(self, seed: int, isr_min: int = 2) -> None:
        self.random = random.Random(seed)
        self.isr_min = isr_min
        self.now_ms = 0
        self.replicas = {number: Replica(number) for number in REPLICAS}
        self.leader, self.leader_epoch, self.partition_epoch = 1, 0, 0
        self.isr = frozenset(REPLICAS)
        self.fenced: set[int] = set()
        self.broker_epochs = {number: number for number in REPLICAS}
        self.wire: list[Callable[[], None]] = []
        self.committed: list[tuple[int, int]] = []
        self.values = 0
        self.is_calm = False

    # -- the controller ------------------------------------------------------------------------------

    def elect(self) -> None:
        able = sorted(self.isr - self.fenced)
        self.leader = self.random.choice(able) if able else -1
        self.leader_epoch += 1
        self.partition_epoch += 1

    def fence(self, number: int) -> None:
        self.fenced.add(number)
        if number in self.isr and len(self.isr) > 1:
            self.isr -= {number}
            self.partition_epoch += 1
        if self.leader == number:
            self.elect()

    def unfence(self, number: int) -> None:
        self.fenced.discard(number)
        if self.leader < 0 and number in self.isr:
            self.elect()

    def alter(self, replica: Replica, rules: LeaderRules, proposal: IsrProposal) -> None:
        is_answered = self.is_calm or self.random.random() < 0.7
        told: Callable[[], object]
        if (proposal.leader_epoch, proposal.partition_epoch) != (self.leader_epoch, self.partition_epoch):
            told = lambda: rules.isr_refused(final=True)  # noqa: E731
        elif any(
            number in self.fenced or (epoch >= 0 and epoch != self.broker_epochs[number])
            for number, epoch in proposal.isr
        ):
            told = rules.isr_declined
        else:
            self.isr = proposal.members
            self.partition_epoch += 1
            state = self.isr, self.partition_epoch
            told = lambda: self.note(replica, rules, rules.isr_committed(*state))  # noqa: E731
        self.wire.append(told if is_answered else lambda: rules.isr_refused(final=False))

    # -- steps ---------------------------------------------------------------------------------------

    def learn(self, replica: Replica) -> None:
        """The image reaches a node."""
        if self.leader_epoch > replica.epoch:
            replica.epoch = self.leader_epoch
            replica.leading = replica.following = None
            if self.leader == replica.number:
                self.lead(replica)
            elif self.leader >= 0:
                replica.following = FollowerRules(leader_id=self.leader, leader_epoch=self.leader_epoch)
        elif replica.leading is not None:
            self.note(replica, replica.leading, replica.leading.isr_committed(self.isr, self.partition_epoch))

    def lead(self, replica: Replica) -> None:
        if replica.log[: len(self.committed)] != self.committed:
            raise BrokenPromise(f"leader {replica.number} lacks committed records")
        replica.leading = LeaderRules(
            local_id=replica.number,
            leader_epoch=self.leader_epoch,
            partition_epoch=self.partition_epoch,
            replicas=REPLICAS,
            isr=self.isr,
            epoch_start_offset=len(replica.log),
            high_watermark=replica.high_watermark,
            local_offset=replica.synced,
            lag_ms_max=LAG_MS,
            isr_min=self.isr_min,
            now_ms=self.now_ms,
        )
        self.note(replica, replica.leading, True)

    def note(self, replica: Replica, rules: LeaderRules, moved: bool) -> None:
        """The leader shows its high watermark to readers."""
        if rules is not replica.leading:
            return
        if rules.high_watermark < replica.high_watermark:
            raise BrokenPromise("high watermark went back")
        replica.high_watermark = rules.high_watermark
        shown = replica.log[: rules.high_watermark]
        known = self.committed[: rules.high_watermark]
        if shown[: len(known)] != known:
            raise BrokenPromise("committed records changed")
        if len(shown) > len(self.committed):
            self.committed = shown

    def produce(self, replica: Replica) -> None:
        if replica.leading is not None and len(replica.leading.isr) >= self.isr_min:
            self.values += 1
            replica.append((replica.leading.leader_epoch, self.values))

    def sync(self, replica: Replica) -> None:
        replica.synced = len(replica.log)
        if replica.leading is not None:
            self.note(replica, replica.leading, replica.leading.local_moved(replica.synced))

    def save(self, replica: Replica) -> None:
        replica.saved_high = replica.high_watermark

    def ask(self, replica: Replica) -> None:
        rules = replica.following
        if rules is not None:
            asked, life = rules.position(replica), replica.broker_epoch
            self.send(lambda: self.serve(replica, rules, asked, life))

    def serve(self, asker: Replica, asking: FollowerRules, asked: FetchPosition, life: int) -> None:
        replica = self.replicas[asking.leader_id]
        rules = replica.leading
        if rules is None:
            return
        if asked.leader_epoch != rules.leader_epoch:
            answer = ReplicaFetchReply(ErrorCode.fenced_leader_epoch, -1, -1, None, False)
            self.send(lambda: self.answered(asker, asking, asked, answer, []))
            return
        diverging = self.parting(replica, rules, asked)
        records: list[tuple[int, int]] = []
        if diverging is None:
            records = replica.log[asked.offset : asked.offset + self.random.randint(1, 4)]
            moved = rules.fetched(
                asker.number,
                offset=asked.offset,
                log_end=len(replica.log),
                broker_epoch=life,
                now_ms=self.now_ms,
            )
            self.note(replica, rules, moved)
        answer = ReplicaFetchReply(ErrorCode.none, rules.high_watermark, 0, diverging, bool(records))
        self.send(lambda: self.answered(asker, asking, asked, answer, records))

    def parting(self, replica: Replica, rules: LeaderRules, asked: FetchPosition) -> EpochEndOffset | None:
        epoch, end, latest = asked.last_fetched_epoch, len(replica.log), replica.epochs.latest
        if epoch < 0:
            return None
        if epoch == rules.leader_epoch or epoch == latest:
            known, ended = epoch, end
        elif epoch > latest:
            known, ended = max(latest, 0), end
        else:
            known, ended = replica.end_offset_for(epoch)
        return EpochEndOffset(known, ended) if known < epoch or ended < asked.offset else None

    def answered(
        self,
        replica: Replica,
        asking: FollowerRules,
        asked: FetchPosition,
        answer: ReplicaFetchReply,
        records: list[tuple[int, int]],
    ) -> None:
        rules = replica.following
        if rules is None or rules is not asking:
            return
        for action in rules.answered(asked, answer, replica):
            if isinstance(action, Truncate):
                if action.lost:
                    raise BrokenPromise(f"{replica.number} truncates below its high watermark")
                replica.truncate(action.offset)
            elif isinstance(action, Append):
                for entry in records:
                    replica.append(entry)
                if self.random.random() < 0.5:
                    self.sync(replica)
            elif isinstance(action, RaiseHighWatermark):
                high = rules.bounded_high_watermark(action.offset, replica)
                replica.high_watermark = max(replica.high_watermark, high)

    def change_isr(self, replica: Replica) -> None:
        rules = replica.leading
        if rules is None:
            return
        self.note(replica, rules, rules.expired(self.now_ms))
        proposal = rules.wanted_isr(self.now_ms, self.is_eligible)
        if proposal is not None:
            rules.proposed_isr(proposal)
            self.wire.append(lambda: self.alter(replica, rules, proposal))

    def is_eligible(self, number: int, broker_epoch: int) -> bool:
        return number not in self.fenced and self.broker_epochs[number] == broker_epoch

    def send(self, message: Callable[[], None]) -> None:
        luck = self.random.random()
        if luck > 0.1:
            self.wire.append(message)
        if luck > 0.9:
            self.wire.append(message)

    def crash(self, replica: Replica) -> None:
        """One machine, or now and then the power of all of them."""
        for each in self.replicas.values() if self.random.random() < 0.2 else (replica,):
            if each.is_up:
                each.crash()
                self.wire.append(lambda gone=each: self.fence(gone.number) if not gone.is_up else None)

    def restart(self, replica: Replica) -> None:
        """Registering fences the life before."""
        self.fence(replica.number)
        replica.is_up = True
        replica.broker_epoch = self.broker_epochs[replica.number] = max(self.broker_epochs.values()) + 1
        self.unfence(replica.number)

    # -- running -------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_ms += self.random.randint(0, 5)
        if self.wire and self.random.random() < 0.45:
            self.wire.pop(self.random.randrange(min(len(self.wire), 6)))()
            return
        replica = self.replicas[self.random.choice(REPLICAS)]
        if not replica.is_up:
            if self.random.random() < 0.1:
                self.restart(replica)
            return
        deed = self.random.choices(
            (self.learn, self.produce, self.sync, self.ask, self.change_isr, self.save, self.crash),
            (20, 30, 20, 45, 12, 2, 3),
        )[0]
        deed(replica)

    def calm(self) -> None:
        """Everything comes back; what was committed must be everywhere, and new records committed."""
        self.is_calm = True
        for replica in self.replicas.values():
            if not replica.is_up:
                self.restart(replica)
        self.values += 1
        last = (self.values, False)
        for _ in range(200):
            for replica in self.replicas.values():
                self.learn(replica)
                self.sync(replica)
                if replica.leading is not None and not last[1]:
                    replica.append((replica.leading.leader_epoch, last[0]))
                    last = (last[0], True)
                self.change_isr(replica)
                self.ask(replica)
            while self.wire:
                self.wire.pop(0)()
            self.now_ms += 1
            if last[1] and self.committed and self.committed[-1][1] == last[0]:
                break
        else:
            raise BrokenPromise("a new record is never committed")

    def check_logs_match(self) -> None:
        logs = [replica.log for replica in self.replicas.values()]
        for one in logs:
            for other in logs:
                common = [at for at in range(min(len(one), len(other))) if one[at][0] == other[at][0]]
                if common and one[: common[-1] + 1] != other[: common[-1] + 1]:
                    raise BrokenPromise("logs that agree on an epoch differ before it")


def run(seed: int, steps: int = 500, isr_min: int = 2) -> World:
    world = World(seed, isr_min)
    try:
        for _ in range(steps):
            world.step()
        world.check_logs_match()
        world.calm()
        world.check_logs_match()
    except BrokenPromise as broken:
        raise BrokenPromise(f"seed {seed}, isr_min {isr_min}: {broken}") from None
    return world


def run_seeds(seeds: int) -> list[World]:
    return [run(seed, isr_min=1 + seed % 2) for seed in range(seeds)]


def test_committed_records_are_kept_whatever_happens() -> None:
    worlds = run_seeds(SEEDS)
    assert sum(len(world.committed) for world in worlds) > 10 * SEEDS, "what commits nothing proves nothing"
    assert sum(world.leader_epoch for world in worlds) > SEEDS


# -- classic bugs ------------------------------------------------------------------------------------


def _patched(owner: type, name: str, value: Any) -> Any:
    return mock.patch.object(owner, name, value)


@contextmanager
def confirms_before_sync() -> Iterator[None]:
    def position(self: FollowerRules, log: Any) -> int:
        return log.end_offset

    with _patched(FollowerRules, "_confirmed_offset", position):
        yield


@contextmanager
def truncates_to_the_high_watermark() -> Iterator[None]:
    """As Kafka did before leader epochs: whenever it begins to follow."""
    learn = World.learn

    def learns(self: World, replica: Replica) -> None:
        was_following = replica.following
        learn(self, replica)
        if replica.following is not was_following:
            replica.truncate(replica.high_watermark)

    with _patched(World, "learn", learns):
        yield


BUGS: dict[str, Callable[[], Any]] = {
    "confirm before sync": confirms_before_sync,
    "truncate to the high watermark": truncates_to_the_high_watermark,
    "skip the reconciliation": lambda: _patched(FollowerRules, "_last_epoch", lambda self, log, offset: -1),
    "take answers to other questions": lambda: _patched(
        FollowerRules, "_is_current", lambda self, asked, log: True
    ),
    "count only the committed in-sync set": lambda: _patched(
        LeaderRules, "maximal_isr", property(lambda self: self.isr)
    ),
    "count the leader alone": lambda: _patched(LeaderRules, "_least_offset", lambda self: self.local_offset),
    "count what the leader has not synced": lambda: _patched(
        LeaderRules, "_own_offset", lambda self: self._known_end
    ),
    "admit below the high watermark": lambda: _patched(
        LeaderRules, "_has_all_committed", lambda self, follower: True
    ),
    "admit below the epoch start": lambda: _patched(
        LeaderRules, "_has_reached_this_epoch", lambda self, follower: True
    ),
    "let the high watermark go back": lambda: _patched(
        LeaderRules, "_is_further", lambda self, offset: offset != self.high_watermark
    ),
    "forget a proposal that was not answered": lambda: _patched(
        LeaderRules, "isr_refused", lambda self, final: self._drop_proposal()
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_classic_bugs_are_caught(bug: str) -> None:
    """Within fewer seeds than the rules as they are have passed."""
    with BUGS[bug](), pytest.raises(BrokenPromise):
        run_seeds(SEEDS)
