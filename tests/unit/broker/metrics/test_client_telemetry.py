"""Client metrics (KIP-714): subscriptions, which client is asked for which metrics, and which pushes are accepted."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kio.schema.api_versions.v4.request import ApiVersionsRequest
from kio.schema.get_telemetry_subscriptions.v0.request import GetTelemetrySubscriptionsRequest
from kio.schema.list_config_resources.v1.request import ListConfigResourcesRequest
from kio.schema.push_telemetry.v0.request import PushTelemetryRequest
from tests.unit.broker.config.config_requests import alter, described
from tests.unit.broker.raw_client import running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.cluster.controller import alter_configs
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import ConfigSource
from penstock.protocol.errors import ErrorCode

OK = (ErrorCode.none, None)
FIVE_MINUTES = timedelta(minutes=5)


def subscription(name: str) -> tuple[int, str]:
    return ResourceType.CLIENT_METRICS, name


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, telemetry_max_bytes="1000") as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[WireClient]:
    client = await WireClient.connect(node)
    await client.ask(ApiVersionsRequest(client_software_name="test-lib", client_software_version="1.2"))
    yield client
    await client.close()


async def get(client: WireClient, instance_id: UUID | None = None) -> Any:
    answer = await client.ask(GetTelemetrySubscriptionsRequest(client_instance_id=instance_id))
    assert answer.error_code is ErrorCode.none
    return answer


async def push(client: WireClient, got: Any, **changes: Any) -> ErrorCode:
    fields: dict[str, Any] = {
        "client_instance_id": got.client_instance_id,
        "subscription_id": got.subscription_id,
        "terminating": False,
        "compression_type": 0,
        "metrics": b"x" * 100,
    }
    answer = await client.ask(PushTelemetryRequest(**fields | changes))
    return answer.error_code  # type: ignore[no-any-return]


async def test_without_a_subscription_nothing_is_wanted(client: WireClient) -> None:
    answer = await get(client)
    assert answer.client_instance_id.int
    assert (answer.requested_metrics, answer.push_interval) == ((), FIVE_MINUTES)
    assert (await get(client, answer.client_instance_id)).client_instance_id == answer.client_instance_id


async def test_clients_are_offered_the_requests_only_while_a_subscription_is_defined(
    client: WireClient,
) -> None:
    """Every librdkafka client that is offered them asks at once, and logs that it has got an id."""

    async def offered() -> set[int]:
        request = ApiVersionsRequest(client_software_name="test-lib", client_software_version="1.2")
        return {api.api_key for api in (await client.ask(request)).api_keys} & {71, 72}

    assert await offered() == set()
    assert await alter(client, subscription("all"), {"metrics": "*"}) == OK
    assert await offered() == {71, 72}


async def test_a_subscription_is_shown_with_its_defaults_and_listed_while_it_has_settings(
    client: WireClient,
) -> None:
    everything = ListConfigResourcesRequest(resource_types=(ResourceType.CLIENT_METRICS,))
    assert await alter(client, subscription("all"), {"metrics": "*"}) == OK
    shown = await described(client, subscription("all"))
    assert {name: (c.value, c.config_source) for name, c in shown.items()} == {
        "interval.ms": ("300000", ConfigSource.DEFAULT),
        "match": ("", ConfigSource.DEFAULT),
        "metrics": ("*", ConfigSource.CLIENT_METRICS),
    }
    listed = (await client.ask(everything)).config_resources
    assert [(r.resource_type, r.resource_name) for r in listed] == [subscription("all")]
    assert await alter(client, subscription("all"), {"metrics": None}) == OK
    assert not (await client.ask(everything)).config_resources


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"interval.ms": "99"}, ErrorCode.invalid_request),
        ({"interval.ms": "3600001"}, ErrorCode.invalid_request),
        ({"interval.ms": "often"}, ErrorCode.invalid_config),
        ({"match": "nobody=x"}, ErrorCode.invalid_config),
        ({"match": "client_id=["}, ErrorCode.invalid_config),
        ({"match": "client_id"}, ErrorCode.invalid_config),
        # What takes more than linear time to match is not of RE2's syntax.
        ({"match": r"client_id=(a*)\1"}, ErrorCode.invalid_config),
        ({"match": "client_id=" + "a" * 4097}, ErrorCode.invalid_config),
        ({"unknown": "1"}, ErrorCode.invalid_request),
    ],
)
async def test_subscriptions_that_make_no_sense_are_refused(
    node: Node, client: WireClient, changes: dict[str, str | None], error: ErrorCode
) -> None:
    assert (await alter(client, subscription("s"), changes))[0] is error
    assert (await alter(client, subscription(""), {"metrics": "*"}))[0] is ErrorCode.invalid_request
    assert node.image.configs == {}


async def test_the_subscriptions_that_match_are_put_together(client: WireClient) -> None:
    given: dict[str, dict[str, str | None]] = {
        "mine": {
            "metrics": "a.,b.",
            "interval.ms": "2000",
            "match": "client_software_name=test-.*,client_id=test",
        },
        "wider": {"metrics": "b.,c.", "interval.ms": "5000", "match": "client_source_address=127.*"},
        "other": {"metrics": "d.", "interval.ms": "100", "match": "client_software_version=2.*"},
    }
    for name, settings in given.items():
        assert await alter(client, subscription(name), settings) == OK
    answer = await get(client)
    assert answer.requested_metrics == ("a.", "b.", "c.")
    assert answer.push_interval == timedelta(seconds=2)
    assert answer.telemetry_max_bytes == 1000
    assert await alter(client, subscription("wider"), {"metrics": "*"}) == OK
    assert (await get(client, answer.client_instance_id)).requested_metrics == ("",), "all of them"


async def test_no_expression_of_a_subscription_holds_up_the_node(client: WireClient) -> None:
    """Python's own `re` takes years to find that the name of this client's library does not match."""
    evil = "client_software_name=(a|aa)+c"
    assert await alter(client, subscription("evil"), {"metrics": "*", "match": evil}) == OK
    await client.ask(ApiVersionsRequest(client_software_name="a" * 200, client_software_version="1"))
    assert (await get(client)).requested_metrics == ()


async def test_a_subscription_that_another_version_has_stored_is_ignored(
    client: WireClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alter_configs, "validate_client_metrics", lambda values: None)
    assert await alter(client, subscription("new"), {"metrics": "a.", "match": "client_rack=r1"}) == OK
    assert await alter(client, subscription("ours"), {"metrics": "b."}) == OK
    offered = await client.ask(ApiVersionsRequest(client_software_name="test", client_software_version="1"))
    assert offered.error_code is ErrorCode.none
    assert (await get(client)).requested_metrics == ("b.",)
    assert "client metrics subscription new is ignored" in caplog.text


async def test_pushes_are_bounded_and_counted(
    node: Node, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = node.environment.now_ms()
    monkeypatch.setattr(node.environment, "now_ms", lambda: now_ms)
    assert await alter(client, subscription("all"), {"metrics": "*", "interval.ms": "1000"}) == OK
    got = await get(client)
    assert await push(client, got, client_instance_id=None) is ErrorCode.invalid_request
    assert await push(client, got, client_instance_id=UUID(int=7)) is ErrorCode.unknown_subscription_id
    wrong = (got.subscription_id + 1) % 2**31
    assert await push(client, got, subscription_id=wrong) is ErrorCode.unknown_subscription_id
    assert node.telemetry().pushes == 0
    assert await push(client, got) is ErrorCode.none
    assert await push(client, got) is ErrorCode.throttling_quota_exceeded
    now_ms += 1000
    assert await push(client, got, metrics=b"x" * 1001) is ErrorCode.telemetry_too_large
    now_ms += 1000
    assert await push(client, got, compression_type=9) is ErrorCode.unsupported_compression_type
    now_ms += 1000
    assert await push(client, got, compression_type=4) is ErrorCode.none
    assert await push(client, got, terminating=True) is ErrorCode.none, "the last one may come early"
    now_ms += 1000
    assert await push(client, got) is ErrorCode.invalid_request
    telemetry = node.telemetry()
    assert (telemetry.clients, telemetry.pushes, telemetry.bytes_pushed) == (1, 3, 300)


async def test_a_changed_subscription_has_to_be_asked_for_again(client: WireClient) -> None:
    assert await alter(client, subscription("all"), {"metrics": "a."}) == OK
    got = await get(client)
    assert await alter(client, subscription("all"), {"metrics": "b."}) == OK
    assert await push(client, got) is ErrorCode.unknown_subscription_id
    again = await get(client, got.client_instance_id)
    assert again.requested_metrics == ("b.",)
    assert await push(client, again) is ErrorCode.none


async def test_clients_are_remembered_within_a_bound(
    node: Node, client: WireClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.metrics.client_telemetry._CLIENTS_MAX", 3)
    got = [await get(client) for _ in range(5)]
    assert node.telemetry().clients == 3
    assert await push(client, got[0]) is ErrorCode.unknown_subscription_id
