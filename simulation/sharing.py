"""Share partitions on their leaders: loaded from the share coordinator, written to it one write at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import SHARE_GROUP_STATE
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import (
    AcknowledgementBatch,
    AcquiredBatch,
    AcquireLimits,
    PendingWrite,
    ReadableRecords,
    ShareCounters,
    SharePartitionPolicy,
)
from penstock.groups.share.state import share_state
from penstock.groups.share.state.share_state import ShareStateReply, ShareStateRequest
from penstock.protocol.errors import ApiError, ErrorCode
from simulation.replica import Key
from simulation.script import Ask, Local, Steps, play

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.network import Respond
    from simulation.node import Node
    from simulation.replica import Replica
    from simulation.share_history import ShareHistory

_READ_BATCHES_MAX: Final = 6
#: What is known here is not true any more: it is thrown away and read again.
_FENCED: Final = frozenset(
    {ErrorCode.fenced_state_epoch, ErrorCode.fenced_leader_epoch, ErrorCode.invalid_request}
)


class ShareFetch(NamedTuple):
    key: Key
    group: str
    member: str
    records_max: int


class ShareAck(NamedTuple):
    """Without batches: the member goes, and all that it holds is free."""

    key: Key
    group: str
    member: str
    batches: tuple[AcknowledgementBatch, ...]


def state_question(cluster: Cluster, question: ShareStateRequest) -> Ask:
    """Answered with one Answer in a tuple, where it is answered."""
    key = cluster.partitions(SHARE_GROUP_STATE)[0]
    return Ask(key, "group", (key, lambda shard, token, now_ms: shard.ask((question,), token, now_ms=now_ms)))


def answer_of(reply: Any) -> ShareStateReply:
    return reply[0] if isinstance(reply, tuple) else ShareStateReply(ErrorCode.coordinator_not_available)


class Sharing:
    """What every process of a world with share groups has."""

    def __init__(self, node: Node, policies: dict[str, SharePartitionPolicy], history: ShareHistory) -> None:
        self.node = node
        self.policies = policies
        self.history = history
        self._led: dict[tuple[str, Key], LedShare] = {}
        node.services["share_fetch"] = lambda ask, respond: self._serve(self._fetch, ask, respond)
        node.services["share_ack"] = lambda ask, respond: self._serve(self._acknowledge, ask, respond)

    def _serve(self, script: Any, ask: Any, respond: Respond) -> None:
        play(self.node, self._guarded(script, ask), respond)

    def _guarded(self, script: Any, ask: Any) -> Steps:
        try:
            led = self._find(ask.group, ask.key)
            return (yield from script(led, ask))
        except ApiError as error:
            return (error.code, [])

    def _find(self, group: str, key: Key) -> LedShare:
        replica = self.node.replica(key)
        replica.require_leader()
        led = self._led.get((group, key))
        if led is None or not led.is_current:
            led = self._led[group, key] = LedShare(self, group, replica)
        return led

    def _fetch(self, led: LedShare, ask: ShareFetch) -> Steps:
        acquired = led.acquire(ask.member, ask.records_max)
        if not acquired and led.reserve(ask.records_max):
            yield from led.stored()
            acquired = led.acquire(ask.member, ask.records_max)
        return (ErrorCode.none, acquired)

    def _acknowledge(self, led: LedShare, ask: ShareAck) -> Steps:
        if not ask.batches:
            led.release(ask.member)
            return (ErrorCode.none, [])
        batches = list(ask.batches)
        if led.acknowledge(ask.member, batches):
            yield from led.stored()
        self.history.confirmed(ask.group, ask.key, led.leader_epoch, batches)
        return (ErrorCode.none, [])


class LedShare:
    """One share partition while its partition is led here."""

    def __init__(self, sharing: Sharing, group: str, replica: Replica) -> None:
        self.sharing = sharing
        self.node = sharing.node
        self.group = group
        self.replica = replica
        self.rules: SharePartition | None = None
        self.error: ErrorCode | None = None
        self._leading = replica.require_leader()
        self.leader_epoch = self._leading.leader_epoch
        self._key = share_state.SharePartitionKey(group, replica.key.topic_id, replica.key.partition)
        self._state_epoch = 0
        self._is_writing = False
        self._timer_ms: int | None = None
        self._waiting: list[Callable[[Any], None]] = []
        play(self.node, self._load())

    def __repr__(self) -> str:
        return f"<LedShare {self.group} {self.replica.key} e{self.leader_epoch} {self.rules}>"

    @property
    def is_current(self) -> bool:
        return self.error is None and self.replica.leading is self._leading

    def _chance(self) -> float:
        return self.node.world.random.random()

    def _load(self) -> Steps:
        reply = yield state_question(self.node.cluster, share_state.ReadState(self._key, self.leader_epoch))
        answer = answer_of(reply)
        if answer.error is not ErrorCode.none or answer.state is None:
            self.close(answer.error)
            return
        state = answer.state
        self._state_epoch = state.state_epoch
        policy = self.sharing.policies[self.group]
        self.rules = SharePartition(
            state.start_offset,
            state.batches,
            policy,
            ShareCounters(),
            state.totals,
            now_ms=self.node.now_ms(),
            chance=self._chance(),
        )
        self.node.world.note("share loaded", self.node.id, self)
        self.changed()

    def current(self) -> SharePartition:
        """Raises ApiError."""
        if not self.is_current:
            raise ApiError(ErrorCode.not_leader_or_follower)
        if self.rules is None:
            raise ApiError(ErrorCode.leader_not_available)
        return self.rules

    # --- what members do ---

    def acquire(self, member: str, records_max: int) -> list[AcquiredBatch]:
        rules, found = self.current(), self._found()
        if found is None:
            return []
        now_ms, limits = self.node.now_ms(), AcquireLimits(records_max, exact=True)
        acquired = rules.acquire(member, found, limits, now_ms=now_ms)
        self.sharing.history.acquired(
            self.group, self.replica.key, self.leader_epoch, member, acquired, now_ms
        )
        self.changed()
        return acquired

    def reserve(self, records_max: int) -> bool:
        """At most once: whether there is something to be paid for before it is handed out."""
        rules, found = self.current(), self._found()
        if found is None or not rules.policy.is_at_most_once:
            return False
        reserved = rules.reserve(found, AcquireLimits(records_max, exact=True))
        self.changed()
        return reserved > 0

    def _found(self) -> ReadableRecords | None:
        rules, log = self.current(), self.replica.log
        offset = rules.next_offset
        if offset is None or offset >= log.high_watermark:
            return None
        batches = log.read(offset, log.high_watermark, _READ_BATCHES_MAX)
        if log.is_damaged(batches):
            self.node.found_damage(self.replica)
            raise ApiError(ErrorCode.kafka_storage_error)
        ends = [batch.next_offset for batch in batches]
        return ReadableRecords(offset, ends[-1], [(batches[0].base_offset, ends[-1])], ends)

    def acknowledge(self, member: str, batches: list[AcknowledgementBatch]) -> bool:
        """Whether a write has to be waited for. Raises ApiError."""
        now_ms = self.node.now_ms()
        is_written = self.current().acknowledge(member, batches, now_ms=now_ms, chance=self._chance())
        self.sharing.history.said(self.group, self.replica.key, member, batches, now_ms)
        self.changed()
        return is_written

    def release(self, member: str) -> None:
        rules, now_ms = self.current(), self.node.now_ms()
        rules.release(member, now_ms=now_ms, chance=self._chance(), with_delay=False)
        self.sharing.history.gone(self.group, self.replica.key, self.leader_epoch, member)
        self.changed()

    # --- writing and timing ---

    def stored(self) -> Steps:
        """Until what is queued now was written. Raises ApiError."""
        error = yield Local(self._waiting.append)
        if error is not ErrorCode.none:
            raise ApiError(error)

    def changed(self) -> None:
        rules = self.rules
        if rules is None or not self.is_current:
            return
        if rules.has_writes and not self._is_writing:
            self._is_writing = True
            play(self.node, self._write())
        deadline_ms = rules.next_deadline_ms
        if deadline_ms is not None and (self._timer_ms is None or deadline_ms < self._timer_ms):
            self._timer_ms = deadline_ms
            delay_ms = self.node.machine.clock.real_ms(max(0, deadline_ms + 1 - self.node.now_ms()))
            self.node.after(delay_ms, self._tick, deadline_ms)

    def _tick(self, set_for_ms: int) -> None:
        if self._timer_ms == set_for_ms:
            self._timer_ms = None
            if self.rules is not None and self.is_current:
                self.rules.tick(now_ms=self.node.now_ms(), chance=self._chance())
                self.changed()

    def _write(self) -> Steps:
        rules = self.rules
        assert rules is not None
        yield 0  # all that happens at this moment goes together
        while self.is_current and (write := rules.take_write()) is not None:
            waiting, self._waiting = self._waiting, []
            error = yield from self.store(write)
            if error in _FENCED:
                self.close(error)
                _tell(waiting, ErrorCode.not_leader_or_follower)
                return
            if error is ErrorCode.none:
                rules.written()
                _tell(waiting, ErrorCode.none)
            else:
                # It may have arrived all the same, so what it says is written until it is known to be there.
                rules.write_failed()
                _tell(waiting, ErrorCode.coordinator_not_available)
                yield self.node.world.between(10, 60)
        self._is_writing = False
        if not self.is_current:
            self.close(ErrorCode.not_leader_or_follower)
        else:
            self.changed()

    def store(self, write: PendingWrite) -> Steps:
        question = share_state.WriteState(self._key, self._state_epoch, self.leader_epoch, *write)
        reply = yield state_question(self.node.cluster, question)
        return answer_of(reply).error

    def close(self, error: ErrorCode) -> None:
        self.error = error
        waiting, self._waiting = self._waiting, []
        _tell(waiting, ErrorCode.not_leader_or_follower)


def _tell(waiting: list[Callable[[Any], None]], error: ErrorCode) -> None:
    for respond in waiting:
        respond(error)
