"""AlterConfigs and IncrementalAlterConfigs."""

import pytest
from tests.unit.cluster.clusters import cluster, create

from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    NodeConfig,
    incremental_alter_configs,
    replace_configs,
)
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ClusterImage, ConfigResource, ResourceType
from penstock.cluster.topic_settings import ConfigLayer, ConfigSource
from penstock.protocol.config_def import Setting, SettingType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import finish

NODE_SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(name="log.segment.bytes", type=SettingType.INT, default=1 << 30, doc="", at_least=14),
        Setting(name="log.cleanup.policy", type=SettingType.LIST, default=("delete",), doc=""),
        Setting(name="node.id", type=SettingType.INT, default=1, doc="", read_only=True),
    )
}
RULES = NodeConfig(node_settings=NODE_SETTINGS)
TOPIC = ConfigResource(ResourceType.TOPIC, "t")
SET, DELETE, APPEND, SUBTRACT = ConfigOp.SET, ConfigOp.DELETE, ConfigOp.APPEND, ConfigOp.SUBTRACT


def image_with_topic(**configs: str) -> ClusterImage:
    image = cluster()
    create(image, NewTopic(name="t", configs=tuple((k.replace("_", "."), v) for k, v in configs.items())))
    return image


def alter(
    image: ClusterImage, *changes: ConfigChange, resource: ConfigResource = TOPIC, rules: NodeConfig = RULES
) -> tuple[ErrorCode, str | None]:
    decision = finish(
        incremental_alter_configs(
            image, [AlterConfigsResource(resource=resource, changes=changes)], rules=rules
        )
    )
    image.apply(decision.records)
    image.check_invariants()
    return decision.reply[0].error, decision.reply[0].message


def test_what_is_not_named_stays() -> None:
    image = image_with_topic(retention_ms="5", segment_ms="7")
    assert alter(image, ConfigChange("retention.ms", SET, "6")) == (ErrorCode.none, None)
    assert image.configs[TOPIC] == {"retention.ms": "6", "segment.ms": "7"}


def test_a_deleted_setting_goes_back_to_its_default() -> None:
    image = image_with_topic(retention_ms="5")
    assert alter(image, ConfigChange("retention.ms", DELETE, None)) == (ErrorCode.none, None)
    assert TOPIC not in image.configs


def test_deleting_what_is_not_set_is_no_error() -> None:
    image = image_with_topic()
    assert alter(image, ConfigChange("retention.ms", DELETE, None)) == (ErrorCode.none, None)


def test_lists_grow_and_shrink() -> None:
    image = image_with_topic()
    alter(image, ConfigChange("cleanup.policy", APPEND, "compact"))
    assert image.configs[TOPIC]["cleanup.policy"] == "delete,compact"
    alter(image, ConfigChange("cleanup.policy", APPEND, "compact,delete"))
    assert image.configs[TOPIC]["cleanup.policy"] == "delete,compact"
    alter(image, ConfigChange("cleanup.policy", SUBTRACT, "delete"))
    assert image.configs[TOPIC]["cleanup.policy"] == "compact"


def test_a_list_that_is_not_set_grows_from_the_nodes_value() -> None:
    image = image_with_topic()
    node = ConfigLayer(ConfigSource.STATIC_BROKER, {"log.cleanup.policy": "compact"})
    rules = NodeConfig(node_settings=NODE_SETTINGS, node=(node,))
    alter(image, ConfigChange("cleanup.policy", APPEND, "delete"), rules=rules)
    assert image.configs[TOPIC]["cleanup.policy"] == "compact,delete"


def test_an_unchanged_setting_needs_no_record() -> None:
    image = image_with_topic(retention_ms="5")
    change = AlterConfigsResource(resource=TOPIC, changes=(ConfigChange("retention.ms", SET, "5"),))
    assert finish(incremental_alter_configs(image, [change], rules=RULES)).records == ()


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (ConfigChange("retention", SET, "1"), ErrorCode.invalid_config, "Unknown topic config name"),
        (ConfigChange("retention.ms", SET, "x"), ErrorCode.invalid_config, "whole number"),
        (ConfigChange("retention.ms", SET, None), ErrorCode.invalid_request, "Null value not supported"),
        (ConfigChange("retention.ms", APPEND, "1"), ErrorCode.invalid_config, "not LIST"),
        (ConfigChange("nope", SUBTRACT, "1"), ErrorCode.invalid_config, "not LIST"),
        (ConfigChange("retention.ms", 9, "1"), ErrorCode.invalid_request, "Unknown operations type 9"),
        (ConfigChange("min.compaction.lag.ms", SET, "11"), ErrorCode.invalid_config, "conflict"),
    ],
)
def test_a_wrong_change_changes_nothing(change: ConfigChange, code: ErrorCode, reason: str) -> None:
    image = image_with_topic(max_compaction_lag_ms="10")
    error, message = alter(image, ConfigChange("segment.ms", SET, "9"), change)
    assert error is code
    assert message is not None
    assert reason in message
    assert image.configs[TOPIC] == {"max.compaction.lag.ms": "10"}


