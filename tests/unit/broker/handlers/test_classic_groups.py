"""Classic groups and offset commits on a running node, in all versions of the requests."""

from __future__ import annotations

import asyncio
import io
import struct
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.create_topics.v7 import request as create
from kio.serial import entity_writer
from tests.unit.broker.raw_client import new_node
from tests.unit.broker.wire_client import WireClient
from tests.unit.groups.classic.script import subscription
from tests.waiting import eventually_async

from penstock.broker.handlers import offset_delete
from penstock.broker.network.apis import APIS
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP = 8, 9, 10, 11, 12, 13
SYNC_GROUP, DESCRIBE_GROUPS, LIST_GROUPS, DELETE_GROUPS, OFFSET_DELETE = 14, 15, 16, 42, 47
SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SECOND://127.0.0.1:0",
    "advertised.listeners": "PLAINTEXT://first.example:1111,SECOND://second.example:2222",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "penstock.flush": "never",
    "transaction.state.log.num.partitions": "3",
}


def versions(api_key: int, first: int | None = None) -> list[int]:
    api = APIS[api_key]
    return list(range(api.min_version if first is None else first, api.max_version + 1))


class Running:
    """A node, and requests that have the fields of all versions at once."""

    def __init__(self, node: Node, client: WireClient) -> None:
        self.node = node
        self.client = client

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        return await self.client.ask(SimpleNamespace(**fields), api_key=api_key, version=version)

    async def create(self, name: str, partitions: int) -> uuid.UUID:
        topic = create.CreatableTopic(
            name=name, num_partitions=partitions, replication_factor=1, assignments=(), configs=()
        )
        request = create.CreateTopicsRequest(
            topics=(topic,), timeout=timedelta(seconds=30), validate_only=False
        )
        response = await self.client.ask(request)
        found: uuid.UUID = response.topics[0].topic_id
        return found

    async def find(self, version: int = 4, key: str = "g", key_type: int = 0) -> Any:
        return await self.ask(FIND_COORDINATOR, version, key=key, key_type=key_type, coordinator_keys=(key,))

    async def join(self, version: int, group: str = "g", **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "group_id": group,
            "session_timeout": timedelta(seconds=60),
            "rebalance_timeout": timedelta(seconds=60),
            "member_id": "",
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": (SimpleNamespace(name="range", metadata=subscription(("t",))),),
            "reason": None,
        }
        response = await self.ask(JOIN_GROUP, version, **defaults | fields)
        if response.error_code is ErrorCode.member_id_required:
            return await self.join(version, group, **fields | {"member_id": response.member_id})
        return response

    async def sync(self, version: int, joined: Any, group: str = "g", **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "group_id": group,
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": (SimpleNamespace(member_id=joined.member_id, assignment=b"all"),),
        }
        return await self.ask(SYNC_GROUP, version, **defaults | fields)

    async def stable_member(self, group: str = "g") -> Any:
        joined = await self.join(9, group)
        assert (await self.sync(5, joined, group)).error_code is ErrorCode.none
        return joined

    async def commit(self, version: int, *topics: Any, group: str = "g", **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "retention_time": timedelta(milliseconds=-1),
            "topics": topics,
        }
        return await self.ask(OFFSET_COMMIT, version, **defaults | fields)

    async def fetch(self, version: int, *topics: Any, group: str = "g", everything: bool = False) -> Any:
        wanted = None if everything else topics
        request_group = SimpleNamespace(group_id=group, member_id=None, member_epoch=-1, topics=wanted)
        response = await self.ask(
            OFFSET_FETCH, version, group_id=group, topics=wanted, groups=(request_group,), require_stable=True
        )
        return response if version < 8 else response.groups[0]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Running]:
    node = new_node(tmp_path, **SETTINGS)
    await node.start()
    client = await WireClient.connect(node)
    yield Running(node, client)
    await client.close()
    await node.stop()


def to_commit(topic_id: uuid.UUID | None, name: str, *offsets: int, metadata: str | None = "note") -> Any:
    partitions = tuple(
        SimpleNamespace(
            partition_index=index,
            committed_offset=offset,
            committed_leader_epoch=3,
            committed_metadata=metadata,
        )
        for index, offset in enumerate(offsets)
    )
    return SimpleNamespace(topic_id=topic_id, name=name, partitions=partitions)


def to_fetch(topic_id: uuid.UUID | None, name: str, *partitions: int) -> Any:
    return SimpleNamespace(topic_id=topic_id, name=name, partition_indexes=partitions)


