"""Levels of a node's loggers, described and changed while the node runs, as in Apache Kafka."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.incremental_alter_configs.v1 import request as incremental
from tests.unit.broker.config.config_requests import alter, described
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.errors import ApiError, ErrorCode

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


def alter_topic_and_logger() -> incremental.IncrementalAlterConfigsRequest:
    def resource(kind: int, name: str, setting: str, value: str) -> incremental.AlterConfigsResource:
        config = incremental.AlterableConfig(name=setting, config_operation=0, value=value)
        return incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=(config,))

    return incremental.IncrementalAlterConfigsRequest(
        resources=(
            resource(ResourceType.TOPIC, "t", "retention.ms", "5000"),
            resource(ResourceType.BROKER_LOGGER, "1", SERVER, "ERROR"),
        ),
        validate_only=False,
    )


async def test_loggers_and_topics_in_one_request(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        answers = (await client.ask(alter_topic_and_logger())).responses
        await client.close()
        assert {(a.resource_type, a.error_code) for a in answers} == {
            (ResourceType.TOPIC, ErrorCode.none),
            (ResourceType.BROKER_LOGGER, ErrorCode.none),
        }
        assert node.partitions.find("t", 0).log.config.retention_ms == 5000
        assert logging.getLogger(SERVER).level == logging.ERROR


@pytest.mark.parametrize(
    ("refused", "answered"),
    [(ErrorCode.not_controller, ErrorCode.none), (ErrorCode.policy_violation, ErrorCode.policy_violation)],
    ids=["asked again while the controller moves", "refused by the controller"],
)
async def test_topics_in_a_request_with_loggers_are_left_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: ErrorCode, answered: ErrorCode
) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await WireClient.connect(node)
        propose, refusals = node.controller.propose, [ApiError(refused)]

        async def propose_after_a_refusal(*arguments: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await propose(*arguments)

        monkeypatch.setattr(node.controller, "propose", propose_after_a_refusal)
        answers = (await client.ask(alter_topic_and_logger())).responses
        await client.close()
        assert [(a.resource_type, a.error_code) for a in answers] == [
            (ResourceType.BROKER_LOGGER, ErrorCode.none),
            (ResourceType.TOPIC, answered),
        ]
