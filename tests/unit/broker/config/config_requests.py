"""Requests that change and describe settings, as `kafka-configs` sends them."""

from typing import Any

from kio.schema.describe_configs.v4 import request as describing
from kio.schema.incremental_alter_configs.v1 import request as incremental
from tests.unit.broker.wire_client import WireClient

from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.protocol.errors import ErrorCode


async def alter(
    client: WireClient,
    resource: tuple[int, str],
    changes: dict[str, str | None],
    *,
    op: int = ConfigOp.SET,
    validate_only: bool = False,
) -> tuple[ErrorCode, str | None]:
    """A value of None removes the setting."""
    request = incremental.IncrementalAlterConfigsRequest(
        resources=(
            incremental.AlterConfigsResource(
                resource_type=resource[0],
                resource_name=resource[1],
                configs=tuple(
                    incremental.AlterableConfig(
                        name=name, config_operation=ConfigOp.DELETE if text is None else op, value=text
                    )
                    for name, text in changes.items()
                ),
            ),
        ),
        validate_only=validate_only,
    )
    (answer,) = (await client.ask(request)).responses
    return answer.error_code, answer.error_message


async def described(client: WireClient, resource: tuple[int, str], *names: str) -> dict[str, Any]:
    """Every setting of a resource by its name, or only these."""
    answer = await describe(client, resource, *names)
    assert answer.error_code is ErrorCode.none, answer
    return {config.name: config for config in answer.configs}


async def describe(client: WireClient, resource: tuple[int, str], *names: str) -> Any:
    request = describing.DescribeConfigsRequest(
        resources=(
            describing.DescribeConfigsResource(
                resource_type=resource[0], resource_name=resource[1], configuration_keys=names or None
            ),
        ),
        include_synonyms=True,
        include_documentation=False,
    )
    (answer,) = (await client.ask(request)).results
    return answer