def errors_of(response: Any) -> list[ErrorCode]:
    return [partition.error_code for topic in response.topics for partition in topic.partitions]


# FindCoordinator


async def test_the_topic_is_made_when_the_first_group_is_looked_for(node: Running) -> None:
    assert "__consumer_offsets" not in node.node.image.topics
    await node.find()
    assert len(node.node.image.topics["__consumer_offsets"].partitions) == 4
    partition = node.node.partitions.get("__consumer_offsets", 0)
    assert partition is not None
    assert partition.log.config.cleanup_compact
    assert partition.log.config.segment_bytes == 104_857_600


@pytest.mark.parametrize("version", versions(FIND_COORDINATOR))
async def test_the_coordinator_is_this_node_at_the_listener_that_was_asked(
    node: Running, version: int
) -> None:
    response = await node.find(version)
    found = response if version < 4 else response.coordinators[0]
    assert (found.error_code, found.node_id) == (ErrorCode.none, node.node.node_id)
    assert (found.host, found.port) == ("first.example", 1111)
    second = await WireClient.connect(node.node, 1)
    response = await Running(node.node, second).find(version)
    await second.close()
    found = response if version < 4 else response.coordinators[0]
    assert (found.host, found.port) == ("second.example", 2222)


async def test_each_key_has_its_own_answer(node: Running) -> None:
    response = await node.ask(FIND_COORDINATOR, 5, key_type=0, coordinator_keys=("a", "b"))
    assert [(each.key, each.error_code) for each in response.coordinators] == [
        ("a", ErrorCode.none),
        ("b", ErrorCode.none),
    ]


@pytest.mark.parametrize("version", versions(FIND_COORDINATOR, first=1))
async def test_transactions_have_a_coordinator_whose_topic_is_made_then(node: Running, version: int) -> None:
    assert "__transaction_state" not in node.node.image.topics
    response = await node.find(version, key_type=1, key="tx")
    found = response if version < 4 else response.coordinators[0]
    assert (found.error_code, found.node_id, found.host) == (ErrorCode.none, 1, "first.example")
    topic = node.node.image.topics["__transaction_state"]
    assert len(topic.partitions) == 3
    assert "__consumer_offsets" not in node.node.image.topics


async def test_there_are_no_coordinators_of_other_kinds(node: Running) -> None:
    for version, key_type in ((4, 3), (6, -1), (5, 2)):
        response = await node.find(version, key_type=key_type)
        assert response.coordinators[0].error_code is ErrorCode.invalid_request


# Membership


@pytest.mark.parametrize("version", versions(JOIN_GROUP))
async def test_joining_in_every_version(node: Running, version: int) -> None:
    first = await node.ask(
        JOIN_GROUP,
        version,
        group_id="g",
        session_timeout=timedelta(seconds=10),
        rebalance_timeout=timedelta(seconds=20),
        member_id="",
        group_instance_id=None,
        protocol_type="consumer",
        protocols=(SimpleNamespace(name="range", metadata=b"meta"),),
        reason="because",
    )
    asked_again = version >= 4
    assert first.error_code is (ErrorCode.member_id_required if asked_again else ErrorCode.none)
    assert first.member_id.startswith("test-")
    joined = await node.join(version, member_id=first.member_id) if asked_again else first
    assert (joined.error_code, joined.generation_id) == (ErrorCode.none, 1)
    assert joined.leader == joined.member_id == first.member_id
    assert [member.member_id for member in joined.members] == [first.member_id]
    assert joined.protocol_name == "range"


@pytest.mark.parametrize("version", versions(JOIN_GROUP))
async def test_a_refused_join_has_a_form_in_every_version(node: Running, version: int) -> None:
    response = await node.join(version, session_timeout=timedelta(milliseconds=1))
    assert response.error_code is ErrorCode.invalid_session_timeout
    assert response.generation_id == -1
    assert not response.protocol_name
    assert (await node.join(version, "")).error_code is ErrorCode.invalid_group_id


@pytest.mark.parametrize("version", versions(SYNC_GROUP))
async def test_syncing_in_every_version(node: Running, version: int) -> None:
    joined = await node.join(9)
    response = await node.sync(version, joined)
    assert (response.error_code, response.assignment) == (ErrorCode.none, b"all")
    late = await node.sync(version, SimpleNamespace(generation_id=7, member_id=joined.member_id))
    assert late.error_code is ErrorCode.illegal_generation


