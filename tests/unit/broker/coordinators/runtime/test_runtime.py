"""The coordinator runtime: replies wait for the commit, and a shard that fails is loaded again from its log."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.unit.broker.virtual_time import in_virtual_time
from tests.unit.log.helpers import open_log

from penstock.broker.coordinators.runtime import runtime
from penstock.broker.coordinators.runtime.runtime import CoordinatorRuntime, Token
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker, Record, encode_batch, encode_end_marker


class Work(NamedTuple):
    records: tuple[tuple[bytes, bytes | None], ...] = ()
    replies: tuple[tuple[Any, object], ...] = ()
    producer: None = None


class Ledger:
    """The smallest shard that can do everything: names and values, requests that wait, one deadline."""

    transactional: Any = None

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self.parked: list[Token] = []
        self.deadline_ms: int | None = None
        self.moved_ms = 0
        self.loaded_at_ms: int | None = None

    def replay(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = value

    def loaded(self, now_ms: int) -> Work:
        self.loaded_at_ms = now_ms
        return Work()

    def next_deadline_ms(self) -> int | None:
        return self.deadline_ms

    def tick(self, now_ms: int) -> Work:
        if self.deadline_ms is None or self.deadline_ms > now_ms:
            return Work()
        self.deadline_ms = None
        return self.answer_parked("time is up")

    def clock_moved(self, by_ms: int) -> None:
        self.moved_ms += by_ms

    def put(self, token: Token, **entries: str) -> Work:
        records = tuple((name.encode(), value.encode()) for name, value in entries.items())
        return Work(records, ((token, len(self.entries)),))

    def park(self, token: Token, deadline_ms: int | None = None) -> Work:
        self.parked.append(token)
        self.deadline_ms = deadline_ms
        return Work()

    def answer_parked(self, reply: object) -> Work:
        parked, self.parked = self.parked, []
        return Work(replies=tuple((token, reply) for token in parked))


class Partition:
    """Over a real log; the test says when what was appended is committed, or that it never will be."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.leader_epoch = 0
        self.committed_up_to = log.end_offset
        self.refuses: ErrorCode | None = None
        self._waiters: list[tuple[int, Callable[[ApiError | None], None]]] = []

    def append_internal(self, batch: bytearray, now_ms: int, *, leader_epoch: int) -> int:
        if self.refuses is not None:
            raise ApiError(self.refuses)
        if leader_epoch != self.leader_epoch:
            raise ApiError(ErrorCode.not_leader_or_follower)
        appended = self.log.append(memoryview(batch), leader_epoch=leader_epoch, now_ms=now_ms, internal=True)
        return appended.last_offset

    def append_marker(
        self, marker: EndMarker, now_ms: int, *, leader_epoch: int | None = None, transaction_version: int = 0
    ) -> int:
        if not self.log.producers.check_marker(marker, transaction_version):
            return self.log.end_offset - 1
        assert leader_epoch is not None
        return self.append_internal(encode_end_marker(marker, now_ms), now_ms, leader_epoch=leader_epoch)

    def when_committed(self, offset: int, call: Callable[[ApiError | None], None]) -> None:
        if offset < self.committed_up_to:
            call(None)
        else:
            self._waiters.append((offset, call))

    def commit(self, up_to: int | None = None) -> None:
        self.committed_up_to = self.log.end_offset if up_to is None else up_to
        ready = [call for offset, call in self._waiters if offset < self.committed_up_to]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] >= self.committed_up_to]
        for call in ready:
            call(None)

    def lose(self) -> None:
        waiters, self._waiters = self._waiters, []
        for _, call in waiters:
            call(ApiError(ErrorCode.not_leader_or_follower))


