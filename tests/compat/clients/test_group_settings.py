"""Settings of groups through the clients that can change them."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource
from kafka import KafkaAdminClient
from kafka.admin import AlterConfigOp
from kafka.admin import ConfigResource as PythonResource
from tests.waiting import eventually

TIMEOUT_S = 60.0
GROUP = ConfigResource.Type.GROUP
LIMIT = "share.delivery.count.limit"


def settings_of(admin: AdminClient, group: str) -> dict[str, ConfigEntry]:
    [future] = admin.describe_configs([ConfigResource(GROUP, group)]).values()
    described: dict[str, ConfigEntry] = future.result(TIMEOUT_S)
    return described


def alter(admin: AdminClient, group: str, name: str, value: str | None, operation: AlterConfigOpType) -> Any:
    entry = ConfigEntry(name, value, incremental_operation=operation)
    resource = ConfigResource(GROUP, group, incremental_configs=[entry])
    return admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)


def test_with_confluent(admin: AdminClient, unique: Callable[[str], str]) -> None:
    group = unique("group")
    before = settings_of(admin, group)[LIMIT]
    assert (before.value, before.source) == ("5", ConfigSource.DEFAULT_CONFIG.value)
    alter(admin, group, LIMIT, "7", AlterConfigOpType.SET)
    eventually(lambda: settings_of(admin, group)[LIMIT].value == "7")
    assert settings_of(admin, group)[LIMIT].source == 8, "that is: of the group"
    with pytest.raises(KafkaException) as refused:
        alter(admin, group, LIMIT, "11", AlterConfigOpType.SET)
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG
    assert "group.share.max.delivery.count.limit" in refused.value.args[0].str()
    alter(admin, group, LIMIT, None, AlterConfigOpType.DELETE)
    eventually(lambda: settings_of(admin, group)[LIMIT].value == "5")


def test_with_kafka_python(python_admin: KafkaAdminClient, unique: Callable[[str], str]) -> None:
    group = unique("group")

    def settings(which: str = "all") -> dict[str, Any]:
        described = python_admin.describe_configs([PythonResource("GROUP", group)], config_filter=which)
        found: dict[str, Any] = described["group"][group]
        return found

    assert settings()["share.auto.offset.reset"]["value"] == "latest"
    change = PythonResource("GROUP", group, {"share.auto.offset.reset": "by_duration:PT1H", LIMIT: "3"})
    assert python_admin.alter_configs([change]) == {"group": {group: "OK"}}
    eventually(lambda: settings()[LIMIT]["value"] == "3")
    assert settings("modified").keys() == {"share.auto.offset.reset", LIMIT}
    assert group in python_admin.list_config_resources(["GROUP"])["group"]
    refused = python_admin.alter_configs([PythonResource("GROUP", group, {LIMIT: "1"})])["group"][group]
    assert "group.share.min.delivery.count.limit" in refused
    removal = PythonResource("GROUP", group, {LIMIT: (AlterConfigOp.DELETE, None)})
    python_admin.alter_configs([removal])
    eventually(lambda: settings()[LIMIT]["value"] == "5")
