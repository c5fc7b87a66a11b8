"""Runs a script of share state operations and writes down everything that comes of each.

A line that starts with `>` is an operation; the lines below it are the records stored, the replies given, and what is
kept of the share partition where it has changed. `restart` loads a new shard from the records.

    init PARTITION epoch=1 start=0          write PARTITION 0-4:acked/1 5:limit/5 [epoch= leader= start= complete=]
    read PARTITION leader=3                 summary PARTITION        delete PARTITION
    dead_letters                            the writer asks for work  plan PARTITION 1-3 sequence=0
    settle PARTITION                        done; `giveup` instead: the plan was not carried out
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from penstock.groups.share.state import share_state_records
from penstock.groups.share.state.share_state import (
    DeleteState,
    InitializeState,
    ReadState,
    ReadStateSummary,
    SharePartitionKey,
    ShareStateReply,
    ShareStateRequest,
    StateRange,
    WriteState,
    offset_count,
)
from penstock.groups.share.state.share_state_records import DeadLetterPlan, DeadLetterTarget, SettledPlan
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard, ShareStateResult
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import key_type

STATES = {"available": 0, "acked": 2, "archived": 4, "limit": 32, "rejected": 33, "expired": 34}
NAMES = {number: name for name, number in STATES.items()}
TOPIC = UUID(int=1)
GRAVES = DeadLetterTarget(UUID(int=2), 0)


def key_of(text: str) -> SharePartitionKey:
    return SharePartitionKey("g", TOPIC, int(text))


class Script:
    def __init__(self) -> None:
        self.shard = ShareCoordinatorShard(updates_per_snapshot=2)
        self.log: list[tuple[bytes, bytes | None]] = []
        self._shown: dict[SharePartitionKey, str] = {}

    def run(self, line: str) -> Iterator[str]:
        words = line.split()
        options = dict(word.split("=") for word in words if "=" in word)
        plain = [word for word in words[1:] if "=" not in word]
        yield from getattr(self, f"_{words[0]}")(plain, {name: int(value) for name, value in options.items()})
        yield from self._changes()

    def _init(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        yield from self._ask(
            InitializeState(key_of(words[0]), options.get("epoch", 0), options.get("start", -1))
        )

    def _read(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        yield from self._ask(ReadState(key_of(words[0]), options.get("leader", -1)))

    def _summary(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        yield from self._ask(ReadStateSummary(key_of(words[0]), -1))

    def _delete(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        yield from self._ask(DeleteState(key_of(words[0]), options.get("epoch", -1)))

    def _write(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        epochs = options.get("epoch", -1), options.get("leader", -1)
        start, complete = options.get("start", -1), options.get("complete", -1)
        batches = [_range(word) for word in words[1:]]
        yield from self._ask(WriteState(key_of(words[0]), *epochs, start, complete, batches))

    def _ask(self, request: ShareStateRequest) -> Iterator[str]:
        yield from self._do(self.shard.handle([request], "leader", now_ms=0))

    def _dead_letters(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        yield from self._do(self.shard.next_dead_letters([key_of(word) for word in words], "writer"))

    def _plan(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        offsets = tuple(_range(f"{word}:limit/0")[:2] for word in words[1:])
        plan = DeadLetterPlan(7, 0, options["sequence"], "graves", GRAVES, offsets, offsets)
        yield from self._do(self.shard.plan_dead_letters(key_of(words[0]), plan, "writer"))

    def _settle(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        plan = self._open_plan(words[0])
        settled = SettledPlan(True, options.get("lost", 0), plan.resolved if plan else ())
        yield from self._do(self.shard.settle_dead_letters(key_of(words[0]), settled, plan, "writer"))

    def _giveup(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        plan = self._open_plan(words[0])
        yield from self._do(
            self.shard.settle_dead_letters(key_of(words[0]), SettledPlan(False, 0, ()), plan, "writer")
        )

    def _open_plan(self, partition: str) -> DeadLetterPlan | None:
        view = self.shard.pending_dead_letters(key_of(partition))
        return None if view is None else view.plan

    def _restart(self, words: list[str], options: dict[str, int]) -> Iterator[str]:
        before, self.shard = self.shard.stored(), ShareCoordinatorShard(updates_per_snapshot=2)
        for record in self.log:
            self.shard.replay(*record)
        assert self.shard.stored() == before
        yield f"loaded from {len(self.log)} records"

    def _do(self, work: ShareStateResult) -> Iterator[str]:
        for record in work.records:
            self.shard.replay(*record)
            yield f"store {_stored(*record)}"
        self.log += work.records
        for token, reply in work.replies:
            yield from _replied(str(token), reply)

    def _changes(self) -> Iterator[str]:
        kept = {key: _kept(stored) for key, stored in self.shard.stored().items()}
        for key in sorted({*kept, *self._shown}, key=lambda key: key.partition):
            if kept.get(key) != self._shown.get(key):
                yield f"g-{key.partition}: {kept.get(key, 'nothing')}"
        self._shown = kept


def _range(word: str) -> StateRange:
    offsets, _, cause = word.partition(":")
    first, _, last = offsets.partition("-")
    state, _, count = cause.partition("/")
    return int(first), int(last or first), STATES[state], int(count)


def _shown_range(one: tuple[int, ...]) -> str:
    offsets = f"{one[0]}" if one[0] == one[1] else f"{one[0]}-{one[1]}"
    return offsets if len(one) == 2 else f"{offsets}:{NAMES[one[2]]}/{one[3]}"


def _list(ranges: object) -> str:
    assert isinstance(ranges, list | tuple)
    return " ".join(map(_shown_range, ranges)) or "none"


def _stored(key: bytes, value: bytes | None) -> str:
    partition, kind = share_state_records.decode_key(key).partition, key_type(key)
    if value is None:
        return f"g-{partition}: nothing"
    match kind:
        case share_state_records.SHARE_SNAPSHOT:
            snapshot = share_state_records.decode_snapshot(value)
            return f"g-{partition}: snapshot {snapshot.snapshot_epoch} of {_list(snapshot.batches)}"
        case share_state_records.SHARE_UPDATE:
            update = share_state_records.decode_update(value)
            return f"g-{partition}: update of {_list(update.batches)}, start {update.start_offset}"
        case share_state_records.DEAD_LETTERS_PENDING:
            return f"g-{partition}: dead letters pending {_list(share_state_records.decode_pending(value))}"
        case share_state_records.DEAD_LETTER_PLAN:
            plan = share_state_records.decode_plan(value)
            return f"g-{partition}: plan {_list(plan.offsets)} to {plan.topic} at sequence {plan.sequence}"
        case _:
            return f"g-{partition}: settled {_list(share_state_records.decode_settled(value).resolved)}"


def _replied(token: str, reply: object) -> Iterator[str]:
    if not (isinstance(reply, tuple) and reply and isinstance(reply[0], ShareStateReply)):
        yield f"{token}: {[f'g-{key.partition}' for key in reply] if isinstance(reply, tuple) else reply}"
        return
    for answer in reply:
        if answer.error is not ErrorCode.none:
            yield f"{token}: {answer.error.name.upper()}"
        elif answer.state is not None:
            yield f"{token}: epoch {answer.state.state_epoch} start {answer.state.start_offset} " + _list(
                answer.state.batches
            )
        elif answer.summary is not None:
            yield f"{token}: {tuple(answer.summary)}"
        else:
            yield f"{token}: done"


def _kept(stored: tuple[object, ...]) -> str:
    state, summary, view = stored
    parts = []
    if state is not None:
        parts.append(
            f"start {state.start_offset} epochs {summary.state_epoch}/{summary.leader_epoch} "  # type: ignore[attr-defined]
            f"{_list(state.batches)}"  # type: ignore[attr-defined]
        )
    if view is not None and (view.pending or view.plan):  # type: ignore[attr-defined]
        parts.append(f"{offset_count(view.pending)} dead letters pending")  # type: ignore[attr-defined]
    if view is not None and view.plan:  # type: ignore[attr-defined]
        parts.append(f"planned {_list(view.plan.offsets)}")  # type: ignore[attr-defined]
    return ", ".join(parts) or "nothing"
