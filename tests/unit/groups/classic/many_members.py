"""A hundred consumers in virtual time, with a network between them and the shard."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from tests.unit.groups.classic.script import subscription

from penstock.groups.group import (
    GroupResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    SyncReply,
    SyncRequest,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode

HEARTBEAT_MS = 3_000
SESSION_MS = 10_000


class Consumer:
    """Does what client libraries do. `stop` is a crash: replies in flight are dropped."""

    def __init__(self, herd: Herd, name: str, instance_id: str | None) -> None:
        self.herd = herd
        self.name = name
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.is_stable = False
        self.is_stopped = False

    def join(self) -> None:
        self.is_stable = False
        request = JoinRequest(
            group_id="g",
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self.name,
            client_host="/host",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=60_000,
            protocol_type="consumer",
            protocols=(("range", subscription(("t",))),),
        )
        self.herd.call(
            self,
            lambda shard, token, now_ms: shard.join(
                request, token, now_ms=now_ms, new_member_id=self.herd.fresh_id(self.name)
            ),
            self._joined,
        )

    def leave(self) -> None:
        request = LeaveRequest(group_id="g", members=(LeavingMember(member_id=self.member_id),))
        self.herd.call(
            self, lambda shard, token, now_ms: shard.leave(request, token, now_ms=now_ms), lambda _: None
        )
        self.stop()

    def stop(self) -> None:
        self.is_stopped = True
        self.is_stable = False

    def _joined(self, reply: JoinReply) -> None:
        match reply.error:
            case ErrorCode.none:
                self.member_id, self.generation = reply.member_id, reply.generation
                self.herd.generations.add(reply.generation)
                self._sync(reply)
            case ErrorCode.member_id_required:
                self.member_id = reply.member_id
                self.join()
            case _:
                self._start_over()

    def _sync(self, reply: JoinReply) -> None:
        request = SyncRequest(
            group_id="g",
            generation=self.generation,
            member_id=self.member_id,
            instance_id=self.instance_id,
            assignments=tuple((member.member_id, b"part") for member in reply.members),
        )
        self.herd.call(
            self, lambda shard, token, now_ms: shard.sync(request, token, now_ms=now_ms), self._synced
        )

    def _synced(self, reply: SyncReply) -> None:
        match reply.error:
            case ErrorCode.none:
                self.is_stable = True
                self._beat_later()
            case ErrorCode.rebalance_in_progress:
                self.join()
            case _:
                self._start_over()

    def _beat_later(self) -> None:
        generation = self.generation
        self.herd.after(HEARTBEAT_MS, lambda: self._beat(generation))

    def _beat(self, generation: int) -> None:
        if self.is_stopped or not self.is_stable or generation != self.generation:
            return
        request = HeartbeatRequest(
            group_id="g", generation=generation, member_id=self.member_id, instance_id=self.instance_id
        )
        self.herd.call(
            self,
            lambda shard, token, now_ms: shard.heartbeat(request, token, now_ms=now_ms),
            lambda reply: self._beaten(reply.error, generation),
        )

    def _beaten(self, error: ErrorCode, generation: int) -> None:
        if generation != self.generation or not self.is_stable:
            return
        match error:
            case ErrorCode.none:
                self._beat_later()
            case ErrorCode.rebalance_in_progress:
                self.join()
            case _:
                self._start_over()

    def _start_over(self) -> None:
        self.member_id = ""
        self.join()


class Herd:
    def __init__(self, *, seed: int, initial_rebalance_delay_ms: int) -> None:
        self.random = random.Random(seed)
        self.shard = GroupCoordinatorShard(
            GroupCoordinatorConfig(initial_rebalance_delay_ms=initial_rebalance_delay_ms)
        )
        self.now_ms = 0
        self.consumers: list[Consumer] = []
        self.generations: set[int] = set()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._handlers: dict[int, tuple[Consumer, Callable[[Any], None]]] = {}
        self._apply(self.shard.loaded(0))

    def start(self, count: int, *, within_ms: int, static: bool = False) -> None:
        for number in range(count):
            instance_id = f"i{number}" if static else None
            consumer = Consumer(self, f"c{number}", instance_id)
            self.consumers.append(consumer)
            self.after(self.random.randrange(within_ms), consumer.join)

    def crash(self) -> None:
        for consumer in self.consumers:
            consumer.stop()
        self.consumers.clear()

    def leave(self, *, within_ms: int) -> None:
        for consumer in self.consumers:
            self.after(self.random.randrange(within_ms), consumer.leave)
        self.consumers = []

    def run(self, for_ms: int) -> None:
        end_ms = self.now_ms + for_ms
        while (at_ms := self._next_ms()) <= end_ms:
            self.now_ms = at_ms
            deadline_ms = self.shard.next_deadline_ms()
            if deadline_ms is not None and deadline_ms <= at_ms:
                self._apply(self.shard.tick(at_ms))
            else:
                heapq.heappop(self._events)[2]()
        self.now_ms = end_ms

    def after(self, delay_ms: int, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now_ms + delay_ms, self._order, do))

    def call(
        self,
        consumer: Consumer,
        operation: Callable[[GroupCoordinatorShard, int, int], GroupResult],
        then: Callable[[Any], None],
    ) -> None:
        """A request: it travels there, is served, and the reply travels back."""
        self._order += 1
        token = self._order
        self._handlers[token] = (consumer, then)
        self.after(self._latency_ms(), lambda: self._apply(operation(self.shard, token, self.now_ms)))

    def fresh_id(self, name: str) -> str:
        self._order += 1
        return f"{name}-{self._order}"

    def _latency_ms(self) -> int:
        return self.random.randrange(1, 20)

    def _next_ms(self) -> int:
        event_ms = self._events[0][0] if self._events else 1 << 62
        deadline_ms = self.shard.next_deadline_ms()
        return max(self.now_ms, min(event_ms, event_ms if deadline_ms is None else deadline_ms))

    def _apply(self, work: GroupResult) -> None:
        for key, value in work.records:
            self.shard.replay(key, value)
        for token, reply in work.replies:
            assert isinstance(token, int)
            self.after(self._latency_ms(), lambda token=token, reply=reply: self._deliver(token, reply))

    def _deliver(self, token: int, reply: object) -> None:
        consumer, then = self._handlers.pop(token)
        if not consumer.is_stopped:
            then(reply)
