"""The share partitions that this broker leads.

`SharePartitionManager` finds them and closes them when leadership, sessions or topics end. `SharePartitionLeader`
is one of them: it is loaded from the share coordinator when it is first requested, and has one state write in
flight at a time. `Acknowledgements` are those of one request: they take effect at once, in the order of the
request, and get their reply when their state is stored. `share_policy` derives the policy of a share partition from the
configuration of its group.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.coordinators.runtime.sharded_coordinator import leads_in_epoch
from penstock.broker.coordinators.share.sessions import RawTopicIdPartition, ShareSession, ShareSessions
from penstock.groups.share.partition.acknowledgement import check_acknowledgements
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import (
    RedeliveryBackoff,
    ShareCounters,
    SharePartitionPolicy,
)
from penstock.groups.share.state.share_state import UNSET
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share_failures import GROUP_DEFAULT_DELAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.share.persister import Persister
    from penstock.broker.environment import Environment
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.partition.partition import Partition
    from penstock.broker.partition.produced_batch import BatchPreparer
    from penstock.broker.partition.replica_manager import ReplicaManager
    from penstock.cluster.image import ImageDelta
    from penstock.groups.group_config import GroupConfig
    from penstock.groups.share.partition.share_partition_state import PendingWrite
    from penstock.groups.share.state.share_state import DeliveryTotals, RecordDelay
    from penstock.protocol.share import AcknowledgementRange, ShareTopic
    from penstock.protocol.share_failures import WorkerFailure
    from penstock.protocol.steps import Steps
    from penstock.security.principal import Principal


@lru_cache(maxsize=1024)
def share_policy(config: GroupConfig, topic: str) -> SharePartitionPolicy:
    return SharePartitionPolicy(
        lock_ms=config.share_record_lock_duration_ms,
        delivery_limit=config.share_delivery_count_limit,
        locks_max=config.share_partition_max_record_locks,
        may_renew=config.share_renew_acknowledge_enable,
        is_at_most_once=config.is_at_most_once,
        writes_dead_letters=config.dead_letter_topic_of(topic) is not None,
        backoff=_share_backoff(config),
    )


def _share_backoff(config: GroupConfig) -> RedeliveryBackoff | None:
    if config.share_backoff == "none":
        return None
    return RedeliveryBackoff(
        base_ms=config.share_backoff_ms,
        cap_ms=config.share_backoff_max_ms,
        jitter_ms=config.share_backoff_jitter_ms,
        is_exponential=config.share_backoff == "exponential",
    )


logger = logging.getLogger("penstock.share")

#: Pause before a write that has failed even though the persister retried it.
_WRITE_RETRY_S: Final = 0.5
#: The state here is outdated: discard it and load it again.
_FENCED_CODES: Final = frozenset(
    {
        ErrorCode.fenced_state_epoch,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.invalid_request,
        ErrorCode.group_id_not_found,
    }
)
#: The codes to send to clients instead of codes of the share coordinator, which clients do not know.
_CLIENT_CODES: Final = {
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
    """A request that waits for records."""

    def wake(self) -> None: ...


def monotonic_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


def _moved(delays: Sequence[RecordDelay], by_ms: int) -> tuple[RecordDelay, ...]:
    """The delays by another clock: a leader uses the clock of its event loop, and stored are times of day."""
    return tuple(delay._replace(due_ms=max(delay.due_ms + by_ms, 0)) for delay in delays)


class SharePartitionLeader:
    """`rules` is None until the state is loaded; `error` is the reason why it is closed."""

    def __init__(self, shares: SharePartitionManager, group: str, partition: Partition) -> None:
        self._shares = shares
        self.group = group
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.rules: SharePartition | None = None
        self.error: ApiError | None = None
        self.bytes_per_record = 1024.0  # estimated from recent reads; determines how much to read
        self._state_epoch = 0
        self._watchers: dict[Watcher, None] = {}
        self._is_waking = False
        self._writer: asyncio.Task[None] | None = None
        self._stored: list[asyncio.Future[None]] = []  # completed by the next write
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def __repr__(self) -> str:
        return f"<SharePartitionLeader {self.group} {self.partition.topic}-{self.partition.index} {self.rules!r}>"

    @property
    def config(self) -> GroupConfig:
        return self._shares.group_config(self.group)

    @property
    def is_closed(self) -> bool:
        return self.error is not None

    def current(self) -> SharePartition:
        """Return the rules with the current policy. Raises ApiError if they are not loaded or closed."""
        if self.error is not None:
            raise self.error
        if self.rules is None:
            raise ApiError(ErrorCode.leader_not_available, "the share partition is being loaded")
        self.rules.policy = self._policy()
        return self.rules

    def _policy(self) -> SharePartitionPolicy:
        return share_policy(self.config, self.partition.topic)

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
        partition, persister = self.partition, self._shares.persister
        state = await persister.read(self.group, partition.topic_id, partition.index, self.leader_epoch)
        self._state_epoch = state.state_epoch
        start = state.start_offset
        if start == UNSET:
            start = await self._first_offset()
            # Stored at once, because a later leader would resolve "latest" to a later offset.
            await self._store(start, 0, [])
        if self.error is None:
            self.rules = SharePartition(
                start,
                state.batches,
                self._policy(),
                self._shares.counters_of(self.group),
                state.totals,
                _moved(state.delays, monotonic_ms() - self._shares.environment.now_ms()),
                now_ms=monotonic_ms(),
                chance=random.random(),
            )
            self.partition.watch(self)
            self.changed()
            self.wake()
            self._shares.rest(self)

    async def _first_offset(self) -> int:
        """Raises ApiError while the new leader does not know the high watermark."""
        reset, partition = self.config.share_auto_offset_reset, self.partition
        if reset.kind == "earliest":
            return partition.log.start_offset
        await partition.settled()
        upto = partition.last_stable_offset if self.config.share_reads_committed else partition.high_watermark
        if reset.kind == "latest":
            return upto
        timestamp_ms = reset.timestamp_ms(self._shares.environment.now_ms())
        found = await self._shares.preparer.search_log(
            None, lambda bytes_max: partition.log.offset_for_timestamp(timestamp_ms, bytes_max)
        )
        return upto if found is None else min(found.offset, upto)

    # -- operations of members -----------------------------------------------------------------------

    def acknowledge(
        self, member: str, batches: list[tuple[int, int, bytes]], *, may_renew: bool
    ) -> asyncio.Future[None] | None:
        """Returns the write that the reply must wait for, if any. Raises ApiError."""
        check_acknowledgements(batches, may_renew=may_renew)
        rules = self.current()
        is_written = rules.acknowledge(member, batches, now_ms=monotonic_ms(), chance=random.random())
        return self._changed_by_member(is_written=is_written)

    async def apply_failures(self, failures: Sequence[WorkerFailure], principal: Principal) -> None:
        """Apply failures of records that members of this principal hold; ignore the others. Raises ApiError."""
        rules, partition, sessions = self.current(), self.partition, self._shares.sessions

        def is_held(failure: WorkerFailure) -> bool:
            holder = rules.holder(failure.offset, failure.delivery_count)
            return holder is not None and sessions.is_of(self.group, holder, principal)

        held = [failure for failure in failures if is_held(failure)]
        for failure in held:
            if failure.delay_ms != GROUP_DEFAULT_DELAY:
                rules.request_delay(failure.offset, failure.delivery_count, failure.delay_ms)
        errors = [failure for failure in held if failure.error is not None]
        if errors and rules.policy.writes_dead_letters:
            await self._shares.persister.store_errors(self.group, partition.topic_id, partition.index, errors)

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
            self.wake()  # locks may be free now; with a write, it wakes the watchers later
        return stored

    def stored(self) -> asyncio.Future[None]:
        """Returns a future that is done when everything queued now is written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The waiting request may be gone; retrieve the exception so that asyncio does not complain.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stored.append(future)
        return future

    # -- waiting for records -------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def bytes_arrived(self, count: int) -> None:
        """Called when the log has grown, or when this node no longer leads it."""
        self.wake()

    def wake(self) -> None:
        # Not at once: the caller may not have finished its changes. Watchers are woken in the order they registered.
        if self._watchers and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        for watcher in tuple(self._watchers):
            watcher.wake()

    # -- writing and timing --------------------------------------------------------------------------

    def changed(self) -> None:
        """Must be called after every change to the rules."""
        rules = self.rules
        if rules is None or self.error is not None:
            return
        if self._writer is None and rules.has_writes:
            self._writer = self._shares.environment.spawn(self._write())
        deadline_ms = rules.next_deadline_ms
        if deadline_ms is not None and (self._timer is None or deadline_ms < self._timer_ms):
            self._set_timer(deadline_ms)

    def _set_timer(self, deadline_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        # One millisecond later, so that the deadline has really passed.
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
        self, rules: SharePartition, write: PendingWrite, waiting: list[asyncio.Future[None]]
    ) -> None:
        try:
            await self._store(*write)
        except ApiError as error:
            for future in waiting:
                _fail_future(future, _client_error(error))
            if error.code in _FENCED_CODES:
                self.close(error)
                return
            # The write may have been stored all the same, so repeat it until it is known to be stored.
            logger.warning("share state could not be written: %r, %r", self, error)
            rules.write_failed()
            await asyncio.sleep(_WRITE_RETRY_S)
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
        totals: DeliveryTotals | None = None,
        delays: Sequence[RecordDelay] = (),
    ) -> None:
        await self._shares.persister.write(
            self.group,
            self.partition.topic_id,
            self.partition.index,
            state_epoch=self._state_epoch,
            leader_epoch=self.leader_epoch,
            start_offset=start_offset,
            delivery_complete_count=complete,
            batches=batches,
            totals=totals,
            delays=_moved(delays, self._shares.environment.now_ms() - monotonic_ms()),
        )

    # -- closing -------------------------------------------------------------------------------------

    def close(self, error: ApiError) -> None:
        """Close because of outdated state or lost leadership. Fails the pending futures and wakes the watchers."""
        if self.error is not None:
            return
        self.error = _client_error(error)
        self._shares.forget(self)
        self.partition.unwatch(self)
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._stored = self._stored, []
        for future in waiting:
            _fail_future(future, self.error)
        self.wake()


