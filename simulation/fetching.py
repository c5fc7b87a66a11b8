"""How followers pull: one round per leader for all partitions, parked by the leader while it has nothing to say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.replication import follower as rules
from penstock.replication.follower import FetchPosition
from simulation.disk import DiskFull
from simulation.network import Respond
from simulation.replica import Key, Replica, Served, refusal

if TYPE_CHECKING:
    from simulation.node import Node


class FetchAsk(NamedTuple):
    broker_id: int
    broker_epoch: int
    positions: tuple[tuple[Key, FetchPosition], ...]


class Parked:
    __slots__ = ("ask", "is_done", "respond")

    def __init__(self, ask: FetchAsk, respond: Respond) -> None:
        self.ask = ask
        self.respond = respond
        self.is_done = False


class Fetches:
    """The leader's side: fetches that wait for news."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._parked: dict[Key, list[Parked]] = {}

    def received(self, ask: FetchAsk, respond: Respond) -> None:
        parked = Parked(ask, respond)
        if not self._answer(parked, is_new=True):
            for key, _ in ask.positions:
                self._parked.setdefault(key, []).append(parked)
            self.node.after(self.node.timings.fetch_wait_ms, self._expire, parked)

    def wake(self, key: Key) -> None:
        """The log grew, or its high watermark did."""
        if key in self._parked:
            waiting = self._parked.pop(key)
            still = [parked for parked in waiting if not parked.is_done and not self._answer(parked)]
            if still:
                self._parked.setdefault(key, []).extend(still)

    def _expire(self, parked: Parked) -> None:
        if not parked.is_done:
            self._answer(parked, is_last=True)

    def _answer(self, parked: Parked, *, is_new: bool = False, is_last: bool = False) -> bool:
        ask = parked.ask
        served = [(key, asked, self._serve(ask, key, asked, is_new)) for key, asked in ask.positions]
        if parked.is_done:
            return True  # by what this very fetch has moved
        if not is_last and not any(self._is_news(ask.broker_id, key, each) for key, _, each in served):
            return False
        parked.is_done = True
        for key, _, each in served:
            if each.answer.error is ErrorCode.none and each.answer.diverging is None:
                self.node.replicas[key].told[ask.broker_id] = each.answer.high_watermark
        parked.respond(served)
        return True

    def _serve(self, ask: FetchAsk, key: Key, asked: FetchPosition, is_new: bool) -> Served:
        replica = self.node.replicas.get(key)
        if replica is None:
            return refusal(ErrorCode.unknown_topic_id)
        return replica.serve(ask.broker_id, ask.broker_epoch, asked, is_new=is_new)

    def _is_news(self, follower: int, key: Key, served: Served) -> bool:
        answer = served.answer
        if answer.error is not ErrorCode.none or answer.diverging is not None or answer.has_records:
            return True
        return answer.high_watermark > self.node.replicas[key].told.get(follower, -1)


