"""Transactions on a running node, request by request, in the older protocol and the newer one (KIP-890)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.coordinators.transactions.transaction_stage import Stage
from tests.unit.broker.coordinators.transactions.transactional_client import (
    ADD_OFFSETS,
    ADD_PARTITIONS,
    BOTH,
    LIST_TRANSACTIONS,
    NEW,
    NOW_MS,
    OLD,
    PRODUCE,
    TransactionalClient,
    Versions,
    seen,
)
from tests.unit.broker.raw_client import create_topic, until
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.coordinators.transactions.markers import MarkerSender
from penstock.broker.coordinators.transactions.verification import TransactionalWriter
from penstock.broker.partition.partition import Partition
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

NONE = ErrorCode.none


@BOTH
async def test_a_committed_transaction_shows_all_at_once(stage: Stage, versions: Versions) -> None:
    producer = await stage.producer(versions)
    await stage.begin(producer, 0, 1)
    assert await producer.send("a", "b") is NONE
    assert await producer.send("c", partition=1) is NONE
    assert await producer.send("d") is NONE
    assert (await producer.state()).transaction_state == "Ongoing"
    assert (await stage.committed(0), await stage.committed(1)) == ([], [])
    assert await stage.everything() == ["a", "b", "d"]
    assert await producer.end(commit=True) is NONE
    assert await stage.settled(producer) == "CompleteCommit"
    assert (await stage.committed(0), await stage.committed(1)) == (["a", "b", "d"], ["c"])


@BOTH
async def test_an_aborted_transaction_is_skipped_and_the_next_one_is_not(
    stage: Stage, versions: Versions
) -> None:
    producer = await stage.producer(versions)
    for value, commit in (("a", False), ("b", True), ("c", False), ("d", True)):
        await stage.begin(producer, 0)
        assert await producer.send(value) is NONE
        assert await producer.end(commit) is NONE
        await stage.settled(producer)
    assert await stage.committed() == ["b", "d"]
    assert await stage.everything() == ["a", "b", "c", "d"]


async def test_each_transaction_of_the_newer_protocol_has_an_epoch_of_its_own(stage: Stage) -> None:
    producer = await stage.producer(NEW)
    epochs = []
    for value in "abc":
        assert await producer.send(value) is NONE
        epochs.append(producer.epoch)
        assert await producer.end(commit=True) is NONE
    assert epochs == sorted(set(epochs))
    assert await stage.settled(producer) == "CompleteCommit"
    assert await stage.committed() == ["a", "b", "c"]


@BOTH
async def test_a_second_producer_fences_the_first_and_aborts_what_it_left_open(
    stage: Stage, versions: Versions
) -> None:
    zombie = await stage.producer(versions)
    await stage.begin(zombie, 0)
    assert await zombie.send("lost") is NONE
    heir = await stage.producer(versions)
    assert (heir.producer_id, heir.epoch > zombie.epoch) == (zombie.producer_id, True)
    assert await zombie.send("late") is ErrorCode.invalid_producer_epoch
    assert await zombie.end(commit=True) is ErrorCode.producer_fenced
    await stage.begin(heir, 0)
    assert await heir.send("kept") is NONE
    assert await heir.end(commit=True) is NONE
    await stage.settled(heir)
    assert await stage.committed() == ["kept"]
    assert await stage.everything() == ["lost", "kept"]


async def test_old_clients_are_told_of_fencing_in_the_words_they_know(stage: Stage) -> None:
    zombie = await stage.producer(OLD)
    await stage.producer(OLD)
    assert await zombie.add(0, version=3) == [ErrorCode.producer_fenced]
    assert await zombie.add(0, version=1) == [ErrorCode.invalid_producer_epoch]
    zombie.versions = OLD._replace(end=1)
    assert await zombie.end(commit=True) is ErrorCode.invalid_producer_epoch
    for version, error in ((3, ErrorCode.invalid_producer_epoch), (4, ErrorCode.producer_fenced)):
        reply = await zombie.try_init(version, producer_id=zombie.producer_id, producer_epoch=zombie.epoch)
        assert reply.error_code is error


@BOTH
async def test_a_transaction_that_takes_too_long_is_aborted(stage: Stage, versions: Versions) -> None:
    producer = await stage.producer(versions, transaction_timeout=timedelta(milliseconds=50))
    await stage.begin(producer, 0)
    assert await producer.send("slow") is NONE

    async def is_aborted() -> bool:
        return await producer.state_name() == "CompleteAbort"

    await eventually_async(is_aborted)
    assert await stage.committed() == []
    assert (await seen(await stage.client())).last_stable_offset == 2
    assert await producer.end(commit=True) in (ErrorCode.producer_fenced, ErrorCode.invalid_txn_state)


# The delayed produce


async def test_a_batch_of_no_transaction_is_refused(stage: Stage) -> None:
    producer = await stage.producer(OLD)
    assert await producer.send("never added") is ErrorCode.transaction_abortable
    producer.versions = OLD._replace(produce=9)
    assert await producer.send("never added") is ErrorCode.invalid_txn_state
    assert await stage.everything() == []


@BOTH
async def test_a_delayed_batch_begins_no_hanging_transaction(stage: Stage, versions: Versions) -> None:
    producer = await stage.producer(versions)
    await stage.begin(producer, 0)
    assert await producer.send("a") is NONE
    delayed = producer.batch("delayed")
    assert await producer.end(commit=True) is NONE
    await stage.settled(producer)
    refused = await producer.send_batch(delayed)
    assert refused in (ErrorCode.transaction_abortable, ErrorCode.invalid_producer_epoch)
    assert await stage.everything() == ["a"]
    assert (await seen(await stage.client())).last_stable_offset == 2, "nothing hangs"


async def test_a_batch_that_is_verified_while_its_transaction_ends_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's word is out of date by the time it arrives: a marker has come in between."""
    producer = await stage.producer(OLD)
    await stage.begin(producer, 0, 1)
    told, ended = asyncio.Event(), asyncio.Event()
    verification = stage.node.transactions().verification
    ask = verification.ask

    async def ask_slowly(*args: Any) -> Any:
        word = await ask(*args)
        told.set()
        await ended.wait()
        return word

    monkeypatch.setattr(verification, "ask", ask_slowly)
    sending = asyncio.create_task(producer.send("late"))
    await told.wait()
    other = TransactionalClient(await stage.client(), "tx", OLD)
    other.producer_id, other.epoch = producer.producer_id, producer.epoch
    assert await other.end(commit=True) is NONE
    await stage.settled(other)
    ended.set()
    assert await sending is ErrorCode.invalid_txn_state
    assert await stage.everything() == []