def _client_error(error: ApiError) -> ApiError:
    return ApiError(_CLIENT_CODES.get(error.code, error.code), error.message)


def _fail_future(future: asyncio.Future[None], error: ApiError) -> None:
    if not future.done():
        future.set_exception(error)


class AcknowledgeResult(NamedTuple):
    error: ErrorCode = ErrorCode.none
    message: str | None = None


class Acknowledgements:
    def __init__(
        self,
        shares: SharePartitionManager,
        group: str,
        member: str,
        *,
        may_renew: bool,
        may_read: Callable[[bytes], bool],
    ) -> None:
        """`may_read` returns whether the member may read a topic, given by the bytes of its id."""
        self._shares, self._group, self._member = shares, group, member
        self._may_renew, self._may_read = may_renew, may_read
        self.outcomes: dict[RawTopicIdPartition, AcknowledgeResult] = {}
        self._stored: dict[RawTopicIdPartition, asyncio.Future[None]] = {}

    def apply(self, topics: list[ShareTopic]) -> Steps[None]:
        """Apply the acknowledgements in the order of the request, one partition in each step."""
        for topic_id, partitions in topics:
            for index, batches in partitions:
                if batches:
                    self._apply_one((topic_id, index), batches)
                yield

    def _apply_one(self, partition: RawTopicIdPartition, batches: list[AcknowledgementRange]) -> None:
        try:
            if not self._may_read(partition[0]):
                raise ApiError(ErrorCode.topic_authorization_failed)
            led = self._shares.get(self._group, partition)
            if led is None:
                raise ApiError(ErrorCode.invalid_record_state, "no member has acquired records here")
            stored = led.acknowledge(self._member, batches, may_renew=self._may_renew)
        except ApiError as error:
            self._shares.metrics.count_error("share_acknowledge", error.code.name)
            self.outcomes[partition] = self._outcome(error)
            return
        self.outcomes[partition] = AcknowledgeResult()
        if stored is not None:
            self._stored[partition] = stored

    @staticmethod
    def _outcome(error: ApiError) -> AcknowledgeResult:
        return AcknowledgeResult(error.code, error.message)

    @property
    def is_waiting(self) -> bool:
        return bool(self._stored)

    async def stored(self) -> None:
        """Wait until the state is stored; then the outcomes are final."""
        for partition, future in self._stored.items():
            try:
                await asyncio.shield(future)
            except ApiError as error:
                self.outcomes[partition] = self._outcome(error)


