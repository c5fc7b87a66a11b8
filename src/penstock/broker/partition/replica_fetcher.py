"""Fetches for every partition that this node follows: one task and one fetch session (KIP-227) per leader.

The leader holds a request until it has new records; the fetcher appends all records of the response, syncs them
together, and fetches on from there. A partition that fails backs off alone. A partition that is new, or that has just
been truncated, does not wait for a request that the leader holds: the fetcher abandons that request. In a session each
request carries only what has changed since the last one.

Two quotas bound the bytes per second. `penstock.reassignment.bytes.per.second` bounds all replicas that are being
moved to this node. Kafka's `follower.replication.throttled.rate` bounds the replicas that the topics'
follower.replication.throttled.replicas name. Neither slows a replica that is in sync, because the leader's producers
would wait for it. A leader uses the same quota class for what it sends to followers that are not in sync.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.broker.config.effective_settings import effective_node_integer, node_layers
from penstock.broker.network.peers import PeerUnreachable
from penstock.broker.partition.follower_replica import FetchOutcome, FollowerReplica, error_code_of
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.fetch import (
    INITIAL_SESSION_EPOCH,
    NO_SESSION_ID,
    REPLICA_FETCH_VERSION,
    FetchPartition,
    ReplicaFetchResponse,
    ReplicaPartitionData,
    encode_replica_fetch_request,
    parse_replica_fetch_response,
)
from penstock.replication.follower import FetchPosition

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import ImageView, PeerCalls, Tasks
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.image import ClusterImage


#: Apache Kafka's default for the throttled rates, which means no limit.
_UNLIMITED: Final = (1 << 63) - 1


def replication_rate(settings: DynamicSettings, name: str) -> Callable[[], int]:
    """Return a throttled rate as `ReplicationQuota` expects it: -1 means no limit."""

    def rate() -> int:
        found = settings.integer(name)
        return -1 if found == _UNLIMITED else found

    return rate


class ReplicationQuota:
    """A token bucket that fills at the limit and holds one second's worth. If overdrawn, it has to refill first."""

    __slots__ = ("_bytes_per_second", "_clock", "_left", "_limit", "_then")

    def __init__(self, limit: Callable[[], int], clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._bytes_per_second = -1
        self._left = 0.0
        self._then = clock()

    @property
    def is_limited(self) -> bool:
        limit = self._limit()
        if limit != self._bytes_per_second:
            self._bytes_per_second = limit
            self._left = float(max(limit, 0))
            self._then = self._clock()
        return limit >= 0

    def left(self) -> tuple[int, float]:
        """Return the bytes that may be fetched now, and the seconds until there are some."""
        now, rate = self._clock(), self._bytes_per_second
        self._left = min(float(rate), self._left + (now - self._then) * rate)
        self._then = now
        # A rate of 0 stops these fetches until an operator raises it.
        return int(self._left), 1.0 if rate <= 0 else min(1.0, max(0.01, (1 - self._left) / rate))

    def take(self, size: int) -> None:
        self._left -= size


_SESSION_EPOCH_MAX: Final = 2**31 - 1

#: Topic id and partition.
RawTopicIdPartition = tuple[bytes, int]


class SessionPartition(NamedTuple):
    """A followed partition, and the position that the last request sent for it."""

    following: FollowerReplica
    position: FetchPosition


class FetchSessionRequest(NamedTuple):
    session_id: int
    session_epoch: int
    topics: list[tuple[bytes, list[FetchPartition]]]
    forgotten: list[tuple[bytes, list[int]]]


class FetchSessionHandler:
    def __init__(self) -> None:
        self.asked: dict[RawTopicIdPartition, SessionPartition] = {}
        self._id = NO_SESSION_ID
        self._epoch = INITIAL_SESSION_EPOCH
        self._changed: dict[RawTopicIdPartition, FollowerReplica] = {}
        self._dropped: dict[RawTopicIdPartition, None] = {}

    def __contains__(self, key: RawTopicIdPartition) -> bool:
        return key in self.asked or key in self._changed

    @property
    def is_empty(self) -> bool:
        """Whether the session has no partitions to fetch."""
        return not self.asked and not self._changed

    def ask(self, following: FollowerReplica) -> None:
        """Name the partition in the next request: it is new, or its position has moved."""
        self._changed[following.key] = following
        self._dropped.pop(following.key, None)

    def drop(self, key: RawTopicIdPartition) -> None:
        self._changed.pop(key, None)
        if self.asked.pop(key, None) is not None:
            self._dropped[key] = None

    def begin_anew(self) -> None:
        """Make the next request a full one, because the leader's session may differ from ours."""
        self._epoch = INITIAL_SESSION_EPOCH

    def request(
        self, bytes_max: Mapping[RawTopicIdPartition, int], default_bytes_max: int
    ) -> FetchSessionRequest:
        """Build the next request. From here on we assume that the leader has received it."""
        if self._epoch == INITIAL_SESSION_EPOCH:
            for key, question in self.asked.items():
                self._changed.setdefault(key, question.following)
            self._dropped.clear()
        topics: dict[bytes, list[FetchPartition]] = {}
        for key, following in self._changed.items():
            position = following.position()
            self.asked[key] = SessionPartition(following, position)
            asked = _fetch_partition(key[1], position, bytes_max.get(key, default_bytes_max))
            topics.setdefault(key[0], []).append(asked)
        forgotten: dict[bytes, list[int]] = {}
        for topic_id, index in self._dropped:
            forgotten.setdefault(topic_id, []).append(index)
        request = FetchSessionRequest(self._id, self._epoch, list(topics.items()), list(forgotten.items()))
        self._changed.clear()
        self._dropped.clear()
        return request

    def answered(self, answer: ReplicaFetchResponse) -> ErrorCode | None:
        """Return None if the session continues. On an error it starts again, and the response must be ignored."""
        if answer.error != ErrorCode.none.value:
            self.begin_anew()
            return error_code_of(answer.error)
        if self._epoch != INITIAL_SESSION_EPOCH and answer.session_id != self._id:
            self.begin_anew()
            return ErrorCode.fetch_session_id_not_found
        self._id = answer.session_id
        if self._id == NO_SESSION_ID:
            self.begin_anew()  # the leader has no room for sessions
        else:
            self._count_request()
        return None

    def given_up(self) -> None:
        """Abandon a request. The leader has most likely counted it; if not, it rejects the next session epoch."""
        if self._epoch != INITIAL_SESSION_EPOCH:
            self._count_request()

    def _count_request(self) -> None:
        self._epoch = 1 if self._epoch == _SESSION_EPOCH_MAX else self._epoch + 1


def _fetch_partition(index: int, position: FetchPosition, bytes_max: int) -> FetchPartition:
    return FetchPartition(
        index,
        position.leader_epoch,
        position.offset,
        position.last_fetched_epoch,
        position.log_start,
        bytes_max,
    )


logger = logging.getLogger("penstock.replication")

#: How long a request in flight may still complete before it is abandoned for a partition that is new in the session.
_GRACE_SECONDS: Final = 0.005
#: First backoff when image and leader disagree, which rarely lasts long; doubled up to the ordinary backoff.
_REFRESH_MS: Final = 20
#: After appending this much the fetcher yields to other tasks on the event loop.
_APPEND_BYTES_AT_ONCE: Final = 2 * 1024 * 1024
_SESSION_ERRORS: Final = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)