class Bench:
    """A runtime with one partition, number 0, and a clock that stands still."""

    def __init__(self, log: Log, commit_timeout_s: float = 60.0) -> None:
        self.partition: Partition | None = Partition(log)
        self.now_ms = 1_700_000_000_000
        self.shards: list[Ledger] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.unreadable: list[tuple[Partition, ErrorCode]] = []
        self.runtime: CoordinatorRuntime[Ledger] = CoordinatorRuntime(
            new_shard=self._new_shard,
            find_partition=lambda index: self.partition if index == 0 else None,
            now_ms=lambda: self.now_ms,
            in_thread=self._in_thread,
            commit_timeout_s=commit_timeout_s,
            on_unreadable=lambda partition, error: self.unreadable.append((partition, error.code)),
        )

    @property
    def disk(self) -> Partition:
        assert self.partition is not None
        return self.partition

    @property
    def shard(self) -> Ledger:
        """The one that was loaded last."""
        return self.shards[-1]

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    async def put(self, **entries: str) -> Any:
        return await self.runtime.write(0, lambda shard, token: shard.put(token, **entries))

    async def park(self, deadline_ms: int | None = None) -> Any:
        return await self.runtime.write(0, lambda shard, token: shard.park(token, deadline_ms))

    async def entries(self) -> dict[bytes, bytes]:
        return await self.runtime.read(0, lambda shard: dict(shard.entries))

    def _new_shard(self) -> Ledger:
        self.shards.append(Ledger())
        return self.shards[-1]

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        await self.gate.wait()
        return call(*args)


async def settle() -> None:
    """Let every task go on until it waits for something that only the test can give."""
    for _ in range(10):
        await asyncio.sleep(0)


def code_of(task: asyncio.Task[Any]) -> ErrorCode:
    error = task.exception()
    assert isinstance(error, ApiError)
    return error.code


def done(tasks: Iterable[asyncio.Task[Any]]) -> list[bool]:
    return [task.done() for task in tasks]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "ledger-0", LogConfig(segment_bytes=4096))


@pytest.fixture
async def bench(log: Log) -> AsyncIterator[Bench]:
    bench = Bench(log)
    await bench.entries()
    yield bench
    bench.runtime.close()


async def test_a_reply_waits_until_its_records_are_committed(bench: Bench) -> None:
    write = bench.begin(bench.put(a="1"))
    await settle()
    assert bench.shard.entries == {b"a": b"1"}, "the next operation must see it at once"
    assert not write.done()
    bench.disk.commit()
    assert await write == 0


async def test_one_operation_is_one_batch(bench: Bench) -> None:
    write = bench.begin(bench.put(a="1", b="2", c="3"))
    await settle()
    bench.disk.commit(up_to=2)
    await settle()
    assert not write.done()
    bench.disk.commit()
    await write
    assert bench.disk.log.end_offset == 3


async def test_replies_come_in_order_as_the_high_watermark_moves(bench: Bench) -> None:
    first, second = bench.begin(bench.put(a="1")), bench.begin(bench.put(b="2"))
    await settle()
    bench.disk.commit(up_to=1)
    await settle()
    assert done((first, second)) == [True, False]
    bench.disk.commit()
    assert await second == 1, "decided after the first, though that was not yet committed"


async def test_an_operation_without_records_waits_for_what_it_may_have_seen(bench: Bench) -> None:
    write = bench.begin(bench.put(a="1"))
    quiet = bench.begin(bench.put())
    await settle()
    assert done((write, quiet)) == [False, False]
    bench.disk.commit()
    assert await quiet == 1


async def test_a_read_shows_nothing_that_could_still_be_lost(bench: Bench) -> None:
    before = bench.begin(bench.entries())
    await settle()
    assert await before == {}
    write, after = bench.begin(bench.put(a="1")), bench.begin(bench.entries())
    await settle()
    assert done((write, after)) == [False, False]
    bench.disk.commit()
    assert await after == {b"a": b"1"}


async def test_who_waits_in_the_shard_is_answered_by_a_later_operation(bench: Bench) -> None:
    parked = bench.begin(bench.park())
    await settle()
    assert not parked.done()

    def answer(shard: Ledger, token: Token) -> Work:
        work = shard.answer_parked("go")
        return Work(((b"k", b"v"),), (*work.replies, (token, "done")))

    operation = bench.begin(bench.runtime.write(0, answer))
    await settle()
    assert done((parked, operation)) == [False, False]
    bench.disk.commit()
    assert (await parked, await operation) == ("go", "done")