async def test_newer_clients_must_name_the_protocol(node: Running) -> None:
    joined = await node.join(9)
    response = await node.sync(5, joined, protocol_name=None)
    assert response.error_code is ErrorCode.inconsistent_group_protocol
    assert (await node.sync(4, joined, protocol_name=None)).error_code is ErrorCode.none


async def test_a_follower_waits_for_the_leader_on_another_connection(node: Running) -> None:
    leader = await node.stable_member()
    second = Running(node.node, await WireClient.connect(node.node))
    joining = asyncio.ensure_future(second.join(9))

    async def leader_is_called_back() -> bool:
        response = await node.ask(HEARTBEAT, 4, **beat(leader))
        return response.error_code is ErrorCode.rebalance_in_progress

    await eventually_async(leader_is_called_back)
    leader = await node.join(9, member_id=leader.member_id)
    follower = await joining
    assert (leader.generation_id, follower.generation_id) == (2, 2)
    assert follower.leader == leader.member_id
    assert follower.members == ()
    syncing = asyncio.ensure_future(second.sync(5, follower, assignments=()))
    parts = tuple(
        SimpleNamespace(member_id=member.member_id, assignment=member.member_id.encode())
        for member in leader.members
    )
    await node.sync(5, leader, assignments=parts)
    assert (await syncing).assignment == follower.member_id.encode()
    await second.client.close()


def beat(joined: Any, **fields: Any) -> dict[str, Any]:
    return {
        "group_id": "g",
        "generation_id": joined.generation_id,
        "member_id": joined.member_id,
        "group_instance_id": None,
    } | fields


@pytest.mark.parametrize("version", versions(HEARTBEAT))
async def test_heartbeats_in_every_version(node: Running, version: int) -> None:
    joined = await node.stable_member()
    assert (await node.ask(HEARTBEAT, version, **beat(joined))).error_code is ErrorCode.none
    stale = await node.ask(HEARTBEAT, version, **beat(joined, generation_id=9))
    assert stale.error_code is ErrorCode.illegal_generation
    assert (
        await node.ask(HEARTBEAT, version, **beat(joined, member_id="?"))
    ).error_code is ErrorCode.unknown_member_id
    assert (
        await node.ask(HEARTBEAT, version, **beat(joined, group_id=""))
    ).error_code is ErrorCode.invalid_group_id


@pytest.mark.parametrize("version", versions(LEAVE_GROUP))
async def test_leaving_in_every_version(node: Running, version: int) -> None:
    joined = await node.stable_member()

    async def leave(member_id: str, group: str = "g") -> list[ErrorCode]:
        member = SimpleNamespace(member_id=member_id, group_instance_id=None, reason=None)
        response = await node.ask(
            LEAVE_GROUP, version, group_id=group, member_id=member_id, members=(member,)
        )
        if version < 3 or not response.members:
            return [response.error_code]
        return [response.error_code, *(each.error_code for each in response.members)]

    fine = [] if version < 3 else [ErrorCode.none]
    assert await leave("nobody") == [*fine, ErrorCode.unknown_member_id]
    assert await leave(joined.member_id) == [*fine, ErrorCode.none]
    assert await leave(joined.member_id, "no such group") == [*fine, ErrorCode.unknown_member_id]
    assert await leave(joined.member_id, "") == [ErrorCode.invalid_group_id]
    described = await node.ask(DESCRIBE_GROUPS, 5, groups=("g",), include_authorized_operations=False)
    assert described.groups[0].group_state == "Empty"


async def test_several_members_leave_at_once_static_ones_by_their_instance(node: Running) -> None:
    static = await node.join(9, group_instance_id="i")
    await node.sync(5, static, group_instance_id="i")
    members = (
        SimpleNamespace(member_id="", group_instance_id="i", reason=None),
        SimpleNamespace(member_id="ghost", group_instance_id=None, reason=None),
    )
    response = await node.ask(LEAVE_GROUP, 5, group_id="g", members=members)
    assert [(each.group_instance_id, each.error_code) for each in response.members] == [
        ("i", ErrorCode.none),
        (None, ErrorCode.unknown_member_id),
    ]


# Offsets


