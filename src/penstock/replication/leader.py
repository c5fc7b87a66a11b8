"""The rules of a partition leader: the high watermark and the in-sync replicas.

There is one object per leader epoch; its owner drops it when the epoch changes. Offsets are durable ones: a follower
fetches from the offset that it would keep through a power loss, as its flush policy promises. Times come from a
monotonic clock; if the clock could jump, all followers would seem to lag at once. Each rule has a method of its own.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

#: How long a follower that is about to join may hold the high watermark back without a further fetch.
JOIN_HOLD_MS_MAX: Final = 1000
#: How long the image is waited for that a final answer announces. It comes at once, or never: a change of controllers
#: may cut off the record that the answer rested on.
IMAGE_WAIT_MS_MAX: Final = 3000


class IsrProposal(NamedTuple):
    """What the controller is asked for: broker ids with the broker epochs they are known to live in."""

    isr: tuple[tuple[int, int], ...]
    leader_epoch: int
    partition_epoch: int

    @property
    def members(self) -> frozenset[int]:
        return frozenset(broker for broker, _ in self.isr)


class FollowerLag(NamedTuple):
    """How far a follower is behind, for people and metrics; -1 records when it has not been heard of."""

    replica: int
    records: int
    since_caught_up_ms: int
    is_in_sync: bool


class _Follower:
    __slots__ = ("broker_epoch", "caught_up_ms", "end_at_fetch", "fetched_ms", "hold_until_ms", "offset")

    def __init__(self, caught_up_ms: int) -> None:
        self.offset = -1  # unknown until it asks
        self.broker_epoch = -1
        self.caught_up_ms = caught_up_ms
        self.fetched_ms = caught_up_ms
        self.end_at_fetch = -1  # the leader's end when the last fetch came
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
        #: Members of a change that the controller may have made already; they count from when it is asked for.
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
        self._announced_ms: int | None = None  # when a final answer said that the image will tell
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
        """No more than there are replicas."""
        return min(self._isr_min, len(self.replicas))

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Everyone who may be in sync by the controller's book: the committed set and the proposed one."""
        return self.isr if self.proposed is None else self.isr | self.proposed

    @property
    def has_reached_epoch_start(self) -> bool:
        """Only from here on does the high watermark tell what earlier leaders have committed."""
        return self.high_watermark >= self.epoch_start_offset

    @property
    def is_below_min(self) -> bool:
        return len(self.isr) < self.isr_min

    # -- news ----------------------------------------------------------------------------------------

    def local_moved(self, durable_offset: int) -> bool:
        """This node keeps everything below `durable_offset`. True: the high watermark moved."""
        self.local_offset = durable_offset
        if durable_offset > self._known_end:
            self._known_end = durable_offset
        return self._advance()

    def fetched(self, replica: int, *, offset: int, log_end: int, broker_epoch: int, now_ms: int) -> bool:
        """A follower asked from `offset`, under this leader epoch and without diverging; `log_end` is our end now.

        True: the high watermark moved. A fetch of a stranger or of an earlier life of the broker counts for nothing.
        """
        self._now_ms = now_ms
        follower = self._followers.get(replica)
        if follower is None or not self._is_current_broker_epoch(follower, broker_epoch):
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
        """To be called whenever the ISR is looked at. True: the high watermark moved, as nobody holds it any more."""
        self._now_ms = now_ms
        return self._advance()

    def can_join(self, replica: int) -> bool:
        """Cheap: whether the last fetch of a follower makes it worth asking `wanted_isr`."""
        follower = self._followers.get(replica)
        return (
            follower is not None
            and self._proposal is None
            and replica not in self.isr
            and self._may_join(follower)
        )

    # -- the in-sync set -----------------------------------------------------------------------------

    def wanted_isr(self, now_ms: int, is_eligible: Callable[[int, int], bool]) -> IsrProposal | None:
        """The change to ask the controller for, if any; for the same one again when its outcome is unknown.

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
        """The set as it is, for a leader that has something else to tell; None while a change is under way."""
        if self._proposal is not None:
            return None
        return IsrProposal(self._with_epochs(self.isr), self.leader_epoch, self.partition_epoch)

    def proposed_isr(self, proposal: IsrProposal) -> None:
        """The proposal is being sent: from now on its members count, whatever becomes of it."""
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
        """Not final: nobody knows whether it was done (no answer, no controller); it is asked again.

        Final: the controller knows another state than we do: the one asked for, or one that fences us (stale epochs).
        The proposed members count until the image has told. If it does not, the same is asked again.
        """
        self._in_flight = False
        if final:
            self._announced_ms = self._now_ms
        else:
            self._unknown_ms = self._asked_ms

    def isr_declined(self, epoch_of: Callable[[int], int | None] = lambda broker: None) -> None:
        """The controller saw the state we know and did nothing (INELIGIBLE_REPLICA): the change is dropped.

        An earlier request for it that was never answered could still arrive: until none can, or none could be accepted
        any more, it is asked again. `epoch_of` tells the broker epochs that are committed.
        """
        self._in_flight = False
        is_late = self._unknown_ms is None or self._now_ms - self._unknown_ms >= self.lag_ms_max
        if is_late or self._is_void(epoch_of):
            self._drop_proposal()

    def isr_committed(self, isr: Iterable[int], partition_epoch: int) -> bool:
        """What the controller has made it, under the minimum known here. True: the high watermark moved."""
        return self._apply_isr(isr, partition_epoch) and self._advance()

    def changed(
        self, *, isr: Iterable[int], partition_epoch: int, replicas: Iterable[int], isr_min: int
    ) -> bool:
        """What the image says, all at once: a set counts only under the minimum that goes with it.

        True: the high watermark moved.
        """
        self._apply_isr(isr, partition_epoch)
        return self.reconfigured(replicas=replicas, isr_min=isr_min)

    def _apply_isr(self, isr: Iterable[int], partition_epoch: int) -> bool:
        if partition_epoch <= self.partition_epoch:
            return False
        self.partition_epoch = partition_epoch
        self.isr = frozenset(isr)
        # Whatever was proposed under an earlier partition epoch is either in this state or refused for ever.
        self._drop_proposal()
        return True

    def reconfigured(self, *, replicas: Iterable[int] | None = None, isr_min: int | None = None) -> bool:
        """Replicas or min.insync.replicas have changed. True: the high watermark moved."""
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
        """Below min.insync.replicas nothing more is called committed (KIP-966)."""
        return len(self.isr) >= self.isr_min

    def _is_further(self, offset: int) -> bool:
        return offset > self.high_watermark

    def _least_offset(self) -> int:
        """What everyone who counts has; -1 while one of them has not been heard of."""
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
        """Choose whose offsets count. A member that is no replica of ours has told nothing, so it holds all back."""
        members = self.maximal_isr - {self.local_id}
        followers = self._followers
        self._counting = tuple(followers.get(member) or _Follower(self._now_ms) for member in members)
        self._others = tuple(followers[replica] for replica in followers.keys() - members)

    def _holds(self, follower: _Follower) -> bool:
        """Under a steady load one who joins would otherwise always be one fetch behind the high watermark."""
        return follower.hold_until_ms > self._now_ms

    def _is_current_broker_epoch(self, follower: _Follower, broker_epoch: int) -> bool:
        return broker_epoch >= follower.broker_epoch

    def _record_fetch(self, follower: _Follower, offset: int, log_end: int, now_ms: int) -> bool:
        """A follower was caught up when it last had all that the leader had at this fetch, or at the one before."""
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
        """One that left because it fell silent does not come back on what it said before."""
        return self._now_ms - follower.fetched_ms <= self.lag_ms_max

    def _has_all_committed(self, follower: _Follower) -> bool:
        return follower.offset >= self.high_watermark

    def _has_reached_this_epoch(self, follower: _Follower) -> bool:
        """Before that the high watermark may be older than what an earlier leader has committed."""
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
            if replica in self.isr and self._is_lagging(follower, now_ms)
        )

    def _is_lagging(self, follower: _Follower, now_ms: int) -> bool:
        return follower.offset < self._known_end and now_ms - follower.caught_up_ms > self.lag_ms_max

    def _is_void(self, epoch_of: Callable[[int], int | None]) -> bool:
        """Whether one who was to join has registered again: epochs only grow, and whoever decides knows the new one.

        Requests name the lives of those who join; other members may go without.
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
        """For the same members, who count anyway, but in their present lives if those have what it takes."""
        joining = (self._followers.get(member) for member in proposal.members - self.isr - {self.local_id})
        if not all(follower is not None and self._may_join(follower) for follower in joining):
            return proposal
        return proposal._replace(isr=self._with_epochs(proposal.members))

    def _with_epochs(self, members: frozenset[int]) -> tuple[tuple[int, int], ...]:
        """The leader itself, and members not heard of yet, go with -1: the controller knows."""
        followers = self._followers
        return tuple(
            (broker, followers[broker].broker_epoch if broker in followers else -1)
            for broker in sorted(members)
        )

    def _new_follower(self, replica: int) -> _Follower:
        """A member in sync has from now until the lag bound to prove it; anyone else has to catch up first."""
        return _Follower(self._now_ms if replica in self.isr else self._now_ms - self.lag_ms_max - 1)

    def _drop_proposal(self) -> None:
        self._proposal = self.proposed = self._unknown_ms = self._announced_ms = None
        self._in_flight = False
        self._recount()