async def test_a_failed_append_discards_the_shard_and_fails_everyone(bench: Bench) -> None:
    kept = bench.begin(bench.put(kept="1"))
    await settle()
    bench.disk.commit()
    await kept
    parked, doomed = bench.begin(bench.park()), bench.shard
    await settle()
    bench.disk.refuses = ErrorCode.kafka_storage_error
    failed = bench.begin(bench.put(lost="1"))
    await settle()
    assert code_of(parked) is code_of(failed) is ErrorCode.not_coordinator
    bench.disk.refuses = None
    assert await bench.entries() == {b"kept": b"1"}
    assert bench.shard is not doomed


async def test_not_enough_replicas_is_told_as_not_available(bench: Bench) -> None:
    bench.disk.refuses = ErrorCode.not_enough_replicas
    failed = bench.begin(bench.put(a="1"))
    await settle()
    assert code_of(failed) is ErrorCode.coordinator_not_available


async def test_lost_leadership_fails_what_was_not_committed(bench: Bench) -> None:
    write, parked, read = (
        bench.begin(bench.put(a="1")),
        bench.begin(bench.park()),
        bench.begin(bench.entries()),
    )
    await settle()
    bench.disk.lose()
    await settle()
    assert {code_of(task) for task in (write, parked, read)} == {ErrorCode.not_coordinator}
    bench.disk.commit()
    # What was appended may or may not have survived; here it has, and the new shard must know it.
    assert await bench.entries() == {b"a": b"1"}


async def test_an_operation_that_breaks_does_not_leave_half_a_change_behind(bench: Bench) -> None:
    def break_it(shard: Ledger, token: Token) -> Work:
        shard.entries[b"half"] = b"done"
        raise RuntimeError("a bug")

    parked = bench.begin(bench.park())
    await settle()
    broken = bench.begin(bench.runtime.write(0, break_it))
    await settle()
    assert code_of(broken) is ErrorCode.unknown_server_error
    assert code_of(parked) is ErrorCode.not_coordinator
    assert await bench.entries() == {}


async def test_a_cancelled_request_does_not_affect_others(bench: Bench) -> None:
    gone, other = bench.begin(bench.park()), bench.begin(bench.park())
    await settle()
    gone.cancel()
    await settle()
    operation = bench.begin(
        bench.runtime.write(
            0, lambda shard, token: Work((), (*shard.answer_parked("go").replies, (token, 1)))
        )
    )
    assert (await other, await operation) == ("go", 1)


async def test_loading_replays_all_of_the_log(log: Log) -> None:
    bench = Bench(log)
    for number in range(200):
        write = bench.begin(bench.put(**{f"k{number % 50}": f"v{number}", "same": str(number)}))
        await settle()
        bench.disk.commit()
        await write
    assert len(log.segments) > 1
    again = Bench(log)
    expected = {f"k{number % 50}".encode(): f"v{number}".encode() for number in range(200)} | {
        b"same": b"199"
    }
    assert await again.entries() == expected
    assert again.shard.loaded_at_ms == again.now_ms