async def wait_until_stored(futures: list[asyncio.Future[None]]) -> None:
    """Wait for all of them and ignore errors, because the member has left."""
    if futures:
        await asyncio.wait(futures)


#: group, raw topic id, partition
SharePartitionKey = tuple[str, bytes, int]


class SharePartitionManager:
    def __init__(
        self,
        *,
        settings: NodeSettings,
        partitions: ReplicaManager,
        environment: Environment,
        metrics: Metrics,
        persister: Persister,
        preparer: BatchPreparer,
        group_config: Callable[[str], GroupConfig],
        response_bytes_left: Callable[[], int],
    ) -> None:
        self._partitions = partitions
        self.environment = environment
        self.metrics = metrics
        self.persister = persister
        self.preparer = preparer
        self.group_config = group_config
        self.response_bytes_left = response_bytes_left
        self.fetch_bytes_max = settings.integer("fetch.max.bytes")
        self.decompressed_bytes_max = settings.integer("penstock.decompress.max.bytes")
        self.counters: dict[str, ShareCounters] = {}
        self.sessions = ShareSessions(settings.integer("group.share.max.share.sessions"), self._session_lost)
        self._led: dict[SharePartitionKey, SharePartitionLeader] = {}

    def __iter__(self) -> Iterator[SharePartitionLeader]:
        return iter(list(self._led.values()))

    def __len__(self) -> int:
        return len(self._led)

    def counters_of(self, group: str) -> ShareCounters:
        return self.counters.setdefault(group, ShareCounters())

    # -- finding -------------------------------------------------------------------------------------

    def get(self, group: str, tp: RawTopicIdPartition) -> SharePartitionLeader | None:
        """Returns the share partition if it is open. Raises ApiError if this node does not lead the partition."""
        partition = self._partitions.find_by_raw_id(*tp)
        led = self._led.get((group, *tp))
        if led is not None and (led.partition is not partition or led.leader_epoch != partition.leader_epoch):
            led.close(ApiError(ErrorCode.not_leader_or_follower, "another leader epoch has begun"))
            return None
        return led

    def find(self, group: str, tp: RawTopicIdPartition) -> SharePartitionLeader:
        """Like `get`, but begins to load a share partition that is not open. Raises ApiError."""
        led = self.get(group, tp)
        if led is None:
            partition = self._partitions.find_by_raw_id(*tp)
            if partition.is_internal:
                raise ApiError(ErrorCode.topic_authorization_failed)
            led = self._led[group, *tp] = SharePartitionLeader(self, group, partition)
            self.environment.spawn(led.load())
        return led

    def handle_read_error(self, led: SharePartitionLeader, error: ApiError) -> ApiError:
        """Handle a log that cannot be read, and return the error for the member: see `ReplicaManager`."""
        return self._partitions.handle_read_error(led.partition, error)

    # -- closing -------------------------------------------------------------------------------------

    def forget(self, led: SharePartitionLeader) -> None:
        key = (led.group, led.partition.topic_id.bytes, led.partition.index)
        if self._led.get(key) is led:
            del self._led[key]

    def rest(self, led: SharePartitionLeader) -> None:
        """Close an idle share partition of a group without members here.

        It is loaded again when members return, because its start offset may have been changed by then.
        """
        if led.rules is None or led.is_closed or self.sessions.has_group(led.group):
            return
        if led.rules.is_idle:
            led.close(ApiError(ErrorCode.not_leader_or_follower, "the group has no members here"))

    def close_session(self, session: ShareSession) -> list[asyncio.Future[None]]:
        """Release the records of a member that leaves, without delay. Returns the writes to wait for."""
        self.sessions.close(session)
        return self._release(session, with_delay=False)

    def _session_lost(self, session: ShareSession) -> None:
        self._release(session, with_delay=True)

    def _release(self, session: ShareSession, *, with_delay: bool) -> list[asyncio.Future[None]]:
        stored = []
        for led in list(self._led.values()):
            if led.group == session.group:
                future = led.release(session.member, with_delay=with_delay)
                if future is not None:
                    stored.append(future)
                self.rest(led)
        return stored

    def image_changed(self, delta: ImageDelta) -> None:
        """Close share partitions whose leader has changed or whose topic is deleted, and wake waiting requests."""
        if not (delta.topics_deleted or delta.partitions_changed):
            return
        for led in list(self._led.values()):
            if not leads_in_epoch(led.partition, led.leader_epoch):
                led.close(ApiError(ErrorCode.not_leader_or_follower, "this node does not lead any more"))

    def close(self) -> None:
        for led in list(self._led.values()):
            led.close(ApiError(ErrorCode.not_leader_or_follower, "the node stops"))