class ReplicaFetcher:
    def __init__(
        self,
        fetchers: ReplicaFetcherManager,
        leader_id: int,
        *,
        tasks: Tasks,
        settings: NodeSettings,
        peers: PeerCalls,
        broker_epoch: Callable[[], int],
    ) -> None:
        self._fetchers = fetchers
        self.leader_id = leader_id
        self._tasks = tasks
        self._node_id = settings.node_id
        self._peers = peers
        self._broker_epoch = broker_epoch
        self.followers: dict[RawTopicIdPartition, FollowerReplica] = {}
        self._session = FetchSessionHandler()
        self._loop = asyncio.get_running_loop()
        self._backoff_until: dict[RawTopicIdPartition, float] = {}
        self._refreshes: dict[RawTopicIdPartition, int] = {}
        self._news = asyncio.Event()
        self._poll: asyncio.Task[memoryview] | None = None
        self._wait_ms = settings.integer("replica.fetch.wait.max.ms")
        self._partition_bytes_max = settings.integer("replica.fetch.max.bytes")
        self._answer_bytes_max = settings.integer("replica.fetch.response.max.bytes")
        backoff_ms = settings.integer("replica.fetch.backoff.ms")
        self._backoff_seconds = backoff_ms / 1000
        self._refresh_backoff = ExponentialBackoff(base_ms=_REFRESH_MS, cap_ms=backoff_ms)
        self._timeout_seconds = (settings.integer("replica.socket.timeout.ms") + self._wait_ms) / 1000
        self._task = tasks.spawn(self._run())

    def __repr__(self) -> str:
        return f"<LeaderFetcher of {self.leader_id}: {len(self.followers)} partitions, {len(self._backoff_until)} rest>"

    # -- followed partitions -------------------------------------------------------------------------

    def add(self, following: FollowerReplica, after: asyncio.Future[None] | None = None) -> None:
        """Fetch for this partition too, once `after` is done."""
        self.remove(following.key)
        self.followers[following.key] = following
        if following.is_durable and (after is None or after.done()):
            self._ask(following)
        else:
            self._tasks.spawn(self._fetch_later(following, after))

    def remove(self, key: RawTopicIdPartition) -> None:
        self.followers.pop(key, None)
        self._backoff_until.pop(key, None)
        self._refreshes.pop(key, None)
        self._session.drop(key)

    def try_now(self) -> None:
        """End all backoffs, because the leader's registration has changed."""
        self._backoff_until = dict.fromkeys(self._backoff_until, 0.0)
        self._news.set()

    def close(self) -> None:
        self._task.cancel()

    async def _fetch_later(self, following: FollowerReplica, after: asyncio.Future[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        if await following.made_durable():
            self._ask(following)

    def _ask(self, following: FollowerReplica) -> None:
        if self._is_current(following):
            self._session.ask(following)
            self._news.set()
            if self._poll is not None:
                self._loop.call_later(_GRACE_SECONDS, self._give_up, self._poll)

    def _give_up(self, poll: asyncio.Task[memoryview]) -> None:
        if poll is self._poll:
            poll.cancel()

    def _is_current(self, following: FollowerReplica) -> bool:
        return self.followers.get(following.key) is following and not following.is_over

    # -- rounds --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                is_good = await self._round()
            except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
                is_good = False
                self._session.begin_anew()
                report = logger.debug if failures else logger.info
                report(
                    "leader cannot be fetched from", extra={"leader": self.leader_id, "reason": str(error)}
                )
            except Exception:
                # No error may end the loop.
                is_good = False
                self._session.begin_anew()
                logger.exception("fetching failed", extra={"leader": self.leader_id})
            failures = 0 if is_good else failures + 1
            if failures:
                await self._wait_for_news(self._backoff_seconds * random.uniform(0.5, 1.5))

    async def _round(self) -> bool:
        """Fetch once. Returns False if the next round must wait for a backoff."""
        self._end_backoffs()
        bytes_max = self._share_bandwidth()
        self._news.clear()
        if self._session.is_empty:
            await self._wait_for_news(self._seconds_to_next())
            return True
        answer = await self._fetch(bytes_max)
        if answer is None:
            return True
        error = self._session.answered(answer)
        if error is None:
            await self._take(answer)
        elif error not in _SESSION_ERRORS:
            logger.warning("leader refuses fetches", extra={"leader": self.leader_id, "reason": error.name})
        return error is None or error in _SESSION_ERRORS

    async def _fetch(self, bytes_max: dict[RawTopicIdPartition, int]) -> ReplicaFetchResponse | None:
        """Return None if the request was abandoned, because another partition has to be fetched too."""
        request = self._session.request(bytes_max, self._partition_bytes_max)
        body = encode_replica_fetch_request(
            replica_id=self._node_id,
            broker_epoch=self._broker_epoch(),
            max_wait_ms=self._wait_until_next_ms(),
            min_bytes=1,
            max_bytes=self._answer_bytes_max,
            session_id=request.session_id,
            session_epoch=request.session_epoch,
            topics=request.topics,
            forgotten=request.forgotten,
        )
        poll = self._poll = self._loop.create_task(
            self._peers.fetch(
                self.leader_id, body, version=REPLICA_FETCH_VERSION, timeout_s=self._timeout_seconds
            )
        )
        try:
            await asyncio.wait([poll])
        finally:
            self._poll = None
            poll.cancel()
        if poll.cancelled():
            self._session.given_up()
            self._request_high_watermarks_again()
            return None
        return parse_replica_fetch_response(poll.result())

    def _request_high_watermarks_again(self) -> None:
        """The abandoned response may have carried a high watermark, which the leader would not send again."""
        for key in list(self._session.asked):
            following = self.followers.get(key)
            if following is not None and following.is_behind_in_commits:
                self._session.ask(following)

    async def _take(self, answer: ReplicaFetchResponse) -> None:
        syncing: dict[asyncio.Task[FetchOutcome], FollowerReplica] = {}
        appended = 0
        for fetched in answer.partitions:
            question = self._session.asked.get((fetched.topic_id, fetched.partition))
            if question is None:
                continue
            following, size = question.following, len(fetched.records)
            self._fetchers.count(following, size)
            outcome = self._taken(question, fetched)
            if isinstance(outcome, FetchOutcome):
                self._settle(following, outcome)
            elif following.is_truncating:
                self._session.drop(following.key)
                self._tasks.spawn(self._fetch_after_truncation(following, outcome))
            else:
                syncing[self._loop.create_task(outcome)] = following
            appended += size
            if appended >= _APPEND_BYTES_AT_ONCE:
                appended = 0
                await asyncio.sleep(0)
        if syncing:
            await self._settle_synced(syncing)

    def _taken(
        self, question: SessionPartition, fetched: ReplicaPartitionData
    ) -> FetchOutcome | Coroutine[Any, Any, FetchOutcome]:
        try:
            return question.following.take(question.position, fetched)
        except Exception:
            # A failure of one partition must not affect the others.
            logger.exception("answer cannot be applied", extra={"following": repr(question.following)})
            return FetchOutcome.BACKOFF

    async def _settle_synced(self, syncing: dict[asyncio.Task[FetchOutcome], FollowerReplica]) -> None:
        try:
            await asyncio.wait(syncing)
        finally:
            for task in syncing:
                task.cancel()
        for task, following in syncing.items():
            with suppress(asyncio.CancelledError):
                self._settle(following, task.result())

    async def _fetch_after_truncation(
        self, following: FollowerReplica, truncating: Coroutine[Any, Any, FetchOutcome]
    ) -> None:
        try:
            outcome = await truncating
        except ApiError as error:
            logger.error(
                "log cannot be truncated", extra={"following": repr(following), "reason": str(error)}
            )
            self._settle(following, FetchOutcome.BACKOFF)
            self._news.set()
            return
        self._fetchers.count_truncation(following)
        if outcome is not FetchOutcome.STOPPED:
            self._ask(following)

    def _settle(self, following: FollowerReplica, outcome: FetchOutcome) -> None:
        key = following.key
        if not self._is_current(following):
            if following.is_over and self.followers.get(key) is following:
                self.remove(key)
            return
        if outcome is FetchOutcome.REFRESH:
            count = self._refreshes[key] = min(self._refreshes.get(key, -1) + 1, 10)
            self._rest(key, self._refresh_backoff.minimum_ms(count) / 1000)
            return
        self._refreshes.pop(key, None)
        if outcome is FetchOutcome.MOVED:
            self._session.ask(following)
        elif outcome is FetchOutcome.BACKOFF:
            self._rest(key, self._backoff_seconds)

    # -- backoffs ------------------------------------------------------------------------------------

    def _rest(self, key: RawTopicIdPartition, seconds: float) -> None:
        self._session.drop(key)
        self._backoff_until[key] = self._loop.time() + seconds

    def _end_backoffs(self) -> None:
        if not self._backoff_until:
            return
        now = self._loop.time()
        for key in [key for key, due in self._backoff_until.items() if due <= now]:
            del self._backoff_until[key]
            self._session.ask(self.followers[key])

    def _seconds_to_next(self) -> float | None:
        return (
            max(0.0, min(self._backoff_until.values()) - self._loop.time()) if self._backoff_until else None
        )

    def _wait_until_next_ms(self) -> int:
        """Let the leader hold the request no longer than the next backoff lasts, so that it ends on time."""
        seconds = self._seconds_to_next()
        return self._wait_ms if seconds is None else min(self._wait_ms, int(seconds * 1000) + 1)

    async def _wait_for_news(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    # -- bandwidth -----------------------------------------------------------------------------------

    def _share_bandwidth(self) -> dict[RawTopicIdPartition, int]:
        """Return how much each throttled partition may fetch; if nothing is left, the partition backs off."""
        bytes_max: dict[RawTopicIdPartition, int] = {}
        asked = (following for key, following in self.followers.items() if key in self._session)
        for bandwidth, slowed in self._fetchers.limits(list(asked) if self._fetchers.is_limited else ()):
            left, wait_seconds = bandwidth.left()
            for following in slowed:
                if left <= 0:
                    self._rest(following.key, wait_seconds)
                    continue
                share = min(self._partition_bytes_max, left // len(slowed) + 1)
                bytes_max[following.key] = min(share, bytes_max.get(following.key, share))
        for key in [key for key in bytes_max if key in self._backoff_until]:
            del bytes_max[key]
        for key in bytes_max:
            self._session.ask(self.followers[key])
        return bytes_max


_REASSIGNMENT_RATE: Final = "penstock.reassignment.bytes.per.second"
_THROTTLED_RATE: Final = "follower.replication.throttled.rate"


class NewFollower(Protocol):
    def __call__(self, partition: Partition, leader_id: int, leader_epoch: int) -> FollowerReplica:
        """Return a follower replica for one leader epoch of the partition."""


class ReplicaLag(NamedTuple):
    """How many records a replica here lacks below its leader's high watermark; -1 before the first response."""

    topic: str
    partition: int
    leader: int
    records: int


class ReplicaFetcherManager:
    def __init__(
        self,
        tasks: Tasks,
        settings: NodeSettings,
        dynamic: DynamicSettings,
        *,
        metadata: ImageView,
        peers: PeerCalls,
        new_follower: NewFollower,
        broker_epoch: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._new_follower = new_follower
        self._new_fetcher = partial(
            ReplicaFetcher, self, tasks=tasks, settings=settings, peers=peers, broker_epoch=broker_epoch
        )
        #: Counters for metrics: record bytes fetched, record bytes fetched for replicas that are being moved here,
        #: truncations, and committed records that truncations removed.
        self.bytes_fetched = 0
        self.bytes_moved = 0
        self.truncations = 0
        self.records_lost = 0
        clock = asyncio.get_running_loop().time
        self.bandwidth = ReplicationQuota(self._limit, clock)
        self.throttle = ReplicationQuota(replication_rate(dynamic, _THROTTLED_RATE), clock)
        self._leaders: dict[int, ReplicaFetcher] = {}
        self._followers: dict[RawTopicIdPartition, FollowerReplica] = {}
        self._limit_read: tuple[ClusterImage, int] | None = None

    def __repr__(self) -> str:
        return f"<Fetchers {len(self._followers)} partitions of {sorted(self._leaders)}>"

    def follow(self, partition: Partition) -> None:
        """Fetch from the partition's leader in its leader epoch, and no longer from an earlier one."""
        key = (partition.topic_id.bytes, partition.index)
        leader_id, leader_epoch = partition.leader_id, partition.leader_epoch
        known = self._followers.get(key)
        if (
            known is not None
            and known.partition is partition
            and (known.rules.leader_id, known.rules.leader_epoch) == (leader_id, leader_epoch)
        ):
            return
        after = self.unfollow(partition)
        following = self._followers[key] = self._new_follower(partition, leader_id, leader_epoch)
        fetcher = self._leaders.get(leader_id)
        if fetcher is None:
            fetcher = self._leaders[leader_id] = self._new_fetcher(leader_id)
        fetcher.add(following, after)

    def unfollow(self, partition: Partition) -> asyncio.Future[None]:
        """Stop appending. Await the result before writing or closing the log."""
        following = self._followers.pop((partition.topic_id.bytes, partition.index), None)
        if following is None:
            return completed_future()
        idle = following.stop()
        fetcher = self._leaders[following.rules.leader_id]
        if fetcher.followers.get(following.key) is following:
            fetcher.remove(following.key)
        if not fetcher.followers:
            del self._leaders[fetcher.leader_id]
            fetcher.close()
        return idle

    def brokers_changed(self, broker_ids: Iterable[int]) -> None:
        """Retry fetches from these brokers at once, because their addresses or broker epochs have changed."""
        for broker_id in broker_ids:
            fetcher = self._leaders.get(broker_id)
            if fetcher is not None:
                fetcher.try_now()

    def is_truncating(self, partition: Partition) -> bool:
        """Whether a thread is truncating the log, so that retention and compaction must not touch it."""
        following = self._followers.get((partition.topic_id.bytes, partition.index))
        return following is not None and following.is_truncating

    def lags(self) -> Iterator[ReplicaLag]:
        for following in self._followers.values():
            partition, rules = following.partition, following.rules
            yield ReplicaLag(partition.topic, partition.index, rules.leader_id, following.lag_records)

    async def close(self) -> None:
        """Stop all fetchers. Returns when none of them touches a log any more."""
        idle = [following.stop() for following in self._followers.values()]
        for fetcher in self._leaders.values():
            fetcher.close()
        self._followers.clear()
        self._leaders.clear()
        if idle:
            await asyncio.wait(idle)

    # -- accounting of the fetchers ------------------------------------------------------------------

    def count(self, following: FollowerReplica, size: int) -> None:
        self.bytes_fetched += size
        if not size:
            return
        if following.partition.is_being_moved_here:
            self.bytes_moved += size
            if following.is_catching_up:
                self.bandwidth.take(size)
        if following.is_throttled:
            self.throttle.take(size)

    @property
    def is_limited(self) -> bool:
        return self.bandwidth.is_limited or self.throttle.is_limited

    def limits(
        self, followers: Sequence[FollowerReplica]
    ) -> list[tuple[ReplicationQuota, list[FollowerReplica]]]:
        """Return the quotas that are set, each with the followers that it slows."""
        limits = []
        if self.bandwidth.is_limited and (moving := [f for f in followers if f.is_catching_up]):
            limits.append((self.bandwidth, moving))
        if self.throttle.is_limited and (throttled := [f for f in followers if f.is_throttled]):
            limits.append((self.throttle, throttled))
        return limits

    def count_truncation(self, following: FollowerReplica) -> None:
        self.truncations += 1
        self.records_lost += following.records_lost
        following.records_lost = 0

    def _limit(self) -> int:
        """Read the setting again when the image has changed, as an operator may have changed it."""
        image = self._metadata.image
        if self._limit_read is None or self._limit_read[0] is not image:
            self._limit_read = (
                image,
                effective_node_integer(node_layers(self._settings, image), _REASSIGNMENT_RATE),
            )
        return self._limit_read[1]


def completed_future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