@pytest.mark.parametrize("version", versions(OFFSET_COMMIT))
async def test_committing_in_every_version(node: Running, version: int) -> None:
    topic_id = await node.create("t", 2)
    joined = await node.stable_member()
    member = {"member_id": joined.member_id, "generation_id_or_member_epoch": 1}
    unknown_id = uuid.uuid4()
    response = await node.commit(
        version, to_commit(topic_id, "t", 5, 0, 7), to_commit(unknown_id, "missing", 1), **member
    )
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
    assert errors_of(response) == [
        ErrorCode.none,
        ErrorCode.none,
        ErrorCode.unknown_topic_or_partition,
        unknown,
    ]
    keys = [topic.topic_id if version >= 10 else topic.name for topic in response.topics]
    assert keys == ([topic_id, unknown_id] if version >= 10 else ["t", "missing"])
    fetched = await node.fetch(7, to_fetch(None, "t", 0, 1))
    found = [(each.committed_offset, each.metadata) for each in fetched.topics[0].partitions]
    assert found == [(5, "note"), (0, "note")]
    epoch = fetched.topics[0].partitions[0].committed_leader_epoch
    assert epoch == (3 if version >= 6 else -1)


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("retention_ms", [2**63 - 1, -(2**63), -1])
async def test_commits_are_kept_for_any_retention_time(
    node: Running, version: int, retention_ms: int
) -> None:
    topic_id = await node.create("t", 1)
    joined = await node.stable_member()
    body = io.BytesIO()
    request = SimpleNamespace(
        group_id="g",
        generation_id_or_member_epoch=1,
        member_id=joined.member_id,
        group_instance_id=None,
        retention_time=timedelta(milliseconds=0x123456789ABC),
        topics=(to_commit(topic_id, "t", 5),),
    )
    entity_writer(load_request_schema(OFFSET_COMMIT, version))(body, request)
    raw = body.getvalue().replace(struct.pack(">q", 0x123456789ABC), struct.pack(">q", retention_ms))
    response = await node.client.ask_raw(OFFSET_COMMIT, version, raw)
    assert errors_of(response) == [ErrorCode.none]
    assert (await node.fetch(8, everything=True)).topics[0].partitions[0].committed_offset == 5


@pytest.mark.parametrize("version", versions(OFFSET_COMMIT))
async def test_fencing_of_commits_in_every_version(node: Running, version: int) -> None:
    topic_id = await node.create("t", 1)
    joined = await node.stable_member()
    topic = to_commit(topic_id, "t", 1)

    async def error(**fields: Any) -> ErrorCode:
        (found,) = errors_of(await node.commit(version, topic, **fields))
        return found

    member_id = joined.member_id
    assert await error() is ErrorCode.unknown_member_id
    assert await error(member_id=member_id, generation_id_or_member_epoch=9) is ErrorCode.illegal_generation
    assert await error(member_id="ghost", generation_id_or_member_epoch=1) is ErrorCode.unknown_member_id
    no_group = ErrorCode.group_id_not_found if version >= 9 else ErrorCode.illegal_generation
    assert await error(group="none", member_id="x", generation_id_or_member_epoch=1) is no_group


async def test_metadata_that_is_too_long_and_none_at_all(node: Running) -> None:
    await node.create("t", 1)
    await node.find()
    long = await node.commit(9, to_commit(None, "t", 1, metadata="x" * 4097))
    assert errors_of(long) == [ErrorCode.offset_metadata_too_large]
    assert errors_of(await node.commit(9, to_commit(None, "t", 1, metadata=None))) == [ErrorCode.none]
    fetched = await node.fetch(7, to_fetch(None, "t", 0))
    assert fetched.topics[0].partitions[0].metadata == ""


@pytest.mark.parametrize("version", versions(OFFSET_FETCH))
async def test_fetching_in_every_version(node: Running, version: int) -> None:
    topic_id = await node.create("t", 3)
    await node.find()
    await node.commit(9, to_commit(None, "t", 5, 0))
    group = await node.fetch(version, to_fetch(topic_id, "t", 1, 2))
    (topic,) = group.topics
    assert (topic.topic_id if version >= 10 else topic.name) == (topic_id if version >= 10 else "t")
    assert [each.committed_offset for each in topic.partitions] == [0, -1]
    assert [each.metadata for each in topic.partitions] == ["note", ""]
    assert errors_of(group) == [ErrorCode.none, ErrorCode.none]
    if version >= 5:
        assert [each.committed_leader_epoch for each in topic.partitions] == [3, -1]
    if version >= 2:
        assert group.error_code is ErrorCode.none
        everything = await node.fetch(version, everything=True)
        offsets = [each.committed_offset for topic in everything.topics for each in topic.partitions]
        assert offsets == [5, 0]


