"""Settings of groups: how clients describe and change them, and that the node applies them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.alter_configs.v2 import request as alter
from kio.schema.list_config_resources.v1.request import ListConfigResourcesRequest
from tests.unit.broker.handlers.test_admin import describe, incrementally
from tests.unit.broker.raw_client import new_node
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.cluster.group_settings import GROUP_SETTINGS
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.errors import ErrorCode

LIMIT = "share.delivery.count.limit"


class Running:
    def __init__(self, node: Node, client: WireClient) -> None:
        self.node = node
        self.client = client
        self.ask = client.ask

    async def set(self, group: str, *changes: tuple[str, int, str | None]) -> ErrorCode:
        (result,) = (await self.ask(incrementally(ResourceType.GROUP, group, *changes))).responses
        return ErrorCode(result.error_code)

    async def stop(self) -> None:
        await self.client.close()
        await self.node.stop()


async def start(folder: Path) -> Running:
    node = new_node(folder, group_share_delivery_count_limit="7")
    await node.start()
    return Running(node, await WireClient.connect(node))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    running = await start(tmp_path)
    yield running
    await running.stop()


async def test_a_groups_settings_are_shown_with_their_sources(running: Running) -> None:
    assert await running.set("g", (LIMIT, 0, "3")) is ErrorCode.none
    mine, others = [
        {
            config.name: config
            for config in (await running.ask(describe(ResourceType.GROUP, name))).results[0].configs
        }
        for name in ("g", "never-seen")
    ]
    assert mine.keys() == others.keys() == GROUP_SETTINGS.keys()
    assert (mine[LIMIT].value, mine[LIMIT].config_source) == ("3", ConfigSource.GROUP)
    assert [(s.name, s.value, s.source) for s in mine[LIMIT].synonyms] == [
        (LIMIT, "3", ConfigSource.GROUP),
        (f"group.{LIMIT}", "7", ConfigSource.STATIC_BROKER),
        (f"group.{LIMIT}", "5", ConfigSource.DEFAULT),
    ]
    assert (others[LIMIT].value, others[LIMIT].config_source) == ("7", ConfigSource.STATIC_BROKER)
    assert not any(config.read_only for config in mine.values())


async def test_what_is_set_counts_at_once_and_after_a_restart(tmp_path: Path) -> None:
    running = await start(tmp_path)
    assert running.node.groups.config("g").share_delivery_count_limit == 7
    await running.set("g", (LIMIT, 0, "3"), ("share.auto.offset.reset", 0, "earliest"))
    assert running.node.groups.config("g").share_delivery_count_limit == 3
    assert running.node.groups.config("g").share_auto_offset_reset.kind == "earliest"
    assert running.node.groups.config("other").share_delivery_count_limit == 7
    await running.stop()
    running = await start(tmp_path)
    assert running.node.groups.config("g").share_delivery_count_limit == 3
    await running.set("g", (LIMIT, 1, None))
    assert running.node.groups.config("g").share_delivery_count_limit == 7
    await running.stop()


async def test_the_same_answer_is_kept_until_the_image_changes(running: Running) -> None:
    first = running.node.groups.config("g")
    assert running.node.groups.config("g") is first


@pytest.mark.parametrize(
    ("group", "change", "code"),
    [
        ("g", (LIMIT, 0, "1"), ErrorCode.invalid_config),
        ("g", ("retention.ms", 0, "1"), ErrorCode.invalid_config),
        ("g", (LIMIT, 2, "4"), ErrorCode.invalid_config),
        ("", (LIMIT, 0, "4"), ErrorCode.invalid_request),
    ],
)
async def test_what_cannot_be_is_refused(
    running: Running, group: str, change: tuple[str, int, str], code: ErrorCode
) -> None:
    assert await running.set(group, change) is code
    assert running.node.image.config(ResourceType.GROUP, group) == {}


async def test_the_older_request_replaces_all_settings(running: Running) -> None:
    await running.set("g", (LIMIT, 0, "3"), ("penstock.share.backoff", 0, "fixed"))
    request = alter.AlterConfigsRequest(
        resources=(
            alter.AlterConfigsResource(
                resource_type=ResourceType.GROUP,
                resource_name="g",
                configs=(alter.AlterableConfig(name=LIMIT, value="4"),),
            ),
        ),
        validate_only=False,
    )
    (result,) = (await running.ask(request)).responses
    assert result.error_code is ErrorCode.none
    assert running.node.image.config(ResourceType.GROUP, "g") == {LIMIT: "4"}


async def names(running: Running, *kinds: int, version: int = 1) -> list[tuple[int, str]]:
    response = await running.ask(ListConfigResourcesRequest(resource_types=kinds), version=version)
    assert response.error_code is ErrorCode.none
    return [(getattr(each, "resource_type", 16), each.resource_name) for each in response.config_resources]


async def test_resources_are_listed(running: Running) -> None:
    await running.set("with", (LIMIT, 0, "3"))
    await running.set("without", (LIMIT, 0, "3"))
    await running.set("without", (LIMIT, 1, None))
    assert await names(running, ResourceType.GROUP) == [(32, "with")]
    assert await names(running) == [(4, "1"), (8, "1"), (32, "with")]
    assert await names(running, version=0) == [], "v0 asks for client metrics only"


async def test_unknown_kinds_are_not_listed(running: Running) -> None:
    response: Any = await running.ask(ListConfigResourcesRequest(resource_types=(32, 77)))
    assert (response.error_code, response.config_resources) == (ErrorCode.unsupported_version, ())
