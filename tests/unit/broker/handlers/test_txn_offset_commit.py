"""TxnOffsetCommit on a running node, in all versions of both transaction protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.coordinators.transactions.transactional_client import (
    ADD_OFFSETS,
    NEW,
    OLD,
    TransactionalClient,
    Versions,
)
from tests.unit.broker.raw_client import create_topic, new_node
from tests.unit.broker.wire_client import WireClient
from tests.waiting import eventually_async

from penstock.broker.handlers import txn_offset_commit
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, TXN_OFFSET_COMMIT = 8, 9, 10, 28
NONE, UNSTABLE = ErrorCode.none, ErrorCode.unstable_offset_commit
#: The first version of TxnOffsetCommit of the newer protocol.
ADDS = 5
SETTINGS = {
    "penstock_flush": "never",
    "offsets_topic_num_partitions": "2",
    "transaction_state_log_num_partitions": "2",
}


class Stage:
    """A node with a topic of two partitions, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.node: Node
        self._clients: list[WireClient] = []

    async def start(self) -> None:
        self.node = new_node(self._folder, **SETTINGS)
        await self.node.start()

    async def stop(self) -> None:
        while self._clients:
            await self._clients.pop().close()
        await self.node.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def client(self) -> WireClient:
        self._clients.append(await WireClient.connect(self.node))
        return self._clients[-1]

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        client = self._clients[0] if self._clients else await self.client()
        return await client.ask(SimpleNamespace(**fields), api_key=api_key, version=version)

    async def find(self, group: str = "g") -> None:
        found = await self.ask(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=(group,), key=None)
        assert found.coordinators[0].error_code is NONE

    async def producer(self, version: int, name: str = "tx") -> Committer:
        producer = Committer(self, await self.client(), name, version)
        await producer.init()
        return producer

    async def commit_plainly(self, offset: int, group: str = "g") -> None:
        partition = SimpleNamespace(
            partition_index=0, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=""
        )
        reply = await self.ask(
            OFFSET_COMMIT,
            8,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=(SimpleNamespace(name="t", partitions=(partition,)),),
        )
        assert reply.topics[0].partitions[0].error_code is NONE

    async def fetch(
        self, *, stable: bool = False, version: int = 7, group: str = "g", index: int = 0
    ) -> tuple[int, ErrorCode]:
        topic_id = self.node.image.topics["t"].id
        topics = (SimpleNamespace(name="t", topic_id=topic_id, partition_indexes=(index,)),)
        asked = SimpleNamespace(group_id=group, member_id=None, member_epoch=-1, topics=topics)
        reply = await self.ask(
            OFFSET_FETCH, version, group_id=group, topics=topics, groups=(asked,), require_stable=stable
        )
        found = reply if version < 8 else reply.groups[0]
        assert found.error_code is NONE
        (partition,) = found.topics[0].partitions
        return partition.committed_offset, partition.error_code

    async def becomes(self, offset: int) -> None:
        """Markers are written after EndTxn was answered."""

        async def is_so() -> bool:
            return await self.fetch(stable=True) == (offset, NONE)

        await eventually_async(is_so)


class Committer(TransactionalClient):
    def __init__(self, stage: Stage, client: WireClient, name: str, version: int) -> None:
        versions: Versions = NEW if version >= ADDS else OLD
        super().__init__(client, name, versions)
        self.stage = stage
        self.version = version

    async def begin(self, group: str = "g") -> ErrorCode:
        """What the newer protocol has the group's coordinator do."""
        if self.version >= ADDS:
            return NONE
        reply = await self.ask(
            ADD_OFFSETS,
            3,
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            group_id=group,
        )
        return ErrorCode(reply.error_code)

    async def stage_offset(
        self, offset: int, *, topic: str = "t", index: int = 0, **fields: Any
    ) -> ErrorCode:
        partition = SimpleNamespace(
            partition_index=index, committed_offset=offset, committed_leader_epoch=-1, committed_metadata="m"
        )
        defaults = {
            "transactional_id": self.transactional_id,
            "group_id": "g",
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "generation_id": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": (SimpleNamespace(name=topic, partitions=(partition,)),),
        }
        reply = await self.ask(TXN_OFFSET_COMMIT, self.version, **defaults | fields)
        (found,) = reply.topics
        assert (found.name, found.partitions[0].partition_index) == (topic, index)
        return ErrorCode(found.partitions[0].error_code)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path / "data")
    await stage.start()
    await create_topic(stage.node, "t", partitions=2)
    await stage.find()
    yield stage
    await stage.stop()


@pytest.mark.parametrize("version", range(6))
async def test_offsets_count_once_their_transaction_is_committed(stage: Stage, version: int) -> None:
    producer = await stage.producer(version)
    assert await producer.begin() is NONE
    assert await producer.stage_offset(5) is NONE
    assert await stage.fetch() == (-1, NONE)
    assert await producer.end(commit=True) is NONE
    await stage.becomes(5)
    assert await producer.begin() is NONE
    assert await producer.stage_offset(6) is NONE
    assert await producer.end(commit=False) is NONE
    await stage.becomes(5)


