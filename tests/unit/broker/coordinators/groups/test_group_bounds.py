"""Names, members and metadata that coordinators keep for clients are bounded; larger ones are refused."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.broker.handlers.test_classic_groups import JOIN_GROUP, SETTINGS, Running
from tests.unit.broker.handlers.test_consumer_groups import JOINING_HEARTBEAT
from tests.unit.broker.raw_client import API_VERSIONS, Client, running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.coordinators.requests import exceeds_utf8_bytes
from penstock.protocol.errors import ErrorCode

_INIT_PRODUCER_ID, _CONSUMER_GROUP_HEARTBEAT, _SHARE_GROUP_HEARTBEAT = 22, 68, 76
_LONG = "x" * 1025  # penstock.id.max.bytes is 1024


@asynccontextmanager
async def _running(tmp_path: Path, **settings: str) -> AsyncIterator[Running]:
    given = SETTINGS | {name.replace("_", "."): value for name, value in settings.items()}
    async with running(tmp_path, **given) as node:
        started = Running(node, await WireClient.connect(node))
        await started.find(key="any")  # the topic of groups is made
        yield started
        await started.client.close()


def _at(topic: str) -> Any:
    partition = SimpleNamespace(
        partition_index=0, committed_offset=1, committed_leader_epoch=-1, committed_metadata=""
    )
    return SimpleNamespace(name=topic, partitions=(partition,))


async def _heartbeat(started: Running, group: str, **fields: Any) -> Any:
    given = {**JOINING_HEARTBEAT, "group_id": group, **fields}
    return await started.ask(_CONSUMER_GROUP_HEARTBEAT, 1, **given)


async def _share_heartbeat(started: Running, group: str, **fields: Any) -> Any:
    defaults = {
        "group_id": group, "member_id": "m", "member_epoch": 0, "rack_id": None, "subscribed_topic_names": ("t",),
    }  # fmt: skip
    return await started.ask(_SHARE_GROUP_HEARTBEAT, 1, **defaults | fields)


def _groups(started: Running) -> set[str]:
    return {group for shard in started.node.groups.loaded_shards() for group in shard.groups}


async def test_ids_that_are_too_long_are_refused_and_not_kept(tmp_path: Path) -> None:
    async with _running(tmp_path) as started:
        await started.create("t", 1)
        invalid, wrong = ErrorCode.invalid_group_id, ErrorCode.invalid_request
        assert (await started.find(key=_LONG)).coordinators[0].error_code is invalid
        assert (await started.find(key=_LONG, key_type=1)).coordinators[0].error_code is wrong
        assert (await started.join(9, _LONG)).error_code is invalid
        assert (await started.join(9, "g", group_instance_id=_LONG)).error_code is wrong
        committed = await started.commit(8, _at("t"), group=_LONG)
        assert committed.topics[0].partitions[0].error_code is invalid
        assert (await _heartbeat(started, _LONG)).error_code is invalid
        for field in ("member_id", "instance_id", "rack_id"):
            answer = await _heartbeat(started, "g", **{field: _LONG})
            assert answer.error_code is wrong, field
            assert "penstock.id.max.bytes" in answer.error_message
        assert (await _share_heartbeat(started, _LONG)).error_code is invalid
        assert (await _share_heartbeat(started, "g", member_id=_LONG)).error_code is wrong
        answer = await started.ask(
            _INIT_PRODUCER_ID,
            4,
            transactional_id=_LONG,
            transaction_timeout=timedelta(seconds=10),
            producer_id=-1,
            producer_epoch=-1,
        )
        assert answer.error_code is wrong
        assert _groups(started) == set()
        assert (await started.join(9, "g" * 1024)).error_code is ErrorCode.none


def test_length_is_counted_in_bytes() -> None:
    assert not exceeds_utf8_bytes("é" * 512, 1024)
    assert exceeds_utf8_bytes("é" * 513, 1024)
    assert exceeds_utf8_bytes("x" * 1025, 1024)


async def test_a_long_client_id_is_cut_between_characters(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        seen: list[str | None] = []

        def watch(context: Any, *_: Any) -> bool:
            seen.append(context.client_id)
            return False

        node.dispatcher.faults = watch
        client = await Client.connect(node)
        for client_id in ("é" * 16_000, "x" + "é" * 1000, "short"):
            raw = client_id.encode()
            message = struct.pack(">hhih", API_VERSIONS, 0, 7, len(raw)) + raw
            client.writer.write(struct.pack(">i", len(message)) + message)
            assert (await client.reply())[0] == 7
        assert seen == ["é" * 512, "x" + "é" * 511, "short"]


async def test_requests_of_members_are_bounded(tmp_path: Path) -> None:
    async with _running(tmp_path, penstock_group_request_max_bytes="2000") as started:
        large = (SimpleNamespace(name="range", metadata=bytes(2000)),)
        for version in (0, 4, 9):
            assert (await started.join(version, protocols=large)).error_code is ErrorCode.invalid_request
        answer = await _heartbeat(started, "g", subscribed_topic_names=tuple(f"t{i:099}" for i in range(30)))
        assert answer.error_code is ErrorCode.invalid_request
        assert "penstock.group.request.max.bytes" in answer.error_message
        assert _groups(started) == set()
        joined = await started.join(9)
        too_much = (SimpleNamespace(member_id=joined.member_id, assignment=bytes(2000)),)
        assert (await started.sync(5, joined, assignments=too_much)).error_code is ErrorCode.invalid_request
        assert (await started.sync(5, joined)).error_code is ErrorCode.none


async def test_groups_beyond_the_bound_are_refused(tmp_path: Path) -> None:
    async with _running(tmp_path, penstock_groups_max="3") as started:
        await started.create("t", 1)
        policy = ErrorCode.policy_violation
        member = await started.stable_member("a")
        assert (await _heartbeat(started, "b")).error_code is ErrorCode.none
        assert (await started.commit(8, _at("t"), group="c")).topics[0].partitions[
            0
        ].error_code is ErrorCode.none
        assert (await started.join(9, "d")).error_code is policy
        assert (await _heartbeat(started, "d")).error_code is policy
        assert (await _share_heartbeat(started, "d")).error_code is policy
        assert (await started.commit(8, _at("t"), group="d")).topics[0].partitions[0].error_code is policy
        assert _groups(started) == {"a", "b", "c"}
        # Those that are there go on.
        rejoined = await started.join(9, "a", member_id=member.member_id)
        assert rejoined.error_code is ErrorCode.none
        assert (await started.commit(8, _at("t"), group="c")).topics[0].partitions[
            0
        ].error_code is ErrorCode.none
        # And there is room again when one has gone.
        gone = await started.ask(42, 2, groups_names=("c",))
        assert gone.results[0].error_code is ErrorCode.none
        assert (await started.commit(8, _at("t"), group="d")).topics[0].partitions[
            0
        ].error_code is ErrorCode.none


async def test_members_about_to_join_are_bounded_too(tmp_path: Path) -> None:
    async with _running(tmp_path, group_max_size="2") as started:
        first = {
            "group_id": "g",
            "session_timeout": timedelta(seconds=10),
            "rebalance_timeout": timedelta(seconds=20),
            "member_id": "",
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": (SimpleNamespace(name="range", metadata=b""),),
            "reason": None,
        }
        codes = [(await started.ask(JOIN_GROUP, 9, **first)).error_code for _ in range(4)]
        required, full = ErrorCode.member_id_required, ErrorCode.group_max_size_reached
        assert codes == [required, required, full, full]
