"""Share state through its handlers: requests from other nodes, restarts, deletions and pruning."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.unit.broker.coordinators.share.dead_letter_harness import (
    GROUP,
    TOPIC,
    all_dead_letters_written,
    prepare,
    started,
    write,
)
from tests.unit.broker.coordinators.share.share_client import set_group
from tests.unit.broker.raw_client import create_topic, delete_topic, until
from tests.unit.broker.three_nodes import PATIENT, Trio
from tests.waiting import eventually_async

from penstock.broker.coordinators.share import persister as persister_module
from penstock.broker.coordinators.share.coordinator import coordinator_key
from penstock.broker.coordinators.share.state_messages import (
    STATE_APIS,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from penstock.broker.network.apis import APIS
from penstock.broker.network.requests import RequestContext
from penstock.broker.node import Node
from penstock.groups.share.state.share_state import (
    DeleteState,
    DeliveryTotals,
    InitializeState,
    ReadState,
    ReadStateSummary,
    RecordDelay,
    SharePartitionKey,
    ShareState,
    ShareStateReply,
    ShareStateRequest,
    ShareStateSummary,
    StateBatch,
    WriteState,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share_failures import WorkerError, WorkerFailure

OTHER_TOPIC = UUID(int=99)


async def ask(node: Node, *requests: ShareStateRequest) -> list[ShareStateReply]:
    """As another broker would: in messages of the newest version."""
    form = STATE_APIS[type(requests[0])]
    request = encode_request(form, requests)
    assert decode_request(form, request) == list(requests)
    context = RequestContext(
        node.services, form.api_key, APIS[form.api_key].max_version, None, "", "PLAINTEXT"
    )
    return decode_response(form, await APIS[form.api_key].handler(context, request))


def test_what_kafka_has_no_fields_for_travels_as_batches() -> None:
    key = SharePartitionKey("g", OTHER_TOPIC, 0)
    totals, delays = DeliveryTotals(5, 4, 3), (RecordDelay(7, 2, 2**40), RecordDelay(9, 1, 0))
    write = WriteState(key, 1, 2, 3, 4, [(5, 6, 2, 1)], totals, delays)
    form = STATE_APIS[WriteState]
    assert decode_request(form, encode_request(form, [write])) == [write]
    told = ShareStateReply(state=ShareState(1, 3, (StateBatch(5, 6, 2, 1),), totals, delays))
    form = STATE_APIS[ReadState]
    assert decode_response(form, encode_response(form, [(key.topic_id, 0)], [told])) == [told]


async def test_the_five_requests(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 1)
    far, elsewhere = key._replace(partition=7), key._replace(topic_id=OTHER_TOPIC)
    done = ShareStateReply()
    assert await ask(node, InitializeState(key, 0, 0)) == [done]
    replies = await ask(node, *(InitializeState(where, 0, 0) for where in (key, far, elsewhere)))
    unknown = ErrorCode.unknown_topic_or_partition
    assert [reply.error for reply in replies] == [ErrorCode.none, unknown, unknown]
    # Impossible values are refused and change nothing.
    for request in (
        InitializeState(key._replace(group="ü" * 20_000), 0, 0),
        InitializeState(key._replace(partition=-1), 0, 0),
        InitializeState(key, 1, -5),
        WriteState(key, 0, 1, 0, 0, [(5, 4, 2, 1)]),
        WriteState(key, 0, 1, 0, 0, [(5, 5, 7, 1)]),
        WriteState(key, 0, 1, 0, 0, [(-5, 5, 2, 1)]),
        WriteState(key, 0, 1, 0, 0, [(5, 5, 2, -1)]),
        # Epochs from the future would fence every real leader.
        InitializeState(key, 2**31 - 1, 0),
        WriteState(key, 0, 2**31 - 1, 0, 0, []),
        ReadState(key, 2**31 - 1),
    ):
        assert (await ask(node, request))[0].error is ErrorCode.invalid_request
    # Twice in one request: the second is decided on when the first is stored.
    first, second = WriteState(key, 0, 1, 0, 2, [(0, 1, 2, 1)]), WriteState(key, 0, 0, 0, 2, [(2, 2, 2, 1)])
    assert [reply.error for reply in await ask(node, first, second)] == [
        ErrorCode.none,
        ErrorCode.fenced_leader_epoch,
    ]
    (reply,) = await ask(node, ReadState(key, 1))
    assert reply.state == ShareState(0, 0, ((0, 1, 2, 1),))  # type: ignore[arg-type]
    assert (await ask(node, ReadStateSummary(key, -1)))[0].summary == ShareStateSummary(0, 1, 0, 2)
    assert await ask(node, DeleteState(key, 0)) == [done]
    assert await ask(node, DeleteState(key)) == [done]
    (reply,) = await ask(node, ReadState(key, 1))
    assert reply.error is ErrorCode.invalid_request
    await node.stop()


async def test_what_an_at_most_once_group_was_handed_is_not_forgotten(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 1)
    await set_group(node, GROUP, penstock_share_delivery="at-most-once")
    (reply,) = await ask(node, DeleteState(key))
    assert reply.error is ErrorCode.policy_violation
    assert (await ask(node, ReadState(key, 1)))[0].error is ErrorCode.none
    await node.stop()


def test_a_share_partition_is_found_as_kafka_finds_it() -> None:
    assert coordinator_key(SharePartitionKey("g", UUID(int=0), 3)) == "g:AAAAAAAAAAAAAAAAAAAAAA:3"


async def test_state_survives_a_kill_and_fences_as_before(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 1)
    persister = node.share_state().persister
    await persister.read(*key, 5)
    options: dict[str, Any] = {"state_epoch": 0, "start_offset": 3, "delivery_complete_count": 2}
    await persister.write(*key, leader_epoch=5, batches=[(4, 5, 2, 1)], **options)
    before = await persister.read(*key, 5)
    await node.stop(clean=False)
    again = await started(tmp_path)
    persister = again.share_state().persister
    with pytest.raises(ApiError) as raised:
        await persister.write(*key, leader_epoch=4, batches=[(6, 6, 2, 1)], **options)
    assert raised.value.code is ErrorCode.fenced_leader_epoch
    assert await persister.read(*key, 5) == before == ShareState(0, 3, ((4, 5, 2, 1),))
    assert (await persister.summary(*key)).delivery_complete_count == 2
    await again.stop()


async def test_state_goes_with_its_topic(tmp_path: Path) -> None:
    node = await started(tmp_path)
    await prepare(node, 1)
    await create_topic(node, "kept")
    kept = SharePartitionKey(GROUP, node.image.topics["kept"].id, 0)
    await node.share_state().persister.initialize(*kept, state_epoch=0, start_offset=0)
    await delete_topic(node, TOPIC)

    async def only_the_other_is_left() -> bool:
        return await keys_of(node) == [kept]

    await eventually_async(only_the_other_is_left)
    await node.stop()


async def keys_of(node: Node) -> list[SharePartitionKey]:
    return [key for keys in await node.share_state().read_all(lambda shard: shard.keys()) for key in keys]


async def test_a_pruned_log_says_all_that_it_said(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 40)
    await write(node, key, (0, 3, 33, 1))
    await all_dead_letters_written(node)
    for offset in range(4, 30):
        await write(node, key, (offset, offset, 2 if offset % 3 else 0, 1), start_offset=offset - 3)
    pruning, partition = node.share_state()._pruning, node.partitions.find("__share_group_state", 0)
    end = partition.log.end_offset
    assert not await pruning.prune(0), "that little is left alone"
    assert await pruning.prune(0, records_min=10)
    assert partition.log.start_offset == end
    assert not await pruning.prune(0, records_min=1), "it has just been done"
    before = await node.share_state().read_all(lambda shard: shard.stored())
    await node.stop()
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    assert await again.share_state().read_all(lambda shard: shard.stored()) == before
    assert again.partitions.find("__share_group_state", 0).log.start_offset == end
    await write(again, key, (30, 30, 33, 1))
    await all_dead_letters_written(again)
    assert await again.share_state().read_all(lambda shard: shard.counts()) == [(0, 5, 0)]
    await again.stop()


async def test_any_node_reaches_the_coordinator_and_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = Trio(tmp_path, PATIENT)
    await trio.start()
    await trio.create_topic(TOPIC, partitions=4)
    topic_id = trio.any.image.topics[TOPIC].id
    keys = [SharePartitionKey(GROUP, topic_id, index) for index in range(4)]
    sent: list[int] = []
    asked = persister_module.Persister._request_remote

    async def noted(self: Any, leader: int, requests: list[ShareStateRequest]) -> Any:
        sent.append(len(requests))
        return await asked(self, leader, requests)

    monkeypatch.setattr(persister_module.Persister, "_request_remote", noted)
    await _initialize(trio.any, keys)
    for round_, node in enumerate(list(trio.nodes.values())):
        sent.clear()
        await _write(node, keys, offset=round_)
        assert len(sent) <= 2, "one request for each of the two coordinators"
        failures = [
            WorkerFailure(100 + round_, 1, error=WorkerError("KeyError", f"said by node {round_}", ""))
        ]
        await asyncio.gather(*(node.share_state().persister.store_errors(*key, failures) for key in keys))
    victim = trio.leader("__share_group_state", 0)
    assert victim is not None
    monkeypatch.setattr(
        persister_module, "RETRY_TIMEOUT_S", 60.0
    )  # an election may take long on a busy machine
    await trio.kill(victim.node_id)
    await asyncio.gather(*(_write(node, keys, offset=5) for node in trio.nodes.values()))
    for node in trio.nodes.values():
        for key in keys:
            state = await node.share_state().persister.read(*key, 1)
            assert state.batches == ((0, 2, 2, 1), (5, 5, 2, 1))
    # What every node has said is known to who coordinates now.
    known: list[list[int]] = []
    for node in trio.nodes.values():
        told = await node.share_state().read_all(
            lambda shard: [list(b.errors) for b in shard._dead_letters.values()]
        )
        known += [offsets for shard in told for offsets in shard]
    assert known == [[100, 101, 102]] * 4
    await trio.stop()


async def _initialize(node: Node, keys: list[SharePartitionKey]) -> None:
    persister = node.share_state().persister
    await asyncio.gather(*(persister.initialize(*key, state_epoch=0, start_offset=0) for key in keys))


async def _write(node: Node, keys: list[SharePartitionKey], offset: int) -> None:
    options: dict[str, Any] = {"state_epoch": 0, "leader_epoch": 1, "start_offset": -1}
    options["delivery_complete_count"] = 0
    persister = node.share_state().persister
    await asyncio.gather(
        *(persister.write(*key, batches=[(offset, offset, 2, 1)], **options) for key in keys)
    )


@pytest.mark.parametrize("there", [False, True])
async def test_waiting_requests_are_answered_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 1)
    coordinator = node.share_state()
    failures = [RuntimeError("unforeseen")]

    async def fail(*_: object, **__: object) -> Any:
        raise failures.pop()

    with monkeypatch.context() as patch:
        if there:
            patch.setattr(coordinator, "leader_of_shard", lambda _: 77 if failures else node.node_id)
            patch.setattr(node.peers(), "call", fail)
        else:
            real = coordinator.handle
            patch.setattr(coordinator, "handle", lambda requests: fail() if failures else real(requests))
        await asyncio.wait_for(
            coordinator.persister.initialize(key.group, key.topic_id, 0, state_epoch=1, start_offset=3), 60
        )
    assert not failures, "it was asked again"
    state = await coordinator.persister.read(key.group, key.topic_id, 0, 1)
    assert state.start_offset == 3
    await node.stop()
