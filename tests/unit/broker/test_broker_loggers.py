"""Levels of a node's loggers, shown and set while it runs, in Apache Kafka's words."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.broker.configuring import alter, described
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.cluster.effective import ConfigSource
from penstock.cluster.state import ResourceType
from penstock.protocol.errors import ErrorCode

HERE = (ResourceType.BROKER_LOGGER, "1")
OK = (ErrorCode.none, None)
SERVER = "penstock.server"


@pytest.fixture(autouse=True)
def _levels_are_put_back() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("penstock", SERVER)]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


async def test_levels_are_shown_and_set(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)

        async def level(name: str) -> str:
            found = (await described(client, HERE))[name]
            assert (found.read_only, found.config_source) == (False, ConfigSource.DYNAMIC_BROKER_LOGGER)
            return found.value  # type: ignore[no-any-return]

        assert await alter(client, HERE, {"root": "WARN"}) == OK
        assert (await level("root"), await level(SERVER)) == ("WARN", "WARN")
        assert await alter(client, HERE, {SERVER: "DEBUG"}, validate_only=True) == OK
        assert await level(SERVER) == "WARN"
        assert await alter(client, HERE, {SERVER: "DEBUG"}) == OK
        assert (await level("root"), await level(SERVER)) == ("WARN", "DEBUG")
        assert logging.getLogger(SERVER).isEnabledFor(logging.DEBUG)
        assert await alter(client, HERE, {SERVER: None}) == OK
        assert await level(SERVER) == "WARN"
        assert set(await described(client, HERE, SERVER)) == {SERVER}
        await client.close()


@pytest.mark.parametrize(
    ("resource", "changes", "op", "error"),
    [
        ("1", {SERVER: "LOUD"}, 0, (ErrorCode.invalid_config, "not a supported log level")),
        ("1", {"penstock.nobody": "INFO"}, 0, (ErrorCode.invalid_config, "penstock.nobody does not exist")),
        ("1", {"asyncio": "INFO"}, 0, (ErrorCode.invalid_config, "asyncio does not exist")),
        ("1", {"root": None}, 0, (ErrorCode.invalid_request, "root logger is not allowed")),
        (
            "1",
            {SERVER: "INFO"},
            ConfigOp.APPEND,
            (ErrorCode.invalid_request, "APPEND operation is not allowed"),
        ),
        ("2", {SERVER: "INFO"}, 0, (ErrorCode.invalid_request, "Expected 1, but received 2")),
        ("", {SERVER: "INFO"}, 0, (ErrorCode.invalid_request, "must be an integer")),
    ],
)
async def test_what_cannot_be_set_is_refused_as_a_whole(
    tmp_path: Path, resource: str, changes: dict[str, str | None], op: int, error: tuple[ErrorCode, str]
) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        before = logging.getLogger("penstock.node").level
        both = {"penstock.node": "ERROR", **changes} if op == 0 else changes
        code, message = await alter(client, (ResourceType.BROKER_LOGGER, resource), both, op=op)
        assert code is error[0]
        assert message is not None
        assert error[1] in message
        assert logging.getLogger("penstock.node").level == before
        await client.close()


async def test_loggers_and_topics_in_one_request(tmp_path: Path) -> None:
    from kio.schema.incremental_alter_configs.v1 import request as incremental

    def resource(kind: int, name: str, setting: str, value: str) -> incremental.AlterConfigsResource:
        config = incremental.AlterableConfig(name=setting, config_operation=0, value=value)
        return incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=(config,))

    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        request = incremental.IncrementalAlterConfigsRequest(
            resources=(
                resource(ResourceType.TOPIC, "t", "retention.ms", "5000"),
                resource(ResourceType.BROKER_LOGGER, "1", SERVER, "ERROR"),
            ),
            validate_only=False,
        )
        answers = (await client.ask(request)).responses
        await client.close()
        assert {(a.resource_type, a.error_code) for a in answers} == {
            (ResourceType.TOPIC, ErrorCode.none),
            (ResourceType.BROKER_LOGGER, ErrorCode.none),
        }
        assert node.partitions.find("t", 0).log.config.retention_ms == 5000
        assert logging.getLogger(SERVER).level == logging.ERROR
