"""One task that fetches from one leader, for all partitions that follow it.

A round is one request: the leader parks it until there is news, then everything in the answer is appended, synced
together, and asked on from there. A partition that fails rests alone. One that is new, or comes back from a
truncation, does not wait for a parked request to end: that one is given up.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.following import Following, Outcome
from penstock.broker.peers import PeerUnreachable
from penstock.broker.replica_session import Key, Question, ReplicaSession
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.replica_fetch import (
    VERSION,
    FetchedAnswer,
    FetchedPartition,
    encode_replica_fetch,
    parse_fetch_response,
)

if TYPE_CHECKING:
    from penstock.broker.fetchers import Fetchers
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.replication")

#: A request under way may end by itself within this time before it is given up for the sake of a newcomer.
_GRACE_SECONDS: Final = 0.005
#: The first rest where image and leader disagree, which rarely lasts; doubled up to the ordinary one.
_REFRESH_SECONDS: Final = 0.02
#: Between appends of this much others get their turn on the loop.
_APPEND_BYTES_AT_ONCE: Final = 2 * 1024 * 1024
_SESSION_ERRORS: Final = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)


class LeaderFetcher:
    def __init__(self, fetchers: Fetchers, node: Node, leader_id: int) -> None:
        self._fetchers = fetchers
        self._node = node
        self.leader_id = leader_id
        self.followings: dict[Key, Following] = {}
        self._session = ReplicaSession()
        self._loop = asyncio.get_running_loop()
        self._resting: dict[Key, float] = {}
        self._refreshes: dict[Key, int] = {}
        self._news = asyncio.Event()
        self._poll: asyncio.Task[memoryview] | None = None
        settings = node.settings
        self._wait_ms = settings.integer("replica.fetch.wait.max.ms")
        self._partition_bytes_max = settings.integer("replica.fetch.max.bytes")
        self._answer_bytes_max = settings.integer("replica.fetch.response.max.bytes")
        self._backoff_seconds = settings.integer("replica.fetch.backoff.ms") / 1000
        self._timeout_seconds = (settings.integer("replica.socket.timeout.ms") + self._wait_ms) / 1000
        self._task = node.spawn(self._run())

    def __repr__(self) -> str:
        return f"<LeaderFetcher of {self.leader_id}: {len(self.followings)} partitions, {len(self._resting)} rest>"

    # -- who is fetched ------------------------------------------------------------------------------

    def add(self, following: Following, after: asyncio.Future[None] | None = None) -> None:
        """Fetch for this partition too, once `after` is done."""
        self.remove(following.key)
        self.followings[following.key] = following
        if following.is_durable and (after is None or after.done()):
            self._ask(following)
        else:
            self._node.spawn(self._ask_later(following, after))

    def remove(self, key: Key) -> None:
        self.followings.pop(key, None)
        self._resting.pop(key, None)
        self._refreshes.pop(key, None)
        self._session.drop(key)

    def try_now(self) -> None:
        """The leader has registered anew: no rest is worth keeping."""
        self._resting = dict.fromkeys(self._resting, 0.0)
        self._news.set()

    def close(self) -> None:
        self._task.cancel()

    async def _ask_later(self, following: Following, after: asyncio.Future[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        if await following.made_durable():
            self._ask(following)

    def _ask(self, following: Following) -> None:
        if self._is_current(following):
            self._session.ask(following)
            self._news.set()
            if self._poll is not None:
                self._loop.call_later(_GRACE_SECONDS, self._give_up, self._poll)

    def _give_up(self, poll: asyncio.Task[memoryview]) -> None:
        if poll is self._poll:
            poll.cancel()

    def _is_current(self, following: Following) -> bool:
        return self.followings.get(following.key) is following and not following.is_over

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
                # Whatever it was, the other rounds must go on.
                is_good = False
                self._session.begin_anew()
                logger.exception("fetching failed", extra={"leader": self.leader_id})
            failures = 0 if is_good else failures + 1
            if failures:
                await self._wait_for_news(self._backoff_seconds * random.uniform(0.5, 1.5))

    async def _round(self) -> bool:
        """False: rest before the next one."""
        self._end_rests()
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

    async def _fetch(self, bytes_max: dict[Key, int]) -> FetchedAnswer | None:
        """None: given up, because something else wants to be asked."""
        node = self._node
        request = self._session.request(bytes_max, self._partition_bytes_max)
        body = encode_replica_fetch(
            replica_id=node.node_id,
            broker_epoch=node.lifecycle.broker_epoch,
            max_wait_ms=self._wait_until_next_ms(),
            min_bytes=1,
            max_bytes=self._answer_bytes_max,
            session_id=request.session_id,
            session_epoch=request.session_epoch,
            topics=request.topics,
            forgotten=request.forgotten,
        )
        poll = self._poll = self._loop.create_task(
            node.peers.fetch(self.leader_id, body, version=VERSION, timeout_s=self._timeout_seconds)
        )
        try:
            await asyncio.wait([poll])
        finally:
            self._poll = None
            poll.cancel()
        if poll.cancelled():
            self._session.given_up()
            self._ask_again()
            return None
        return parse_fetch_response(poll.result())

    def _ask_again(self) -> None:
        """The answer that was given up may have told of a high watermark, and would not tell of it twice."""
        for key in list(self._session.asked):
            following = self.followings.get(key)
            if following is not None and following.is_behind_in_commits:
                self._session.ask(following)

    async def _take(self, answer: FetchedAnswer) -> None:
        syncing: dict[asyncio.Task[Outcome], Following] = {}
        appended = 0
        for fetched in answer.partitions:
            question = self._session.asked.get((fetched.topic_id, fetched.partition))
            if question is None:
                continue
            following, size = question.following, len(fetched.records)
            self._fetchers.count(following, size)
            outcome = self._taken(question, fetched)
            if isinstance(outcome, Outcome):
                self._settle(following, outcome)
            elif following.is_rearranging:
                self._session.drop(following.key)
                self._node.spawn(self._ask_when_rearranged(following, outcome))
            else:
                syncing[self._loop.create_task(outcome)] = following
            appended += size
            if appended >= _APPEND_BYTES_AT_ONCE:
                appended = 0
                await asyncio.sleep(0)
        if syncing:
            await self._settle_synced(syncing)

    def _taken(self, question: Question, fetched: FetchedPartition) -> Outcome | Coroutine[Any, Any, Outcome]:
        try:
            return question.following.take(question.position, fetched)
        except Exception:
            # One partition's trouble is not the others'.
            logger.exception("answer cannot be applied", extra={"following": repr(question.following)})
            return Outcome.REST

    async def _settle_synced(self, syncing: dict[asyncio.Task[Outcome], Following]) -> None:
        try:
            await asyncio.wait(syncing)
        finally:
            for task in syncing:
                task.cancel()
        for task, following in syncing.items():
            with suppress(asyncio.CancelledError):
                self._settle(following, task.result())

    async def _ask_when_rearranged(
        self, following: Following, rearranging: Coroutine[Any, Any, Outcome]
    ) -> None:
        try:
            outcome = await rearranging
        except ApiError as error:
            logger.error(
                "log cannot be truncated", extra={"following": repr(following), "reason": str(error)}
            )
            self._settle(following, Outcome.REST)
            self._news.set()
            return
        self._fetchers.rearranged(following)
        if outcome is not Outcome.OVER:
            self._ask(following)

    def _settle(self, following: Following, outcome: Outcome) -> None:
        key = following.key
        if not self._is_current(following):
            if following.is_over and self.followings.get(key) is following:
                self.remove(key)
            return
        if outcome is Outcome.REFRESH:
            count = self._refreshes[key] = min(self._refreshes.get(key, -1) + 1, 10)
            self._rest(key, min(self._backoff_seconds, _REFRESH_SECONDS * 2**count))
            return
        self._refreshes.pop(key, None)
        if outcome is Outcome.MOVED:
            self._session.ask(following)
        elif outcome is Outcome.REST:
            self._rest(key, self._backoff_seconds)

    # -- rests ---------------------------------------------------------------------------------------

    def _rest(self, key: Key, seconds: float) -> None:
        self._session.drop(key)
        self._resting[key] = self._loop.time() + seconds

    def _end_rests(self) -> None:
        if not self._resting:
            return
        now = self._loop.time()
        for key in [key for key, due in self._resting.items() if due <= now]:
            del self._resting[key]
            self._session.ask(self.followings[key])

    def _seconds_to_next(self) -> float | None:
        return max(0.0, min(self._resting.values()) - self._loop.time()) if self._resting else None

    def _wait_until_next_ms(self) -> int:
        """Nobody's rest is longer because others have nothing to fetch."""
        seconds = self._seconds_to_next()
        return self._wait_ms if seconds is None else min(self._wait_ms, int(seconds * 1000) + 1)

    async def _wait_for_news(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    # -- bandwidth -----------------------------------------------------------------------------------

    def _share_bandwidth(self) -> dict[Key, int]:
        """How much partitions that are held back may fetch; where nothing is left they rest."""
        bytes_max: dict[Key, int] = {}
        asked = (following for key, following in self.followings.items() if key in self._session)
        for bandwidth, slowed in self._fetchers.limits(list(asked) if self._fetchers.is_limited else ()):
            left, wait_seconds = bandwidth.left()
            for following in slowed:
                if left <= 0:
                    self._rest(following.key, wait_seconds)
                    continue
                share = min(self._partition_bytes_max, left // len(slowed) + 1)
                bytes_max[following.key] = min(share, bytes_max.get(following.key, share))
        for key in [key for key in bytes_max if key in self._resting]:
            del bytes_max[key]
        for key in bytes_max:
            self._session.ask(self.followings[key])
        return bytes_max