async def test_while_a_shard_loads_requests_are_told_to_come_back(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Bench(log)
    write = first.begin(first.put(a="1"))
    await settle()
    first.disk.commit()
    await write
    monkeypatch.setattr(runtime, "_LOAD_WAIT_S", 0.0)
    bench = Bench(log)
    bench.gate.clear()
    with pytest.raises(ApiError) as caught:
        await bench.entries()
    assert caught.value.code is ErrorCode.coordinator_load_in_progress
    bench.gate.set()
    await bench.runtime.load(0)
    assert await bench.entries() == {b"a": b"1"}


async def test_a_shard_that_cannot_be_loaded_is_not_available(log: Log) -> None:
    bench = Bench(log)
    write = bench.begin(bench.put(a="1"))
    await settle()
    bench.disk.commit()
    await write

    class Broken(Ledger):
        def replay(self, key: bytes, value: bytes | None) -> None:
            raise ValueError("no such record")

    runtime: CoordinatorRuntime[Ledger] = CoordinatorRuntime(
        new_shard=Broken,
        find_partition=lambda _: bench.disk,
        now_ms=lambda: bench.now_ms,
        in_thread=bench._in_thread,
    )
    with pytest.raises(ApiError) as caught:
        await runtime.read(0, lambda shard: shard.entries)
    assert caught.value.code is ErrorCode.coordinator_not_available


async def test_a_partition_that_is_not_here_has_no_coordinator(bench: Bench) -> None:
    with pytest.raises(ApiError) as caught:
        await bench.runtime.read(7, lambda shard: shard.entries)
    assert caught.value.code is ErrorCode.not_coordinator


async def test_a_topic_made_again_starts_from_its_new_log(bench: Bench, tmp_path: Path) -> None:
    write = bench.begin(bench.put(old="1"))
    await settle()
    bench.disk.commit()
    await write
    parked = bench.begin(bench.park())
    await settle()
    bench.partition = Partition(open_log(tmp_path / "other"))
    assert await bench.entries() == {}
    assert code_of(parked) is ErrorCode.not_coordinator


async def test_a_shard_is_not_loaded_from_damaged_records(log: Log) -> None:
    """The changed value can be decoded; only the checksum tells that it is not what was committed."""
    before = Bench(log)
    write = before.begin(before.put(name="committed"))
    await settle()
    before.disk.commit()
    await write
    before.runtime.close()
    (path,) = log.directory.glob("*.log")
    path.write_bytes(path.read_bytes().replace(b"committed", b"cOmmitted"))
    after = Bench(log)
    with pytest.raises(ApiError) as refused:
        await after.entries()
    assert refused.value.code is ErrorCode.coordinator_not_available
    assert after.unreadable == [(after.disk, ErrorCode.corrupt_message)], (
        "another replica may have the records"
    )


async def test_a_new_leader_epoch_loads_the_shard_again(bench: Bench) -> None:
    write = bench.begin(bench.put(a="1"))
    await settle()
    bench.disk.commit()
    await write
    parked = bench.begin(bench.park())
    await settle()
    before = bench.shard
    bench.disk.leader_epoch = 1
    assert await bench.entries() == {b"a": b"1"}
    assert bench.shard is not before
    assert code_of(parked) is ErrorCode.not_coordinator


async def test_a_shard_of_an_earlier_leader_epoch_writes_nothing_more(bench: Bench) -> None:
    parked = bench.begin(bench.park(deadline_ms=bench.now_ms + 5))
    await settle()
    active = bench.runtime._active[0]
    bench.disk.leader_epoch = 1
    token = active.submit(lambda shard, token: shard.put(token, late="1"))
    await settle()
    assert isinstance(token.exception(), ApiError)
    assert code_of(parked) is ErrorCode.not_coordinator
    assert bench.disk.log.end_offset == 0


async def test_a_shard_that_loses_its_epoch_while_it_loads_is_loaded_again(log: Log) -> None:
    bench = Bench(log)
    bench.gate.clear()
    bench.disk.append_internal(encode_batch([Record(0, 1, b"a", b"1")]), 1, leader_epoch=0)
    load = bench.runtime.load(0)
    await settle()
    bench.disk.leader_epoch = 1
    bench.disk.append_internal(encode_batch([Record(0, 1, b"b", b"2")]), 1, leader_epoch=1)
    bench.disk.commit()
    bench.gate.set()
    await load
    assert (len(bench.shards), bench.shard.entries) == (2, {b"a": b"1", b"b": b"2"})
    bench.runtime.close()


async def test_closing_answers_everyone(bench: Bench) -> None:
    parked, write = bench.begin(bench.park()), bench.begin(bench.put(a="1"))
    await settle()
    bench.runtime.close()
    await settle()
    assert code_of(parked) is code_of(write) is ErrorCode.not_coordinator
    with pytest.raises(ApiError):
        await bench.entries()


async def test_who_comes_after_the_end_of_a_life_is_sent_away_at_once(bench: Bench) -> None:
    """The holder of a shard may learn of its end only with the next request."""
    active = await bench.runtime.active(0)
    bench.runtime.unload(0)
    with pytest.raises(ApiError) as written:
        active.submit(lambda shard, token: shard.put(token, late="1"))
    with pytest.raises(ApiError) as read:
        active.read(lambda shard: dict(shard.entries))
    assert written.value.code is read.value.code is ErrorCode.not_coordinator


async def test_deadlines_come_up_without_a_request(bench: Bench) -> None:
    parked = bench.begin(bench.park(deadline_ms=bench.now_ms + 5))
    await settle()
    bench.now_ms += 5
    assert await asyncio.wait_for(parked, 10) == "time is up"


async def test_a_clock_that_is_set_is_not_time_that_passed(bench: Bench) -> None:
    bench.now_ms += 3_600_000
    await bench.put()
    assert abs(bench.shard.moved_ms - 3_600_000) < 1_000


async def _loaded(log: Log) -> Bench:
    bench = Bench(log, commit_timeout_s=5.0)
    await bench.entries()
    return bench


@in_virtual_time
async def test_without_commits_requests_time_out(log: Log) -> None:
    bench = await _loaded(log)
    parked, write, read = (
        bench.begin(bench.park()),
        bench.begin(bench.put(a="1")),
        bench.begin(bench.entries()),
    )
    await asyncio.sleep(4.9)
    assert done((parked, write, read)) == [False, False, False]
    await asyncio.sleep(0.2)
    later = bench.begin(bench.put(b="2"))
    await settle()
    codes = {code_of(task) for task in (parked, write, read, later)}
    assert codes == {ErrorCode.coordinator_not_available}
    assert log.end_offset == 1, "nothing piles up in the log"
    bench.runtime.close()


@in_virtual_time
async def test_what_was_decided_before_a_stall_is_there_after_it(log: Log) -> None:
    bench = await _loaded(log)
    write, shard = bench.begin(bench.put(a="1")), bench.shard
    await asyncio.wait((write,))
    bench.disk.commit()
    assert await bench.entries() == {b"a": b"1"}
    assert bench.shard is shard
    bench.runtime.close()


@in_virtual_time
async def test_sessions_do_not_expire_while_no_heartbeat_can_be_handled(log: Log) -> None:
    bench = await _loaded(log)
    parked = bench.begin(bench.park(deadline_ms=bench.now_ms + 20_000))
    write = bench.begin(bench.put(a="1"))
    await asyncio.sleep(60)
    bench.now_ms += 60_000
    assert done((parked, write)) == [True, True]
    assert bench.shard.parked, "time was up, and it was not looked at"
    bench.disk.commit()
    assert bench.shard.moved_ms == 60_000
    bench.runtime.close()


@in_virtual_time
async def test_slow_commits_are_no_stall_while_they_come(log: Log) -> None:
    bench = await _loaded(log)
    for number in range(10):
        write = bench.begin(bench.put(a=str(number)))
        await asyncio.sleep(4)
        bench.disk.commit()
        assert await write == min(number, 1)
    bench.runtime.close()


async def test_a_waiter_that_is_cancelled_after_the_shard_closed_leaves_no_complaint(bench: Bench) -> None:
    """As at SIGTERM: coordinators close, and then the tasks that wait for them are cancelled."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def wait() -> None:
        active = await bench.runtime.active(0)
        await asyncio.wait((active.submit(lambda shard, token: shard.park(token)),))

    waiting = bench.begin(wait())
    await settle()
    bench.runtime.close()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    bench.shard.parked.clear()
    del waiting
    await settle()  # the loop lets go of what it has called
    gc.collect()
    assert complaints == []
