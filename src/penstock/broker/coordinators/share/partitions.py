"""One share partition on its leader: loaded when it is first asked for, written to one write at a time."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final, Protocol

from penstock.broker.group_settings import effective_group_settings
from penstock.broker.share.settings import policy_of
from penstock.groups.share_partition.acknowledging import check_order
from penstock.groups.share_partition.partition import SharePartition
from penstock.groups.share_state.values import UNSET
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share_failures import GROUPS_DELAY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.broker.partition import Partition
    from penstock.broker.share.table import SharePartitions
    from penstock.groups.config import GroupConfig
    from penstock.groups.share_partition.messages import Write
    from penstock.groups.share_partition.policy import Policy
    from penstock.groups.share_state.values import Totals
    from penstock.protocol.share_failures import WorkerFailure

logger = logging.getLogger("penstock.share")

#: Rest before a write that the coordinator would not take, for all its patience, is tried again.
_WRITE_AGAIN_S: Final = 0.5
#: What is known here is not true any more: it is thrown away and read again.
_FENCED: Final = frozenset(
    {
        ErrorCode.fenced_state_epoch,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.invalid_request,
        ErrorCode.group_id_not_found,
    }
)
#: What a client is told instead of the coordinator's own words, which mean nothing to it.
_AS_TOLD: Final = {
    ErrorCode.fenced_state_epoch: ErrorCode.not_leader_or_follower,
    ErrorCode.fenced_leader_epoch: ErrorCode.not_leader_or_follower,
    ErrorCode.invalid_request: ErrorCode.unknown_topic_or_partition,
    ErrorCode.group_id_not_found: ErrorCode.unknown_topic_or_partition,
    ErrorCode.not_coordinator: ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress: ErrorCode.coordinator_not_available,
    ErrorCode.network_exception: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
}


class Watcher(Protocol):
    """Waits for records that it can have."""

    def wake(self) -> None: ...


def monotonic_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


class LedSharePartition:
    """`rules` is None until it is loaded; `error` says why it is closed."""

    def __init__(self, shares: SharePartitions, group: str, partition: Partition) -> None:
        self._shares = shares
        self._node = shares.node
        self.group = group
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.rules: SharePartition | None = None
        self.error: ApiError | None = None
        self.bytes_per_record = 1024.0  # of what was read last: how much to read next
        self._state_epoch = 0
        self._watchers: dict[Watcher, None] = {}
        self._is_waking = False
        self._writer: asyncio.Task[None] | None = None
        self._stored: list[asyncio.Future[None]] = []  # those who wait for the next write
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def __repr__(self) -> str:
        return (
            f"<LedSharePartition {self.group} {self.partition.topic}-{self.partition.index} {self.rules!r}>"
        )

    @property
    def config(self) -> GroupConfig:
        return effective_group_settings(self._node, self.group)

    @property
    def is_closed(self) -> bool:
        return self.error is not None

    def current(self) -> SharePartition:
        """The rules, with the policy of now. Raises ApiError where there are none (yet)."""
        if self.error is not None:
            raise self.error
        if self.rules is None:
            raise ApiError(ErrorCode.leader_not_available, "the share partition is being loaded")
        self.rules.policy = self._policy()
        return self.rules

    def _policy(self) -> Policy:
        return policy_of(self.config, self.partition.topic)

    # -- loading -------------------------------------------------------------------------------------

    async def load(self) -> None:
        try:
            await self._load()
        except ApiError as error:
            self.close(error)
        except Exception:
            self.close(ApiError(ErrorCode.unknown_server_error))
            raise

    async def _load(self) -> None:
        partition, persister = self.partition, self._node.share_state.persister
        state = await persister.read(self.group, partition.topic_id, partition.index, self.leader_epoch)
        self._state_epoch = state.state_epoch
        start = state.start_offset
        if start == UNSET:
            start = await self._first_offset()
            # Stored at once, or another leader would begin with what is latest then.
            await self._store(start, 0, [])
        if self.error is None:
            self.rules = SharePartition(
                start,
                state.batches,
                self._policy(),
                self._shares.counters_of(self.group),
                state.totals,
                now_ms=monotonic_ms(),
                chance=random.random(),
            )
            self.partition.watch(self)
            self.changed()
            self.wake()
            self._shares.rest(self)

    async def _first_offset(self) -> int:
        """Raises ApiError while the new leader does not know what is committed."""
        reset, partition = self.config.share_auto_offset_reset, self.partition
        if reset.kind == "earliest":
            return partition.log.start_offset
        await partition.settled()
        upto = partition.last_stable_offset if self.config.share_reads_committed else partition.high_watermark
        if reset.kind == "latest":
            return upto
        timestamp_ms = reset.timestamp_ms(self._node.now_ms())
        found = await self._node.looked_up(
            None, lambda bytes_max: partition.log.offset_for_timestamp(timestamp_ms, bytes_max)
        )
        return upto if found is None else min(found.offset, upto)

    # -- what members do -----------------------------------------------------------------------------

    def acknowledge(
        self, member: str, batches: list[tuple[int, int, bytes]], *, may_renew: bool
    ) -> asyncio.Future[None] | None:
        """What to wait for before it is answered. Raises ApiError."""
        check_order(batches, may_renew=may_renew)
        rules = self.current()
        is_written = rules.acknowledge(member, batches, now_ms=monotonic_ms(), chance=random.random())
        return self._changed_by_member(is_written=is_written)

    async def take_failures(self, failures: Sequence[WorkerFailure]) -> None:
        """What workers say of records that they have; the rest is passed over. Raises ApiError."""
        rules, partition = self.current(), self.partition
        held = [one for one in failures if rules.is_held(one.offset, one.delivery_count)]
        for failure in held:
            if failure.delay_ms != GROUPS_DELAY:
                rules.ask_delay(failure.offset, failure.delivery_count, failure.delay_ms)
        errors = [failure for failure in held if failure.error is not None]
        if errors and rules.policy.buries:
            persister = self._node.share_state.persister
            await persister.explain(self.group, partition.topic_id, partition.index, errors)

    def release(self, member: str, *, with_delay: bool) -> asyncio.Future[None] | None:
        if self.rules is None or self.error is not None:
            return None
        rules = self.current()
        is_written = rules.release(
            member, now_ms=monotonic_ms(), chance=random.random(), with_delay=with_delay
        )
        return self._changed_by_member(is_written=is_written)

    def _changed_by_member(self, *, is_written: bool) -> asyncio.Future[None] | None:
        stored = self.stored() if is_written else None
        self.changed()
        if stored is None:
            self.wake()  # there may be room for more; what is written makes it later
        return stored

    def stored(self) -> asyncio.Future[None]:
        """Done when what is queued now has been written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waited may have gone.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stored.append(future)
        return future

    # -- waiting for records -------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def bytes_arrived(self, count: int) -> None:
        """The log has grown, or is not led here any more."""
        self.wake()

    def wake(self) -> None:
        # Not at once: whoever changed something is not done with it, and those who wait come in their order.
        if self._watchers and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        for watcher in tuple(self._watchers):
            watcher.wake()

    # -- writing and timing --------------------------------------------------------------------------

    def changed(self) -> None:
        """After everything that is done to the rules."""
        rules = self.rules
        if rules is None or self.error is not None:
            return
        if self._writer is None and rules.has_writes:
            self._writer = self._node.spawn(self._write())
        deadline_ms = rules.next_deadline_ms
        if deadline_ms is not None and (self._timer is None or deadline_ms < self._timer_ms):
            self._set_timer(deadline_ms)

    def _set_timer(self, deadline_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        # A moment later, so that the time has really come.
        self._timer = asyncio.get_running_loop().call_at((deadline_ms + 1) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.rules is None or self.error is not None:
            return
        self.current().tick(now_ms=monotonic_ms(), chance=random.random())
        self.changed()
        self.wake()
        self._shares.rest(self)

    async def _write(self) -> None:
        try:
            while self.error is None and self.rules is not None:
                write = self.rules.take_write()
                if write is None:
                    break
                waiting, self._stored = self._stored, []
                await self._write_once(self.rules, write, waiting)
        finally:
            self._writer = None
        self._shares.rest(self)

    async def _write_once(
        self, rules: SharePartition, write: Write, waiting: list[asyncio.Future[None]]
    ) -> None:
        try:
            await self._store(*write)
        except ApiError as error:
            told = _as_told(error)
            for future in waiting:
                _fail(future, told)
            if error.code in _FENCED:
                self.close(error)
                return
            # It may have arrived all the same, so what it says is written until it is known to be there.
            logger.warning("share state is not taken: %r, %r", self, error)
            rules.write_failed()
            await asyncio.sleep(_WRITE_AGAIN_S)
            return
        rules.written()
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self.changed()
        self.wake()

    async def _store(
        self,
        start_offset: int,
        complete: int,
        batches: list[tuple[int, int, int, int]],
        totals: Totals | None = None,
    ) -> None:
        await self._node.share_state.persister.write(
            self.group,
            self.partition.topic_id,
            self.partition.index,
            state_epoch=self._state_epoch,
            leader_epoch=self.leader_epoch,
            start_offset=start_offset,
            delivery_complete_count=complete,
            batches=batches,
            totals=totals,
        )

    # -- the end -------------------------------------------------------------------------------------

    def close(self, error: ApiError) -> None:
        """It is not true any more, or not led here: whoever waits is told."""
        if self.error is not None:
            return
        self.error = _as_told(error)
        self._shares.forget(self)
        self.partition.unwatch(self)
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._stored = self._stored, []
        for future in waiting:
            _fail(future, self.error)
        self.wake()


def _as_told(error: ApiError) -> ApiError:
    return ApiError(_AS_TOLD.get(error.code, error.code), error.message)


def _fail(future: asyncio.Future[None], error: ApiError) -> None:
    if not future.done():
        future.set_exception(error)