class Fetcher:
    """The follower's side: everything that is pulled from one leader."""

    def __init__(self, node: Node, leader_id: int) -> None:
        self.node = node
        self.leader_id = leader_id
        self._round = 0
        self._resting: dict[Key, int] = {}

    def changed(self) -> None:
        """Other partitions, or in another epoch: what is under way is not waited for."""
        self._round += 1
        self.node.after(0, self._ask, self._round)

    def _partitions(self) -> list[Replica]:
        return [
            replica
            for replica in self.node.replicas.values()
            if replica.following is not None and replica.following.leader_id == self.leader_id
        ]

    def _ask(self, number: int) -> None:
        if number != self._round:
            return
        positions = []
        now_ms = self.node.world.now_ms
        for replica in self._partitions():
            if self._resting.get(replica.key, 0) > now_ms:
                continue
            if not self.may_ask(replica):
                self.node.sync(replica.log, lambda: self._again(number))
                return
            assert replica.following is not None
            positions.append((replica.key, replica.following.position(replica.log)))
        if not positions:
            if self._partitions():
                self._rest(number)
            return
        ask = FetchAsk(self.node.id, self.node.lifecycle.broker_epoch, tuple(positions))
        self.node.call(self.leader_id, "fetch", ask, lambda reply, _: self._answered(number, reply))

    def may_ask(self, replica: Replica) -> bool:
        """A fetch confirms what comes before it, so that must be durable."""
        return replica.log.durable_offset >= replica.log.end_offset

    def _again(self, number: int) -> None:
        self._ask(number)

    def _rest(self, number: int) -> None:
        self.node.after(self.node.timings.backoff_ms, self._ask, number)

    def _answered(self, number: int, reply: list[tuple[Key, FetchPosition, Served]] | None) -> None:
        if reply is None:
            if number == self._round:
                self._rest(number)
            return
        unsynced = []
        for key, asked, served in reply:
            replica = self.node.replicas.get(key)
            if replica is not None and replica.following is not None:
                unsynced += self._apply(replica, replica.following, asked, served)
        if number != self._round:
            return
        if unsynced:
            self.sync_then_go_on(number, unsynced)
        else:
            self._ask(number)

    def sync_then_go_on(self, number: int, replicas: list[tuple[Replica, Served]]) -> None:
        """A partition's high watermark is believed, and the next fetch sent, when its records are durable."""
        left = len(replicas)

        def synced(replica: Replica, served: Served) -> None:
            nonlocal left
            left -= 1
            if replica.following is not None:
                self.raise_high_watermark(replica, replica.following, served.answer.high_watermark)
            if left == 0:
                self._again(number)

        for replica, served in replicas:
            replica.when_durable(partial(synced, replica, served))

    def _apply(
        self, replica: Replica, follower: rules.FollowerRules, asked: FetchPosition, served: Served
    ) -> list[tuple[Replica, Served]]:
        """Carry out the rules' actions; the replicas that are to be synced before the next round."""
        unsynced: list[tuple[Replica, Served]] = []
        for action in follower.answered(asked, served.answer, replica.log):
            match action:
                case rules.Truncate(offset):
                    self.node.invariants.truncating(self.node, replica.key, replica.log, offset)
                    self.truncate(replica, offset)
                case rules.TruncateFully(offset):
                    replica.log.restart(offset, self.node.invariants.chain(replica.key, offset))
                    replica.log.high_watermark = min(replica.log.high_watermark, offset)
                case rules.Append():
                    if self.append(replica, served):
                        unsynced.append((replica, served))
                case rules.RaiseHighWatermark(offset):
                    if not unsynced:
                        self.raise_high_watermark(replica, follower, offset)
                case rules.RaiseLogStart(offset):
                    replica.log.raise_start(follower.bounded_start(offset, replica.log))
                case rules.Retry() | rules.AwaitImage():
                    self._resting[replica.key] = self.node.world.now_ms + self.node.timings.backoff_ms
        return unsynced

    def raise_high_watermark(self, replica: Replica, follower: rules.FollowerRules, offset: int) -> None:
        replica.log.high_watermark = follower.bounded_high_watermark(offset, replica.log)
        self.node.invariants.follower_high_watermark(self.node, replica)

    def truncate(self, replica: Replica, offset: int) -> None:
        replica.log.truncate(offset)
        replica.log.high_watermark = min(replica.log.high_watermark, replica.log.end_offset)

    def append(self, replica: Replica, served: Served) -> bool:
        try:
            self.node.machine.disk.require_room()
        except DiskFull:
            self._resting[replica.key] = self.node.world.now_ms + self.node.timings.backoff_ms
            return False
        for batch in served.batches:
            replica.put(batch)
        return True


def followed_leaders(replicas: dict[Key, Replica]) -> dict[int, Any]:
    """Every leader that is followed, with what is followed there and in which epoch."""
    followed: dict[int, list[tuple[Key, int]]] = {}
    for key, replica in replicas.items():
        if replica.following is not None:
            followed.setdefault(replica.following.leader_id, []).append((key, replica.following.leader_epoch))
    return followed