def test_a_setting_may_be_named_once() -> None:
    image = image_with_topic()
    changes = (ConfigChange("retention.ms", SET, "1"), ConfigChange("retention.ms", SET, "2"))
    assert alter(image, *changes) == (ErrorCode.invalid_request, "Error due to duplicate config keys")


@pytest.mark.parametrize(
    ("resource", "code"),
    [
        (ConfigResource(ResourceType.TOPIC, "other"), ErrorCode.unknown_topic_or_partition),
        (ConfigResource(ResourceType.TOPIC, ""), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.TOPIC, "a b"), ErrorCode.invalid_topic_exception),
        (ConfigResource(ResourceType.BROKER, "one"), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.BROKER, "-1"), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.BROKER, "2"), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.GROUP, ""), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.CLIENT_METRICS, ""), ErrorCode.invalid_request),
        (ConfigResource(ResourceType.BROKER_LOGGER, "1"), ErrorCode.invalid_request),
        (ConfigResource(99, "x"), ErrorCode.invalid_request),
    ],
)
def test_what_has_no_settings_is_refused(resource: ConfigResource, code: ErrorCode) -> None:
    assert alter(image_with_topic(), resource=resource)[0] is code


@pytest.mark.parametrize("name", ["1", ""])
def test_brokers_change_one_by_one_or_all_together(name: str) -> None:
    image, resource = cluster(), ConfigResource(ResourceType.BROKER, name)
    change = ConfigChange("log.segment.bytes", SET, "1000")
    assert alter(image, change, resource=resource) == (ErrorCode.none, None)
    assert image.config(ResourceType.BROKER, name) == {"log.segment.bytes": "1000"}
    alter(image, ConfigChange("log.cleanup.policy", APPEND, "compact"), resource=resource)
    assert image.config(ResourceType.BROKER, name)["log.cleanup.policy"] == "delete,compact"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (ConfigChange("node.id", SET, "2"), "Cannot update these configs dynamically"),
        (ConfigChange("log.segment.bytes", SET, "1"), "must be at least 14"),
        (ConfigChange("segment.bytes", SET, "1000"), "Unknown broker config name"),
    ],
)
def test_what_a_broker_cannot_change_is_refused(change: ConfigChange, reason: str) -> None:
    error, message = alter(cluster(), change, resource=ConfigResource(ResourceType.BROKER, "1"))
    assert error is ErrorCode.invalid_request
    assert message is not None
    assert reason in message


@pytest.mark.parametrize(("name", "value"), [("min.insync.replicas", "1"), ("penstock.flush", "never")])
def test_what_the_controller_trusts_replicas_by_is_not_changed_for_one_broker(name: str, value: str) -> None:
    image, change = cluster(), ConfigChange(name, SET, value)
    error, _ = alter(image, change, resource=ConfigResource(ResourceType.BROKER, "1"))
    assert error is ErrorCode.invalid_config
    assert not image.config(ResourceType.BROKER, "1")


def test_a_resource_named_twice_changes_neither_time() -> None:
    image = image_with_topic()
    item = AlterConfigsResource(resource=TOPIC, changes=(ConfigChange("retention.ms", SET, "1"),))
    decision = finish(incremental_alter_configs(image, [item, item], rules=RULES))
    assert decision.records == ()
    assert [result.error for result in decision.reply] == [ErrorCode.invalid_request] * 2


def test_replacing_drops_what_is_not_named() -> None:
    image = image_with_topic(retention_ms="5", segment_ms="7")
    item = AlterConfigsResource(resource=TOPIC, changes=(ConfigChange("retention.ms", SET, "6"),))
    decision = finish(replace_configs(image, [item], rules=RULES))
    image.apply(decision.records)
    assert decision.reply[0].error is ErrorCode.none
    assert image.configs[TOPIC] == {"retention.ms": "6"}


def test_validating_changes_nothing() -> None:
    image = image_with_topic(retention_ms="5")
    item = AlterConfigsResource(resource=TOPIC, changes=())
    for alteration in (replace_configs, incremental_alter_configs):
        decision = finish(alteration(image, [item], rules=RULES, validate_only=True))
        assert (decision.records, decision.reply[0].error) == ((), ErrorCode.none)