async def test_unknown_topic_ids_are_told_apart(node: Running) -> None:
    await node.find()
    group = await node.fetch(10, to_fetch(uuid.uuid4(), "", 0))
    assert errors_of(group) == [ErrorCode.unknown_topic_id]
    assert group.topics[0].partitions[0].committed_offset == -1


@pytest.mark.parametrize("version", versions(OFFSET_FETCH))
async def test_before_there_is_any_coordinator_clients_are_sent_to_find_it(
    node: Running, version: int
) -> None:
    group = await node.fetch(version, to_fetch(None, "t", 0))
    errors = errors_of(group) if version < 2 else [group.error_code]
    assert errors == [ErrorCode.not_coordinator]


async def test_deleting_offsets(node: Running) -> None:
    await node.create("t", 1)
    await node.create("u", 1)
    await node.find()
    await node.commit(9, to_commit(None, "t", 1), to_commit(None, "u", 2))
    await node.stable_member()

    async def delete(group: str, *topics: str) -> Any:
        partition = SimpleNamespace(partition_index=0)
        named = tuple(SimpleNamespace(name=topic, partitions=(partition,)) for topic in topics)
        return await node.ask(OFFSET_DELETE, 0, group_id=group, topics=named)

    response = await delete("g", "t", "u", "missing")
    assert errors_of(response) == [
        ErrorCode.group_subscribed_to_topic,
        ErrorCode.none,
        ErrorCode.unknown_topic_or_partition,
    ]
    everything = await node.fetch(7, everything=True)
    assert [topic.name for topic in everything.topics] == ["t"]
    assert (await delete("nobody", "t")).error_code is ErrorCode.group_id_not_found
    assert (await delete("", "t")).error_code is ErrorCode.invalid_group_id


