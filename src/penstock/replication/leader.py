"""The rules of a partition leader: the high watermark and the in-sync replicas.

There is one object per leader epoch; its owner drops it when the epoch changes. Offsets are durable ones: a follower
fetches from the offset that it would keep through a power loss, as its flush policy promises. Times come from a
monotonic clock; if the clock could jump, all followers would seem to lag at once. Each rule has a method of its own.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

#: How long a follower that is about to join may hold the high watermark back without a further fetch.
JOIN_HOLD_MS_MAX: Final = 1000
#: How long the leader waits for the image after a final error. The image comes at once or never: a change of the
#: controller may remove the record that the error was based on.
IMAGE_WAIT_MS_MAX: Final = 3000


class IsrProposal(NamedTuple):
    """The requested ISR: broker ids with their known broker epochs."""

    isr: tuple[tuple[int, int], ...]
    leader_epoch: int
    partition_epoch: int

    @property
    def members(self) -> frozenset[int]:
        return frozenset(broker for broker, _ in self.isr)


class FollowerLag(NamedTuple):
    """How far a follower is behind, for descriptions and metrics; -1 records if it has not fetched yet."""

    replica: int
    records: int
    since_caught_up_ms: int
    is_in_sync: bool


class _Follower:
    __slots__ = ("broker_epoch", "caught_up_ms", "end_at_fetch", "fetched_ms", "hold_until_ms", "offset")

    def __init__(self, caught_up_ms: int) -> None:
        self.offset = -1  # unknown until it fetches
        self.broker_epoch = -1
        self.caught_up_ms = caught_up_ms
        self.fetched_ms = caught_up_ms
        self.end_at_fetch = -1  # the leader's log end at the last fetch
        self.hold_until_ms = -1


class LeaderRules:
    __slots__ = (
        "_announced_ms",
        "_asked_ms",
        "_counting",
        "_followers",
        "_in_flight",
        "_isr_min",
        "_known_end",
        "_now_ms",
        "_others",
        "_proposal",
        "_unknown_ms",
        "epoch_start_offset",
        "high_watermark",
        "isr",
        "lag_ms_max",
        "leader_epoch",
        "local_id",
        "local_offset",
        "partition_epoch",
        "proposed",
        "replicas",
    )

    def __init__(
        self,
        *,
        local_id: int,
        leader_epoch: int,
        partition_epoch: int,
        replicas: Iterable[int],
        isr: Iterable[int],
        epoch_start_offset: int,
        high_watermark: int,
        local_offset: int,
        lag_ms_max: int,
        isr_min: int,
        now_ms: int,
    ) -> None:
        self.local_id = local_id
        self.leader_epoch = leader_epoch
        self.partition_epoch = partition_epoch
        self.replicas = frozenset(replicas)
        self.isr = frozenset(isr)
        #: The members of a proposed change. They count as soon as it is sent: the controller may already have made it.
        self.proposed: frozenset[int] | None = None
        self.epoch_start_offset = epoch_start_offset
        self.high_watermark = high_watermark
        self.local_offset = local_offset
        self.lag_ms_max = lag_ms_max
        self._isr_min = isr_min
        self._now_ms = now_ms
        self._known_end = max(local_offset, epoch_start_offset)
        self._proposal: IsrProposal | None = None
        self._in_flight = False
        self._announced_ms: int | None = (
            None  # when a final error came, after which the image shows the result
        )
        self._asked_ms = now_ms
        self._unknown_ms: int | None = None
        self._followers = {replica: self._new_follower(replica) for replica in self.replicas - {local_id}}
        self._counting: tuple[_Follower, ...] = ()
        self._others: tuple[_Follower, ...] = ()
        self._recount()
        self._advance()

    def __repr__(self) -> str:
        offsets = {replica: follower.offset for replica, follower in self._followers.items()}
        return (
            f"<LeaderRules {self.local_id} epoch {self.leader_epoch} high {self.high_watermark} "
            f"local {self.local_offset} {offsets} isr {sorted(self.isr)} proposed {self.proposed}>"
        )

    @property
    def isr_min(self) -> int:
        """min.insync.replicas, but at most the number of replicas."""
        return min(self._isr_min, len(self.replicas))

    @property
    def maximal_isr(self) -> frozenset[int]:
        """All brokers that may be in the controller's ISR: the committed set and the proposed one."""
        return self.isr if self.proposed is None else self.isr | self.proposed

    @property
    def has_reached_epoch_start(self) -> bool:
        """Before that, the high watermark may be lower than what earlier leaders have committed."""
        return self.high_watermark >= self.epoch_start_offset

    @property
    def is_below_min(self) -> bool:
        return len(self.isr) < self.isr_min

    # -- events --------------------------------------------------------------------------------------

    def local_moved(self, durable_offset: int) -> bool:
        """Everything below `durable_offset` is durable on this node. Returns whether the high watermark moved."""
        self.local_offset = durable_offset
        if durable_offset > self._known_end:
            self._known_end = durable_offset
        return self._advance()

    def fetched(self, replica: int, *, offset: int, log_end: int, broker_epoch: int, now_ms: int) -> bool:
        """A follower fetched from `offset` in this leader epoch, without divergence; `log_end` is the leader's log end.

        Returns whether the high watermark moved. Fetches of other brokers and of older broker epochs are ignored.
        """
        self._now_ms = now_ms
        follower = self._followers.get(replica)
        if follower is None or broker_epoch < follower.broker_epoch:
            return False
        follower.broker_epoch = broker_epoch
        is_keeping_up = self._record_fetch(follower, offset, log_end, now_ms)
        follower.hold_until_ms = now_ms + min(JOIN_HOLD_MS_MAX, self.lag_ms_max) if is_keeping_up else -1
        if log_end > self._known_end:
            self._known_end = log_end
        if offset == follower.offset:
            return False
        follower.offset = offset
        return self._advance()

    def expired(self, now_ms: int) -> bool:
        """Called before each check of the ISR. Returns whether the high watermark moved because a hold has expired."""
        self._now_ms = now_ms
        return self._advance()

    def can_join(self, replica: int) -> bool:
        """A cheap check after a fetch: whether `wanted_isr` may add this follower."""
        follower = self._followers.get(replica)
        return (
            follower is not None
            and self._proposal is None
            and replica not in self.isr
            and self._may_join(follower)
        )

    # -- the in-sync set -----------------------------------------------------------------------------

    def wanted_isr(self, now_ms: int, is_eligible: Callable[[int, int], bool]) -> IsrProposal | None:
        """The change to request from the controller, if any. A change whose result is unknown is requested again.

        `is_eligible(broker id, broker epoch)`: unfenced, not shutting down, and the epoch is its current one.
        """
        self._now_ms = now_ms
        if self._proposal is not None:
            return (
                None if self._in_flight or self._awaits_image() else self._repeated_proposal(self._proposal)
            )
        wanted = (self.isr - self._lagging(now_ms)) | self._joining(is_eligible)
        if wanted == self.isr:
            return None
        return IsrProposal(self._with_epochs(wanted), self.leader_epoch, self.partition_epoch)

    def current_isr(self) -> IsrProposal | None:
        """The current ISR, for a leader that must report another change; None while an ISR change is pending."""
        if self._proposal is not None:
            return None
        return IsrProposal(self._with_epochs(self.isr), self.leader_epoch, self.partition_epoch)

    def proposed_isr(self, proposal: IsrProposal) -> None:
        """The proposal is being sent. From now on its members count, whatever the result."""
        assert not self._in_flight, "one change at a time"
        assert (proposal.leader_epoch, proposal.partition_epoch) == (self.leader_epoch, self.partition_epoch)
        assert self.proposed in (None, proposal.members), "another change may have been made already"
        self._proposal = proposal
        self.proposed = proposal.members
        self._in_flight = True
        self._announced_ms = None
        self._asked_ms = self._now_ms
        self._recount()

    def isr_refused(self, *, final: bool) -> None:
        """Not final: the result is unknown (no reply, no controller), and the leader requests the change again.

        Final: the controller has another state than this leader: the requested one, or one that fences it (stale
        epochs). The proposed members count until the image shows it. If it does not, the leader requests it again.
        """
        self._in_flight = False
        if final:
            self._announced_ms = self._now_ms
        else:
            self._unknown_ms = self._asked_ms

    def isr_declined(self, epoch_of: Callable[[int], int | None] = lambda broker: None) -> None:
        """The controller has the same state and refused the change (INELIGIBLE_REPLICA): the leader drops it.

        An earlier, unanswered request for the change may still reach the controller. Until that is no longer possible,
        or the controller could no longer accept it, the leader keeps the proposal. `epoch_of` returns the committed
        broker epoch.
        """
        self._in_flight = False
        is_late = self._unknown_ms is None or self._now_ms - self._unknown_ms >= self.lag_ms_max
        if is_late or self._is_void(epoch_of):
            self._drop_proposal()

    def isr_committed(self, isr: Iterable[int], partition_epoch: int) -> bool:
        """Apply the committed ISR with the known min.insync.replicas. Returns whether the high watermark moved."""
        return self._apply_isr(isr, partition_epoch) and self._advance()

    def changed(
        self, *, isr: Iterable[int], partition_epoch: int, replicas: Iterable[int], isr_min: int
    ) -> bool:
        """Apply one state of the image: the ISR counts only with the min.insync.replicas of the same state.

        Returns whether the high watermark moved.
        """
        self._apply_isr(isr, partition_epoch)
        return self.reconfigured(replicas=replicas, isr_min=isr_min)

    def _apply_isr(self, isr: Iterable[int], partition_epoch: int) -> bool:
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self.isr = frozenset(isr)
        # A change proposed in an earlier partition epoch is part of this state, or the controller refuses it.
        self._drop_proposal()
        return True

    def reconfigured(self, *, replicas: Iterable[int] | None = None, isr_min: int | None = None) -> bool:
        """Replicas or min.insync.replicas have changed. Returns whether the high watermark moved."""
        if isr_min is not None:
            self._isr_min = isr_min
        if replicas is not None:
            self.replicas = frozenset(replicas)
            others = self.replicas - {self.local_id}
            self._followers = {
                replica: self._followers.get(replica) or self._new_follower(replica) for replica in others
            }
            self._recount()
        return self._advance()

    def lags(self, now_ms: int) -> list[FollowerLag]:
        return [
            FollowerLag(
                replica,
                -1 if follower.offset < 0 else max(0, self._known_end - follower.offset),
                0 if follower.offset >= self._known_end else max(0, now_ms - follower.caught_up_ms),
                replica in self.isr,
            )
            for replica, follower in sorted(self._followers.items())
        ]

    # -- rules ---------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        if not self._has_enough_in_sync():
            return False
        committed = self._least_offset()
        if not self._is_further(committed):
            return False
        self.high_watermark = committed
        return True

    def _has_enough_in_sync(self) -> bool:
        """Below min.insync.replicas the high watermark does not advance (KIP-966)."""
        return len(self.isr) >= self.isr_min

    def _is_further(self, offset: int) -> bool:
        return offset > self.high_watermark

    def _least_offset(self) -> int:
        """The lowest offset of the replicas that count; -1 while one of them has not fetched yet."""
        least = self._own_offset()
        for follower in self._counting:
            if follower.offset < least:
                least = follower.offset
        for follower in self._others:
            if follower.offset < least and self._holds(follower):
                least = follower.offset
        return least

    def _own_offset(self) -> int:
        return self.local_offset

    def _recount(self) -> None:
        """Choose whose offsets count. A member that is not a replica has no offset, so it blocks the high watermark."""
        members = self.maximal_isr - {self.local_id}
        followers = self._followers
        self._counting = tuple(followers.get(member) or _Follower(self._now_ms) for member in members)
        self._others = tuple(followers[replica] for replica in followers.keys() - members)

    def _holds(self, follower: _Follower) -> bool:
        """Without it, a joining follower would always be one fetch behind the high watermark under steady load."""
        return follower.hold_until_ms > self._now_ms

    def _record_fetch(self, follower: _Follower, offset: int, log_end: int, now_ms: int) -> bool:
        """A follower is caught up if it has all records that the leader had at this fetch or at the previous one."""
        is_keeping_up = offset >= log_end or 0 <= follower.end_at_fetch <= offset
        if offset >= log_end:
            follower.caught_up_ms = max(follower.caught_up_ms, now_ms)
        elif is_keeping_up:
            follower.caught_up_ms = max(follower.caught_up_ms, follower.fetched_ms)
        follower.end_at_fetch = max(log_end, follower.end_at_fetch)
        follower.fetched_ms = now_ms
        return is_keeping_up

    def _may_join(self, follower: _Follower) -> bool:
        return (
            self._is_heard(follower)
            and self._has_all_committed(follower)
            and self._has_reached_this_epoch(follower)
        )

    def _is_heard(self, follower: _Follower) -> bool:
        """A follower that left the ISR because it stopped fetching does not rejoin on an old fetch."""
        return self._now_ms - follower.fetched_ms <= self.lag_ms_max

    def _has_all_committed(self, follower: _Follower) -> bool:
        return follower.offset >= self.high_watermark

    def _has_reached_this_epoch(self, follower: _Follower) -> bool:
        """Before that, the high watermark may be lower than what an earlier leader has committed."""
        return follower.offset >= self.epoch_start_offset

    def _joining(self, is_eligible: Callable[[int, int], bool]) -> frozenset[int]:
        return frozenset(
            replica
            for replica, follower in self._followers.items()
            if replica not in self.isr
            and follower.offset >= 0
            and self._may_join(follower)
            and is_eligible(replica, follower.broker_epoch)
        )

    def _lagging(self, now_ms: int) -> frozenset[int]:
        return frozenset(
            replica
            for replica, follower in self._followers.items()
            if replica in self.isr
            and follower.offset < self._known_end
            and now_ms - follower.caught_up_ms > self.lag_ms_max
        )

    def _is_void(self, epoch_of: Callable[[int], int | None]) -> bool:
        """Whether a joining broker has registered again since. The controller then refuses its old broker epoch.

        A request carries the broker epochs of joining brokers; other members may have none.
        """
        joining = () if self._proposal is None else self._proposal.isr
        return any(
            broker not in self.isr and epoch >= 0 and (epoch_of(broker) or -1) > epoch
            for broker, epoch in joining
        )

    def _awaits_image(self) -> bool:
        if self._announced_ms is None:
            return False
        return self._now_ms - self._announced_ms < min(IMAGE_WAIT_MS_MAX, self.lag_ms_max)

    def _repeated_proposal(self, proposal: IsrProposal) -> IsrProposal:
        """The same members, with their current broker epochs if all joining members may still join."""
        joining = (self._followers.get(member) for member in proposal.members - self.isr - {self.local_id})
        if not all(follower is not None and self._may_join(follower) for follower in joining):
            return proposal
        return proposal._replace(isr=self._with_epochs(proposal.members))

    def _with_epochs(self, members: frozenset[int]) -> tuple[tuple[int, int], ...]:
        """The leader itself and members that have not fetched yet have the broker epoch -1 (unknown)."""
        followers = self._followers
        return tuple(
            (broker, followers[broker].broker_epoch if broker in followers else -1)
            for broker in sorted(members)
        )

    def _new_follower(self, replica: int) -> _Follower:
        """An ISR member has replica.lag.time.max.ms to catch up; another replica must catch up before it joins."""
        return _Follower(self._now_ms if replica in self.isr else self._now_ms - self.lag_ms_max - 1)

    def _drop_proposal(self) -> None:
        self._proposal = self.proposed = self._unknown_ms = self._announced_ms = None
        self._in_flight = False
        self._recount()
