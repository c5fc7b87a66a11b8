"""What became of the records of share groups: who was given them, what members said of them, and where they ended.

The history wraps methods of the shipped share partition leaders, so it sees each acquisition and acknowledgement on
the node at the moment it happens, even if the response never reaches the member. Members and the reader of the
dead-letter topic add what they receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from penstock.broker.coordinators.share.fetch import AcquiredRecords, DelayedShareFetch
from penstock.broker.coordinators.share.partitions import SharePartitionLeader
from penstock.groups.share.partition.share_partition_state import ACCEPT, REJECT, RELEASE, RENEW
from simulation.checks.committed import CommittedLogs
from simulation.cluster import Cluster

#: First offset, last offset, and one acknowledge type for each offset, or one for all.
Acknowledged = tuple[int, int, bytes]
_REJECTED_REASON = "rejected"


class GroupPolicy(NamedTuple):
    """What a group is promised."""

    lock_ms: int
    limit: int
    is_at_most_once: bool = False
    writes_dead_letters: bool = False
    #: A released record is not handed out again for at least this long by the same leader.
    backoff_ms: int = 0


class Shared(NamedTuple):
    """One record, as one group sees it."""

    group: str
    topic: str
    partition: int
    offset: int


class DeadLetter(NamedTuple):
    record: Shared
    reason: str
    delivery_count: int
    value: bytes | None


class _Lock(NamedTuple):
    member: str
    until_ms: int


class ShareHistory:
    def __init__(self, cluster: Cluster, committed: CommittedLogs, policies: dict[str, GroupPolicy]) -> None:
        self.loop = cluster.loop
        self.committed = committed
        self.policies = policies
        self.delivered: Counter[Shared] = Counter()
        #: The largest leader epoch of each share partition that was loaded so far.
        self._epochs: Counter[tuple[str, str, int]] = Counter()
        #: Of each leader its own: a deposed leader does not know the locks of its successor.
        self._locks: dict[Shared, dict[SharePartitionLeader, _Lock]] = {}
        #: When a leader may hand out a released record again.
        self._delayed: dict[tuple[SharePartitionLeader, Shared], int] = {}
        #: Records that a leader has taken as accepted, whether the member heard of it or not: by member, its epoch.
        self._said: dict[Shared, dict[str, int]] = {}
        self._rejected: dict[Shared, None] = {}
        #: Records that do not come again in this leader epoch or later.
        self._final: dict[Shared, int] = {}
        self._accepted: dict[Shared, None] = {}
        self._dead_letters: dict[Shared, None] = {}

    # -- observing nodes -------------------------------------------------------------------------------

    @contextmanager
    def observing(self) -> Iterator[None]:
        history = self
        take = DelayedShareFetch._take
        load = SharePartitionLeader._load
        acknowledge = SharePartitionLeader.acknowledge
        release = SharePartitionLeader.release

        def take_observed(self: Any, *args: Any) -> AcquiredRecords | None:
            portion = take(self, *args)
            if portion is not None and portion.led is not None:
                history.acquired(portion.led, self._member, portion.acquired)
            return portion

        async def load_observed(self: SharePartitionLeader) -> None:
            await load(self)
            if self.rules is not None:
                history.loaded(self)

        def acknowledge_observed(
            self: SharePartitionLeader, member: str, batches: Any, *, may_renew: bool
        ) -> Any:
            stored = acknowledge(self, member, batches, may_renew=may_renew)
            history.said(self, member, batches)
            return stored

        def release_observed(self: SharePartitionLeader, member: str, *, with_delay: bool) -> Any:
            stored = release(self, member, with_delay=with_delay)
            history.released(self, member)
            return stored

        shipped = (take, load, acknowledge, release)
        self._replace(take_observed, load_observed, acknowledge_observed, release_observed)
        try:
            yield
        finally:
            self._replace(*shipped)

    @staticmethod
    def _replace(take: Any, load: Any, acknowledge: Any, release: Any) -> None:
        DelayedShareFetch._take = take  # type: ignore[method-assign]
        SharePartitionLeader._load = load  # type: ignore[method-assign]
        SharePartitionLeader.acknowledge = acknowledge  # type: ignore[method-assign]
        SharePartitionLeader.release = release  # type: ignore[method-assign]

    # -- what leaders do -------------------------------------------------------------------------------

    def loaded(self, leader: SharePartitionLeader) -> None:
        partition = leader.partition
        key = (leader.group, partition.topic, partition.index)
        self._epochs[key] = max(self._epochs[key], leader.leader_epoch)
        self.loop.note("share partition loaded", leader, "epoch", leader.leader_epoch)

    def acquired(
        self, leader: SharePartitionLeader, member: str, acquired: Iterable[tuple[int, int, int]]
    ) -> None:
        policy, now_ms = self.policies[leader.group], self._now_ms()
        for first, last, delivery_count in acquired:
            if delivery_count > policy.limit:
                raise self.loop.fail("no record is delivered beyond its limit", f"{first}-{last} of {leader}")
            for offset in range(first, last + 1):
                record = _record(leader, offset)
                self._check_free(record, leader, member, now_ms)
                self._locks.setdefault(record, {})[leader] = _Lock(member, now_ms + policy.lock_ms)
                self.delivered[record] += 1
                if policy.is_at_most_once and self.delivered[record] > 1:
                    raise self.loop.fail("at most once: never handed out twice", f"{record} to {member}")

    def _check_free(self, record: Shared, leader: SharePartitionLeader, member: str, now_ms: int) -> None:
        for holder, lock in self._locks.get(record, {}).items():
            if now_ms < lock.until_ms and self._is_same(holder, leader):
                raise self.loop.fail(
                    "a record has one holder at a time", f"{record} is given to {member} at {now_ms}, {lock}"
                )
        if self._final.get(record, leader.leader_epoch + 1) <= leader.leader_epoch:
            raise self.loop.fail(
                "a finished record never comes again", f"{record} to {member} in epoch {leader.leader_epoch}"
            )
        due_ms = self._delayed.pop((leader, record), 0)
        if now_ms < due_ms:
            raise self.loop.fail(
                "a released record waits for its backoff",
                f"{record} to {member} at {now_ms} instead of {due_ms}",
            )

    def _is_same(self, holder: SharePartitionLeader, leader: SharePartitionLeader) -> bool:
        """Whether a leader has to respect the locks of another: locks are not stored, so the next leader need not."""
        return holder is leader or (not holder.is_closed and holder.leader_epoch == leader.leader_epoch)

    def said(self, leader: SharePartitionLeader, member: str, batches: Sequence[Acknowledged]) -> None:
        """A leader has taken these acknowledgements."""
        policy, now_ms = self.policies[leader.group], self._now_ms()
        for offset, kind in each_offset(batches):
            record = _record(leader, offset)
            locks = self._locks.get(record, {})
            lock = locks.get(leader)
            if lock is None or lock.member != member:
                raise self.loop.fail(
                    "only the holder of a record acknowledges it", f"{record} by {member}, holder: {lock}"
                )
            if kind == RENEW:
                locks[leader] = lock._replace(until_ms=now_ms + policy.lock_ms)
                continue
            del locks[leader]
            if kind == REJECT:
                self._rejected[record] = None
            elif kind == ACCEPT:
                epochs = self._said.setdefault(record, {})
                epochs[member] = max(epochs.get(member, 0), leader.leader_epoch)
            elif kind == RELEASE and policy.backoff_ms:
                self._delayed[leader, record] = now_ms + policy.backoff_ms

    def released(self, leader: SharePartitionLeader, member: str) -> None:
        """A member has left or was lost: the records that it held are free."""
        for locks in self._locks.values():
            if leader in locks and locks[leader].member == member:
                del locks[leader]

    # -- what clients receive --------------------------------------------------------------------------

    def received(self, group: str, topic: str, index: int, offset: int, value: bytes | None) -> None:
        if not self.delivered[Shared(group, topic, index, offset)]:
            raise self.loop.fail(
                "members receive what they acquired", f"{offset} of {topic}-{index} for {group}"
            )
        self.committed.consumed(topic, index, offset, value)

    def confirmed(
        self, group: str, topic: str, index: int, member: str, batches: Sequence[Acknowledged]
    ) -> None:
        """A member was told that its acknowledgements are stored."""
        for offset, kind in each_offset(batches):
            record = Shared(group, topic, index, offset)
            if kind == ACCEPT:
                epoch = self._said.get(record, {}).get(member)
                if epoch is None:
                    raise self.loop.fail("confirmed means taken", f"{record} by {member}")
                self._accepted[record] = None
                self._finish(record, epoch)

    def dead_letter(self, letter: DeadLetter) -> None:
        """A dead letter is committed."""
        record = letter.record
        policy = self.policies[record.group]
        if not policy.writes_dead_letters:
            raise self.loop.fail("dead letters where they are wanted only", f"{letter}")
        if record in self._dead_letters:
            raise self.loop.fail("a dead letter is written exactly once", f"{letter}")
        if record in self._accepted:
            raise self.loop.fail("an accepted record has no dead letter", f"{letter}")
        if letter.value != self.committed.named(record.topic, record.partition).values.get(record.offset):
            raise self.loop.fail("a dead letter is a copy of its record", f"{letter}")
        is_due = self.delivered[record] >= policy.limit and letter.delivery_count == policy.limit
        if letter.reason == _REJECTED_REASON:
            is_due = record in self._rejected
        if not is_due:
            raise self.loop.fail(
                "no record is given up before its limit",
                f"{letter}: delivered {self.delivered[record]} times",
            )
        self._dead_letters[record] = None
        # The leader that gave up the record was loaded by now.
        self._finish(record, self._epochs[record.group, record.topic, record.partition])

    def _finish(self, record: Shared, epoch: int) -> None:
        self._final[record] = min(self._final.get(record, epoch), epoch)

    # -- the end ---------------------------------------------------------------------------------------

    def finish(self, group: str, topic: str, index: int) -> None:
        """The group has no lag: each record was accepted or given up for a reason, with a dead letter if promised."""
        policy = self.policies[group]
        if policy.is_at_most_once:
            return
        for offset in self.committed.named(topic, index).values:
            record = Shared(group, topic, index, offset)
            is_given_up = record in self._rejected or self.delivered[record] >= policy.limit
            if policy.writes_dead_letters:
                is_given_up = record in self._dead_letters
            if record not in self._said and not is_given_up:
                raise self.loop.fail(
                    "no record is lost", f"{record} was delivered {self.delivered[record]} times, and is gone"
                )

    def _now_ms(self) -> int:
        """As share partition leaders count."""
        return int(self.loop.now * 1000)


def _record(leader: SharePartitionLeader, offset: int) -> Shared:
    return Shared(leader.group, leader.partition.topic, leader.partition.index, offset)


def each_offset(batches: Iterable[Acknowledged]) -> Iterator[tuple[int, int]]:
    for first, last, types in batches:
        for offset in range(first, last + 1):
            yield offset, types[0] if len(types) == 1 else types[offset - first]