@BOTH
async def test_all_partitions_of_a_request_are_verified_by_one_question(
    stage: Stage, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await stage.producer(versions)
    await stage.begin(producer, 0, 1)
    verification = stage.node.transactions().verification
    ask, asked = verification.ask, []

    async def ask_loudly(question: Any, partitions: Any) -> Any:
        asked.append([place.partition for place in partitions])
        return await ask(question, partitions)

    monkeypatch.setattr(verification, "ask", ask_loudly)
    for values in (("a", "b"), ("c", "d")):
        batches = {index: producer.batch(value, partition=index) for index, value in enumerate(values)}
        assert await producer.send_batches(batches) == [NONE] * 2
    assert asked == [[0, 1]], "later batches of the transaction send no request"
    assert await producer.end(commit=True) is NONE
    await stage.settled(producer)
    assert (await stage.committed(0), await stage.committed(1)) == (["a", "c"], ["b", "d"])


async def test_a_partition_that_is_not_in_the_transaction_does_not_keep_others_of_the_request(
    stage: Stage,
) -> None:
    producer = await stage.producer(OLD)
    await stage.begin(producer, 1)
    batches = {index: producer.batch(str(index), partition=index) for index in (0, 1)}
    assert await producer.send_batches(batches) == [ErrorCode.transaction_abortable, NONE]
    assert (await stage.everything(0), await stage.everything(1)) == ([], ["1"])


async def test_a_transaction_may_begin_before_the_marker_of_the_last_one_is_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker comes while the next transaction's first batch is verified, and is not taken for its own end."""
    producer = await stage.producer(NEW)
    asked, markers_may_go = asyncio.Event(), asyncio.Event()
    write, ask = MarkerSender._write, stage.node.transactions().verification.ask

    async def write_later(*args: Any) -> Any:
        await markers_may_go.wait()
        return await write(*args)

    async def ask_loudly(*args: Any) -> Any:
        asked.set()
        return await ask(*args)

    assert await producer.send("first") is NONE
    monkeypatch.setattr(MarkerSender, "_write", write_later)
    assert await producer.end(commit=True) is NONE
    monkeypatch.setattr(stage.node.transactions().verification, "ask", ask_loudly)
    sending = asyncio.create_task(producer.send("second"))
    await asked.wait()
    markers_may_go.set()
    assert await sending is NONE
    assert await producer.end(commit=True) is NONE
    await stage.settled(producer)
    assert await stage.committed() == ["first", "second"]


async def test_batches_of_a_producer_stay_in_order_and_others_do_not_wait(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question to the coordinator takes longer than those behind it."""
    producer = await stage.producer(OLD)
    await stage.begin(producer, 0)
    transactions, partition = stage.node.transactions(), stage.node.partitions.led("t", 0)
    assert partition is not None
    writer = TransactionalWriter("tx", producer.producer_id, producer.epoch, OLD.produce)
    ask, queue_append, append = (
        transactions.verification.ask,
        transactions.admission.queue_append,
        Partition.append,
    )
    asked, go, lined_up, overtakes = asyncio.Event(), asyncio.Event(), [], []

    async def ask_first_slowly(*args: Any) -> Any:
        if not asked.is_set():
            asked.set()
            await go.wait()
        return await ask(*args)

    def count(*args: Any) -> Any:
        lined_up.append(args)
        return queue_append(*args)

    def append_and_look(*args: Any) -> Any:
        appended = append(*args)
        overtakes.append(not transactions.admission.must_wait(partition, writer))
        return appended

    monkeypatch.setattr(transactions.verification, "ask", ask_first_slowly)
    monkeypatch.setattr(transactions.admission, "queue_append", count)
    lines = [TransactionalClient(await stage.client(), "tx", OLD) for _ in range(3)]
    sending = []
    for number, line in enumerate(lines):
        sending.append(asyncio.create_task(line.send_batch(producer.batch(str(number)))))
        await until(lambda number=number: len(lined_up) > number)  # type: ignore[misc]
    assert await publish(await stage.client(), "plain") is NONE
    monkeypatch.setattr(Partition, "append", append_and_look)
    go.set()
    assert await asyncio.gather(*sending) == [NONE] * 3
    assert await stage.everything() == ["plain", "0", "1", "2"]
    assert overtakes == [False] * 3, "one that came now would have overtaken those that wait"


async def test_what_follows_a_batch_that_came_too_soon_after_the_last_end_does_not_take_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch has to be sent again; the partition knows nothing of the producer, and would take any other."""
    producer = await stage.producer(NEW)
    verification = stage.node.transactions().verification
    ask, outcomes = verification.ask, [ErrorCode.concurrent_transactions]

    async def ask_too_soon(question: Any, partitions: Any) -> Any:
        if outcomes:
            return dict.fromkeys(partitions, outcomes.pop())
        return await ask(question, partitions)

    monkeypatch.setattr(verification, "ask", ask_too_soon)
    first, second = producer.batch("0"), producer.batch("1")
    assert await producer.send_batch(first) is ErrorCode.concurrent_transactions
    assert await producer.send_batch(second) is ErrorCode.concurrent_transactions
    assert [await producer.send_batch(batch) for batch in (first, second)] == [NONE] * 2
    assert await stage.everything() == ["0", "1"]


async def publish(client: WireClient, value: str, **producer: Any) -> ErrorCode:
    batch = encode_batch([Record(0, NOW_MS, None, value.encode())], **producer)
    part = SimpleNamespace(index=0, records=bytes(batch))
    request = SimpleNamespace(
        transactional_id=None,
        acks=1,
        timeout=timedelta(seconds=30),
        topic_data=(SimpleNamespace(name="t", partition_data=(part,)),),
    )
    reply = await client.ask(request, api_key=PRODUCE, version=9)
    error: ErrorCode = reply.responses[0].partition_responses[0].error_code
    return error


async def test_pipelined_batches_of_a_compacted_topic_are_verified_too(stage: Stage) -> None:
    await create_topic(stage.node, "c", cleanup_policy="compact", compression_type="gzip")
    producer = await stage.producer(NEW)
    keyed = [
        bytes(
            encode_batch(
                [Record(0, NOW_MS, b"k", str(sequence).encode())],
                attributes=0x10,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=sequence,
            )
        )
        for sequence in range(4)
    ]
    lines = [TransactionalClient(await stage.client(), "tx", NEW) for _ in keyed]
    sending = []
    for line, batch in zip(lines, keyed, strict=True):
        sending.append(asyncio.create_task(line.send_batch(batch, "c")))
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*sending) == [NONE] * 4
    assert await producer.end(commit=True) is NONE
    await stage.settled(producer)
    assert await stage.committed(topic="c") == ["0", "1", "2", "3"]


async def test_plain_batches_of_a_producer_in_a_transaction_are_refused(stage: Stage) -> None:
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    refused = await publish(
        await stage.client(),
        "plain",
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=1,
    )
    assert refused is ErrorCode.invalid_txn_state


async def test_a_transactional_batch_needs_a_transactional_id(stage: Stage) -> None:
    refused = await publish(
        await stage.client(), "a", attributes=0x10, producer_id=7, producer_epoch=0, base_sequence=0
    )
    assert refused is ErrorCode.transactional_id_authorization_failed


# Late requests


async def test_a_late_end_never_ends_a_later_transaction(stage: Stage) -> None:
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    old_epoch = producer.epoch
    assert await producer.end(commit=True) is NONE
    assert await producer.send("b") is NONE
    late = TransactionalClient(await stage.client(), "tx", NEW)
    late.producer_id, late.epoch = producer.producer_id, old_epoch
    assert await late.end(commit=False) is not NONE
    assert (await producer.state()).transaction_state == "Ongoing"
    assert await producer.end(commit=True) is NONE
    await stage.settled(producer)
    assert await stage.committed() == ["a", "b"]


async def test_a_repeated_end_gets_the_same_answer(stage: Stage) -> None:
    producer = await stage.producer(NEW)
    assert await producer.send("a") is NONE
    before = producer.producer_id, producer.epoch
    assert await producer.end(commit=True) is NONE
    after = producer.producer_id, producer.epoch
    producer.producer_id, producer.epoch = before
    assert await producer.end(commit=True) is NONE
    assert (producer.producer_id, producer.epoch) == after


# Partitions


async def test_a_partition_that_is_not_there_keeps_the_others_out(stage: Stage) -> None:
    producer = await stage.producer(OLD)
    unknown, not_tried = ErrorCode.unknown_topic_or_partition, ErrorCode.operation_not_attempted
    assert await producer.add(0, 9) == [not_tried, unknown]
    assert await producer.state_name() == "Empty"
    internal = await producer.add(0, topic="__transaction_state")
    assert internal == [ErrorCode.topic_authorization_failed]


async def test_many_transactions_are_verified_and_added_with_one_request(stage: Stage) -> None:
    one, two = await stage.producer(OLD, "one"), await stage.producer(NEW, "two")
    assert await one.add(0) == [NONE]

    def asked(producer: TransactionalClient, *partitions: int, verify_only: bool) -> Any:
        return SimpleNamespace(
            transactional_id=producer.transactional_id,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            verify_only=verify_only,
            topics=(SimpleNamespace(name="t", partitions=partitions),),
        )

    transactions = (asked(one, 0, 1, verify_only=True), asked(two, 1, verify_only=False))
    reply = await one.ask(ADD_PARTITIONS, 5, transactions=transactions)
    told = {
        (result.transactional_id, part.partition_index): part.partition_error_code
        for result in reply.results_by_transaction
        for topic in result.topic_results
        for part in topic.results_by_partition
    }
    assert told == {("one", 0): NONE, ("one", 1): ErrorCode.transaction_abortable, ("two", 1): NONE}
    assert [topic.partitions for topic in (await two.state()).topics] == [(1,)]


async def test_offsets_join_a_transaction(stage: Stage) -> None:
    producer = await stage.producer(OLD)
    reply = await producer.ask(
        ADD_OFFSETS,
        4,
        transactional_id="tx",
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        group_id="g",
    )
    assert reply.error_code is NONE
    assert [topic.topic for topic in (await producer.state()).topics] == ["__consumer_offsets"]
    assert await producer.end(commit=False) is NONE
    assert await stage.settled(producer) == "CompleteAbort"


# Two phases (KIP-939)


async def test_a_prepared_transaction_outlives_its_producer_and_is_decided_by_the_next(stage: Stage) -> None:
    first = await stage.producer(NEW, version=6, enable2_pc=True)
    assert await first.send("prepared") is NONE
    reply = await first.try_init(6, enable2_pc=True, keep_prepared_txn=True)
    assert reply.error_code is NONE
    assert (reply.ongoing_txn_producer_id, reply.ongoing_txn_producer_epoch) == (
        first.producer_id,
        first.epoch,
    )
    heir = TransactionalClient(await stage.client(), "tx", NEW)
    heir.producer_id, heir.epoch = reply.producer_id, reply.producer_epoch
    assert await heir.end(commit=True) is NONE
    assert await stage.settled(heir) == "CompleteCommit"
    assert await stage.committed() == ["prepared"]
    assert await heir.send("next") is NONE
    assert await heir.end(commit=True) is NONE
    await stage.settled(heir)
    assert await stage.committed() == ["prepared", "next"]


async def test_without_keeping_it_the_next_producer_aborts(stage: Stage) -> None:
    first = await stage.producer(NEW, version=6, enable2_pc=True)
    assert await first.send("dropped") is NONE
    heir = await stage.producer(NEW, version=6, enable2_pc=True)
    assert await stage.settled(heir) in ("CompleteAbort", "Empty")
    assert await stage.committed() == []


# Administration


async def test_transactions_are_listed_by_state_producer_age_and_name(stage: Stage) -> None:
    one, two = await stage.producer(NEW, "one"), await stage.producer(NEW, "two")
    assert await one.send("a") is NONE

    async def listed(version: int = 2, **filters: Any) -> tuple[list[tuple[str, str]], Any]:
        fields = {
            "state_filters": (),
            "producer_id_filters": (),
            "duration_filter": -1,
            "transactional_id_pattern": None,
        }
        reply = await one.ask(LIST_TRANSACTIONS, version, **fields | filters)
        if reply.error_code is not NONE:
            return [], reply.error_code
        found = sorted((each.transactional_id, each.transaction_state) for each in reply.transaction_states)
        return found, reply.unknown_state_filters

    everything = [("one", "Ongoing"), ("two", "Empty")]
    assert await listed(0) == (everything, ())
    assert await listed(state_filters=("Ongoing", "Odd")) == ([("one", "Ongoing")], ("Odd",))
    assert await listed(producer_id_filters=(two.producer_id,)) == ([("two", "Empty")], ())
    assert await listed(transactional_id_pattern="t.o|x") == ([("two", "Empty")], ())
    assert await listed(transactional_id_pattern="") == (everything, ())
    assert await listed(transactional_id_pattern="(") == ([], ErrorCode.invalid_regular_expression)
    # As in Apache Kafka, an id without a transaction is older than anything.
    assert await listed(duration_filter=3_600_000) == ([("two", "Empty")], ())


async def test_an_unused_transactional_id_is_not_described(stage: Stage) -> None:
    producer = TransactionalClient(await stage.client(), "nobody", NEW)
    assert (await producer.state()).error_code is ErrorCode.not_coordinator
    assert await producer.find() is NONE
    assert (await producer.state()).error_code is ErrorCode.transactional_id_not_found