async def test_offsets_are_deleted_in_several_operations(
    node: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that has only offsets goes with the last of them, and later operations delete none."""
    monkeypatch.setattr(offset_delete, "_DELETED_AT_ONCE", 2)
    await node.create("t", 6)
    await node.find()
    await node.commit(9, to_commit(None, "t", 7, 7, 7))
    indexes = [0, 1, 2, 3, 4, 5, 9]
    topic = SimpleNamespace(
        name="t", partitions=tuple(SimpleNamespace(partition_index=index) for index in indexes)
    )
    response = await node.ask(OFFSET_DELETE, 0, group_id="g", topics=(topic,))
    assert response.error_code is ErrorCode.none
    assert errors_of(response) == [ErrorCode.none] * 6 + [ErrorCode.unknown_topic_or_partition]
    assert not (await node.fetch(7, everything=True)).topics
    assert (await node.ask(OFFSET_DELETE, 0, group_id="g", topics=(topic,))).error_code is (
        ErrorCode.group_id_not_found
    )


async def test_a_deleted_topic_takes_its_offsets_along(node: Running) -> None:
    await node.create("t", 1)
    await node.create("u", 1)
    await node.find()
    await node.commit(9, to_commit(None, "t", 1), to_commit(None, "u", 2))
    topic = SimpleNamespace(name="t", topic_id=None)
    await node.ask(20, 6, topics=(topic,), timeout=timedelta(seconds=30))
    await node.create("t", 1)
    fetched = await node.fetch(7, to_fetch(None, "t", 0), to_fetch(None, "u", 0))
    assert [topic.partitions[0].committed_offset for topic in fetched.topics] == [-1, 2]


# Groups


@pytest.mark.parametrize("version", versions(DESCRIBE_GROUPS))
async def test_describing_in_every_version(node: Running, version: int) -> None:
    joined = await node.stable_member()
    response = await node.ask(
        DESCRIBE_GROUPS, version, groups=("g", "none"), include_authorized_operations=True
    )
    found, missing = response.groups
    assert (found.error_code, found.group_state) == (ErrorCode.none, "Stable")
    assert (found.protocol_type, found.protocol_data) == ("consumer", "range")
    (member,) = found.members
    assert (member.member_id, member.client_id, member.client_host) == (
        joined.member_id,
        "test",
        "/127.0.0.1",
    )
    assert (member.member_metadata, member.member_assignment) == (subscription(("t",)), b"all")
    assert missing.group_state == "Dead"
    assert missing.error_code is (ErrorCode.group_id_not_found if version >= 6 else ErrorCode.none)
    if version >= 3:
        assert found.authorized_operations == 0b110101001000


@pytest.mark.parametrize("version", versions(LIST_GROUPS))
async def test_listing_in_every_version(node: Running, version: int) -> None:
    assert (await node.ask(LIST_GROUPS, version, states_filter=(), types_filter=())).groups == ()
    await node.create("t", 1)
    await node.stable_member()
    await node.commit(9, to_commit(None, "t", 1), group="simple")

    async def names(*states: str, types: tuple[str, ...] = ()) -> set[str]:
        response = await node.ask(LIST_GROUPS, version, states_filter=states, types_filter=types)
        assert response.error_code is ErrorCode.none
        return {group.group_id for group in response.groups}

    assert await names() == {"g", "simple"}
    if version >= 4:
        assert await names("stable") == {"g"}
        assert await names("Empty", "Dead") == {"simple"}
    if version >= 5:
        assert await names(types=("Classic",)) == {"g", "simple"}
        assert await names(types=("share",)) == set()


@pytest.mark.parametrize("version", versions(DELETE_GROUPS))
async def test_deleting_groups_in_every_version(node: Running, version: int) -> None:
    await node.create("t", 1)
    await node.stable_member()
    await node.commit(9, to_commit(None, "t", 1), group="simple")
    response = await node.ask(DELETE_GROUPS, version, groups_names=("g", "simple", "none", "simple"))
    assert {each.group_id: each.error_code for each in response.results} == {
        "g": ErrorCode.non_empty_group,
        "simple": ErrorCode.none,
        "none": ErrorCode.group_id_not_found,
    }
    assert (await node.fetch(7, everything=True, group="simple")).topics == ()


async def test_groups_and_offsets_outlive_the_node(node: Running, tmp_path: Path) -> None:
    await node.create("t", 1)
    joined = await node.stable_member()
    member = {"member_id": joined.member_id, "generation_id_or_member_epoch": 1}
    await node.commit(9, to_commit(None, "t", 41), **member)
    await node.node.stop()
    again = new_node(tmp_path, **SETTINGS)
    await again.start()
    client = Running(again, await WireClient.connect(again))
    assert (await client.ask(HEARTBEAT, 4, **beat(joined))).error_code is ErrorCode.none
    fetched = await client.fetch(7, to_fetch(None, "t", 0))
    assert fetched.topics[0].partitions[0].committed_offset == 41
    assert errors_of(await client.commit(9, to_commit(None, "t", 42), **member)) == [ErrorCode.none]
    await client.client.close()
    await again.stop()


async def test_clients_that_come_first_together_all_find_the_coordinator(node: Running) -> None:
    others = [Running(node.node, await WireClient.connect(node.node)) for _ in range(5)]
    replies = await asyncio.gather(*(other.join(3, f"group {n}") for n, other in enumerate(others)))
    assert [reply.error_code for reply in replies] == [ErrorCode.none] * 5
    for other in others:
        await other.client.close()


async def test_a_group_id_that_cannot_be_stored_is_refused(node: Running) -> None:
    long = "x" * 32_768
    assert (await node.find(4, key=long)).coordinators[0].error_code is ErrorCode.invalid_group_id
    assert (await node.join(9, long)).error_code is ErrorCode.invalid_group_id
    await node.create("t", 1)
    assert errors_of(await node.commit(9, to_commit(None, "t", 1), group=long)) == [
        ErrorCode.invalid_group_id
    ]
    wide = "\N{GRINNING FACE}" * 10_000
    assert (await node.join(9, wide)).error_code is ErrorCode.invalid_group_id
    assert (await node.join(9, group_instance_id=wide)).error_code is ErrorCode.invalid_request
    assert errors_of(await node.commit(9, to_commit(None, "t", 1), group=wide)) == [
        ErrorCode.invalid_group_id
    ]


async def test_a_join_is_given_up_when_its_client_goes(node: Running) -> None:
    await node.stable_member()

    def waiting() -> int:
        return sum("_answer_later" in repr(task) for task in asyncio.all_tasks())

    other = await WireClient.connect(node.node)
    joining = asyncio.create_task(Running(node.node, other).join(3))
    await eventually_async(lambda: _soon(waiting() == 1))
    await other.close()
    await asyncio.gather(joining, return_exceptions=True)
    await eventually_async(lambda: _soon(waiting() == 0))


async def _soon(is_true: bool) -> bool:
    return is_true
