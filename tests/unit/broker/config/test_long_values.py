"""Long setting values and error messages: bounded, and never longer than the version of a reply allows."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.describe_configs.v1 import request as old_describing
from kio.schema.incremental_alter_configs.v0 import request as old_altering
from tests.unit.broker.config.config_requests import alter, described
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.cluster.image import ResourceType
from penstock.protocol.errors import ErrorCode

THROTTLED = "leader.replication.throttled.replicas"
TOPIC = (ResourceType.TOPIC, "t")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[WireClient]:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        yield client
        await client.close()


def replicas(first: int, end: int) -> str:
    return ",".join(f"{partition}:1" for partition in range(first, end))


async def describe_v1(client: WireClient, *names: str) -> Any:
    resource = old_describing.DescribeConfigsResource(
        resource_type=TOPIC[0], resource_name=TOPIC[1], configuration_keys=names or None
    )
    request = old_describing.DescribeConfigsRequest(resources=(resource,), include_synonyms=False)
    (answer,) = (await client.ask(request)).results
    return answer


async def test_a_value_too_long_for_the_version_is_an_error_of_its_resource(client: WireClient) -> None:
    value = replicas(0, 9_000)
    assert await alter(client, TOPIC, {THROTTLED: value}) == (ErrorCode.none, None)
    assert (await described(client, TOPIC, THROTTLED))[THROTTLED].value == value
    refused = await describe_v1(client)
    assert refused.error_code is ErrorCode.unsupported_version
    assert THROTTLED in refused.error_message
    assert refused.configs == ()
    others = await describe_v1(client, "cleanup.policy")
    assert (others.error_code, others.configs[0].value) == (ErrorCode.none, "delete")


async def test_what_is_appended_does_not_grow_without_bound(client: WireClient) -> None:
    first, second = replicas(0, 30_000), replicas(30_000, 60_000)
    assert await alter(client, TOPIC, {THROTTLED: first}) == (ErrorCode.none, None)
    code, message = await alter(client, TOPIC, {THROTTLED: second}, op=ConfigOp.APPEND)
    assert code is ErrorCode.invalid_config
    assert message is not None
    assert "longer than 262144 characters" in message
    assert (await described(client, TOPIC, THROTTLED))[THROTTLED].value == first


async def test_a_message_that_quotes_a_long_name_fits_into_an_old_reply(client: WireClient) -> None:
    resource = old_altering.AlterConfigsResource(
        resource_type=ResourceType.BROKER,
        resource_name="",
        configs=(old_altering.AlterableConfig(name="x" * 32_767, config_operation=0, value="1"),),
    )
    request = old_altering.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
    (answer,) = (await client.ask(request)).responses
    assert answer.error_code is ErrorCode.invalid_request
    assert answer.error_message.startswith("Unknown broker config name: xxx")