@pytest.mark.parametrize("version", [3, 5])
async def test_offsets_of_several_operations_take_effect_together(
    stage: Stage, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(txn_offset_commit, "_COMMITTED_AT_ONCE", 1)
    producer = await stage.producer(version)
    assert await producer.begin() is NONE
    partitions = tuple(
        SimpleNamespace(
            partition_index=index, committed_offset=5, committed_leader_epoch=-1, committed_metadata=""
        )
        for index in (0, 1, 2)
    )
    reply = await producer.ask(
        TXN_OFFSET_COMMIT,
        version,
        transactional_id=producer.transactional_id,
        group_id="g",
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=(SimpleNamespace(name="t", partitions=partitions),),
    )
    errors = [each.error_code for each in reply.topics[0].partitions]
    assert errors == [NONE, NONE, ErrorCode.unknown_topic_or_partition]
    assert await stage.fetch() == (-1, NONE)
    assert await stage.fetch(index=1) == (-1, NONE)
    assert await producer.end(commit=True) is NONE
    await stage.becomes(5)
    assert await stage.fetch(stable=True, index=1) == (5, NONE)


@pytest.mark.parametrize("version", [7, 8, 9, 10])
async def test_who_wants_stable_offsets_is_told_to_wait(stage: Stage, version: int) -> None:
    await stage.commit_plainly(3)
    producer = await stage.producer(ADDS)
    await producer.stage_offset(5)
    assert await stage.fetch(version=version) == (3, NONE)
    assert await stage.fetch(version=version, stable=True) == (-1, UNSTABLE)
    await producer.end(commit=False)
    await stage.becomes(3)


@pytest.mark.parametrize("version", [3, 5])
async def test_a_later_plain_commit_wins(stage: Stage, version: int) -> None:
    producer = await stage.producer(version)
    await producer.begin()
    await producer.stage_offset(5)
    await stage.commit_plainly(4)
    await producer.end(commit=True)
    await stage.becomes(4)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_transaction_is_still_open_after_a_restart(stage: Stage, commit: bool) -> None:
    await stage.commit_plainly(1)
    producer = await stage.producer(ADDS)
    await producer.stage_offset(5)
    await stage.restart()
    assert await stage.fetch(stable=True) == (-1, UNSTABLE)
    producer.client = await stage.client()
    assert await producer.end(commit) is NONE
    await stage.becomes(5 if commit else 1)
    await stage.restart()
    assert await stage.fetch(stable=True) == (5 if commit else 1, NONE)


@pytest.mark.parametrize(
    ("version", "error"), [(3, ErrorCode.invalid_txn_state), (4, ErrorCode.transaction_abortable)]
)
async def test_what_is_not_in_the_transaction_is_refused(
    stage: Stage, version: int, error: ErrorCode
) -> None:
    """A request that is too late would begin a hanging transaction."""
    producer = await stage.producer(version)
    assert await producer.stage_offset(5) is error
    await producer.begin()
    await producer.stage_offset(5)
    await producer.end(commit=True)
    await stage.becomes(5)
    assert await producer.stage_offset(6) is error
    assert await stage.fetch(stable=True) == (5, NONE)


@pytest.mark.parametrize("version", [3, 5])
async def test_a_fenced_producer_stages_nothing(stage: Stage, version: int) -> None:
    old = await stage.producer(version)
    await old.begin()
    await old.stage_offset(5)
    new = await stage.producer(version)
    await stage.becomes(-1)
    assert await old.stage_offset(6) is ErrorCode.invalid_producer_epoch
    await new.begin()
    assert await new.stage_offset(7) is NONE
    await new.end(commit=True)
    await stage.becomes(7)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"topic": "no-such"}, ErrorCode.unknown_topic_or_partition),
        ({"index": 2}, ErrorCode.unknown_topic_or_partition),
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"transactional_id": ""}, ErrorCode.invalid_request),
        ({"generation_id": 1, "member_id": "x"}, ErrorCode.illegal_generation),
        ({"producer_id": 4711}, ErrorCode.invalid_producer_id_mapping),
    ],
)
async def test_refusals(stage: Stage, fields: dict[str, Any], error: ErrorCode) -> None:
    producer = await stage.producer(ADDS)
    assert await producer.stage_offset(5, **fields) is error
    assert await stage.fetch(stable=True) == (-1, NONE)


async def test_another_node_is_named_by_who_does_not_lead_the_group(stage: Stage) -> None:
    producer = await stage.producer(ADDS)
    partitions = stage.node.partitions
    led, partitions.led = partitions.led, lambda *_: None  # type: ignore[method-assign]
    try:
        assert await producer.stage_offset(5) is ErrorCode.not_coordinator
    finally:
        partitions.led = led  # type: ignore[method-assign]
