"""AlterConfigs and IncrementalAlterConfigs for topics, brokers, groups, client metrics and tenants.

A resource changes as a whole or not at all.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.cluster.client_metrics import CLIENT_METRICS_SETTINGS, validate_client_metrics
from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.partition_change import PartitionChanges, all_partitions
from penstock.cluster.group_settings import (
    GROUP_BOUNDS,
    GROUP_SETTINGS,
    clamp_to_bounds,
    validate_group_settings,
)
from penstock.cluster.image import ClusterImage, ConfigResource, ResourceType
from penstock.cluster.metadata_records import ConfigRecord
from penstock.cluster.tenants import TENANT_SETTINGS, validate_tenant
from penstock.cluster.topic_names import topic_name_error
from penstock.cluster.topic_settings import (
    FLUSH_POLICY,
    MIN_ISR,
    TOPIC_SETTINGS,
    ConfigLayer,
    effective_topic_setting,
    validate_topic_defaults,
    validate_topic_settings,
)
from penstock.protocol.config_def import InvalidSetting, Setting, SettingType, SettingValue
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


class ConfigOp(IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class ConfigChange(NamedTuple):
    name: str
    op: int
    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterConfigsResource:
    resource: ConfigResource
    changes: tuple[ConfigChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterConfigsResult:
    resource: ConfigResource
    error: ErrorCode = ErrorCode.none
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The broker settings that exist, and the node's config layers that topics inherit from.

    Super users cannot be users of a tenant: no rule and no namespace would hold for them.
    """

    node_settings: Mapping[str, Setting]
    node: tuple[ConfigLayer, ...] = ()
    super_users: frozenset[str] = frozenset()


_EVERY_BROKER: Final = ConfigResource(ResourceType.BROKER, "")
_PER_IP: Final = "max.connections.per.ip"
_PER_IP_OVERRIDES: Final = "max.connections.per.ip.overrides"
_RETENTION: Final = frozenset({"log.retention.ms", "log.retention.minutes", "log.retention.hours"})
_NODE_ID_DIGITS_MAX: Final = 10

Values = dict[str, str]
Merge = Callable[["_Resource", tuple[ConfigChange, ...]], Values]


def incremental_alter_configs(
    image: ClusterImage,
    resources: Sequence[AlterConfigsResource],
    *,
    rules: NodeConfig,
    validate_only: bool = False,
) -> Steps[Decision[tuple[AlterConfigsResult, ...]]]:
    """Keeps the settings that the request does not name."""
    return _alter_resources(image, resources, rules, validate_only, _merge_incrementally)


def replace_configs(
    image: ClusterImage,
    resources: Sequence[AlterConfigsResource],
    *,
    rules: NodeConfig,
    validate_only: bool = False,
) -> Steps[Decision[tuple[AlterConfigsResult, ...]]]:
    """The older AlterConfigs: settings that the request does not name go back to their defaults."""
    return _alter_resources(image, resources, rules, validate_only, _replace)


def _alter_resources(
    image: ClusterImage,
    resources: Sequence[AlterConfigsResource],
    rules: NodeConfig,
    validate_only: bool,
    merge: Merge,
) -> Steps[Decision[tuple[AlterConfigsResult, ...]]]:
    asked = Counter(item.resource for item in resources)
    tenants = sum(resource.type == ResourceType.TENANT for resource in asked)
    records: list[ConfigRecord] = []
    results: list[AlterConfigsResult] = []
    for item in resources:
        try:
            if asked[item.resource] > 1:
                raise ApiError(ErrorCode.invalid_request, "Each resource must appear at most once.")
            if item.resource.type == ResourceType.TENANT and tenants > 1:
                # Tenants of one request are not compared with each other, and two must not overlap.
                raise ApiError(ErrorCode.invalid_request, "A request may alter only one tenant.")
            records += _alter_one(image, item, rules, merge)
            results.append(AlterConfigsResult(resource=item.resource))
        except ApiError as error:
            results.append(
                AlterConfigsResult(resource=item.resource, error=error.code, message=error.message)
            )
        yield
    changes = yield from _drop_eligible_replicas(image, records, rules)
    if validate_only:
        return Decision((), tuple(results))
    return changes.decision(tuple(results), first=records)


def _drop_eligible_replicas(
    image: ClusterImage, records: Sequence[ConfigRecord], rules: NodeConfig
) -> Steps[PartitionChanges]:
    """Drops the eligible leader replicas where min.insync.replicas changes.

    With a lower value the leader may advance the high watermark without them. A partition without a leader keeps them:
    its high watermark cannot advance.
    """
    changes = PartitionChanges(image, ControllerConfig(node=rules.node))
    names = {record.resource_name for record in records if record.name == MIN_ISR}
    for_all = any(
        record.name == MIN_ISR and record.resource_type == ResourceType.BROKER for record in records
    )
    for topic, index, partition in all_partitions(image) if names else ():
        if (for_all or topic.name in names) and partition.elr and partition.has_leader:
            change = changes.of(topic, index)
            change.drop_eligible()
            changes.add(change)
        yield
    return changes


def _alter_one(
    image: ClusterImage, item: AlterConfigsResource, rules: NodeConfig, merge: Merge
) -> list[ConfigRecord]:
    _refuse_malformed(item.changes)
    resource = _resource(image, item.resource, item.changes, rules)
    current = image.configs.get(item.resource, {})
    wanted = merge(resource, item.changes)
    # A stored value that this version does not accept (another version wrote it) stays until a request names it. It is
    # no reason to refuse other changes.
    resource.validate(
        {
            name: text
            for name, text in wanted.items()
            if current.get(name) != text or resource.accepts(name, text)
        }
    )
    if item.resource == _EVERY_BROKER and MIN_ISR in current and MIN_ISR not in wanted:
        # Otherwise the values of the individual brokers, which may differ, would apply again.
        message = f"Cluster-level {MIN_ISR} cannot be removed while ELR is enabled."
        raise ApiError(ErrorCode.invalid_config, message)
    # Sorted by name, so that the same request always gives the same records.
    return [
        ConfigRecord(
            resource_type=item.resource.type,
            resource_name=item.resource.name,
            name=name,
            value=wanted.get(name),
        )
        for name in sorted({*current, *wanted})
        if current.get(name) != wanted.get(name)
    ]


def _refuse_malformed(changes: tuple[ConfigChange, ...]) -> None:
    if len({change.name for change in changes}) != len(changes):
        raise ApiError(ErrorCode.invalid_request, "Error due to duplicate config keys")
    nulls = [change.name for change in changes if change.value is None and change.op != ConfigOp.DELETE]
    if nulls:
        raise ApiError(ErrorCode.invalid_request, f"Null value not supported for : {', '.join(nulls)}")
    for change in changes:
        if change.op not in ConfigOp.__members__.values():
            raise ApiError(ErrorCode.invalid_request, f"Unknown operations type {change.op}")


def _replace(_: "_Resource", changes: tuple[ConfigChange, ...]) -> Values:
    return {change.name: change.value for change in changes if change.value is not None}


def _merge_incrementally(resource: "_Resource", changes: tuple[ConfigChange, ...]) -> Values:
    values = dict(resource.current)
    for change in changes:
        if change.op == ConfigOp.DELETE:
            values.pop(change.name, None)
            continue
        assert change.value is not None
        if change.op == ConfigOp.SET:
            values[change.name] = change.value
        else:
            values[change.name] = _merge_list(resource, change.name, ConfigOp(change.op), change.value)
    return values


def _merge_list(resource: "_Resource", name: str, op: ConfigOp, text: str) -> str:
    setting = resource.settings.get(name)
    if setting is None or setting.type is not SettingType.LIST:
        raise ApiError(
            ErrorCode.invalid_config, f"Can't {op.name} to key {name} because its type is not LIST."
        )
    own = resource.current.get(name)
    is_usable = own is not None and resource.accepts(name, own)
    now = setting.parse(own) if own is not None and is_usable else resource.default(name)
    assert isinstance(now, tuple)
    items = [item.strip() for item in text.split(",")]
    if op is ConfigOp.APPEND:
        return ",".join(dict.fromkeys((*now, *items)))
    return ",".join(item for item in now if item not in items)


class _Resource(ABC):
    """The settings, defaults and validation of one resource type."""

    settings: Mapping[str, Setting]

    def __init__(self, current: Mapping[str, str], rules: NodeConfig) -> None:
        self.current = current
        self.rules = rules

    def accepts(self, name: str, text: str) -> bool:
        setting = self.settings.get(name)
        return setting is not None and setting.accepts(text)

    @abstractmethod
    def default(self, name: str) -> SettingValue: ...

    @abstractmethod
    def validate(self, values: Mapping[str, str]) -> None: ...


class _TopicResource(_Resource):
    settings = TOPIC_SETTINGS

    def default(self, name: str) -> SettingValue:
        return effective_topic_setting(name, {}, self.rules.node).value

    def validate(self, values: Mapping[str, str]) -> None:
        validate_topic_settings(values, self.rules.node)


class _BrokerResource(_Resource):
    def __init__(self, current: Mapping[str, str], rules: NodeConfig) -> None:
        super().__init__(current, rules)
        self.settings = rules.node_settings

    def default(self, name: str) -> SettingValue:
        return self.settings[name].default

    def validate(self, values: Mapping[str, str]) -> None:
        """Raises INVALID_REQUEST for a bad broker value, as Apache Kafka does (KAFKA-13609)."""
        fixed = [name for name in values if name in self.settings and self.settings[name].read_only]
        if fixed:
            names = ", ".join(fixed)
            raise ApiError(ErrorCode.invalid_request, f"Cannot update these configs dynamically: [{names}]")
        for name, text in values.items():
            if name not in self.settings:
                raise ApiError(ErrorCode.invalid_request, f"Unknown broker config name: {name}")
            try:
                self.settings[name].parse(text)
                validate_topic_defaults({name: text})
            except InvalidSetting as error:
                raise ApiError(ErrorCode.invalid_request, str(error)) from None
            _refuse_lockout(name, text, values)
            self._refuse_beyond_bounds(name, text)

    def _refuse_beyond_bounds(self, name: str, text: str) -> None:
        """Refuses a group default that no single group could be given."""
        of_group = name.removeprefix("group.")
        if name != of_group and of_group in GROUP_BOUNDS:
            value = self.settings[name].parse(text)
            if (held := clamp_to_bounds(of_group, value, self.rules.node)) != value:
                message = f"{name} must be within the bounds that brokers have for {of_group} ({held})"
                raise ApiError(ErrorCode.invalid_request, message)


def _refuse_lockout(name: str, text: str, values: Mapping[str, str]) -> None:
    """Refuses the zeros that Apache Kafka refuses. With 0 connections on all brokers no client could undo it."""
    if text.strip().lstrip("+-").strip("0"):
        return  # not 0
    if name == _PER_IP and not values.get(_PER_IP_OVERRIDES, "").strip(", "):
        message = f"{_PER_IP} can be set to zero only if {_PER_IP_OVERRIDES} property is set."
        raise ApiError(ErrorCode.invalid_request, message)
    if name == "max.connections":
        raise ApiError(ErrorCode.invalid_request, "Invalid max.connections 0: no client could connect")
    if name in _RETENTION:
        message = f"{name} must be unlimited (-1) or, greater than or equal to 1"
        raise ApiError(ErrorCode.invalid_request, message)


class _ClientMetricsResource(_Resource):
    """A subscription exists as long as it has a setting."""

    settings = CLIENT_METRICS_SETTINGS

    def default(self, name: str) -> SettingValue:
        return self.settings[name].default

    def validate(self, values: Mapping[str, str]) -> None:
        validate_client_metrics(values)


class _GroupResource(_Resource):
    """Settings may be stored for a group that does not exist yet."""

    settings = GROUP_SETTINGS

    def default(self, name: str) -> SettingValue:
        return self.settings[name].default

    def validate(self, values: Mapping[str, str]) -> None:
        validate_group_settings(values, self.rules.node)


class _TenantResource(_Resource):
    """A tenant exists as long as it has settings."""

    settings = TENANT_SETTINGS

    def __init__(
        self, current: Mapping[str, str], rules: NodeConfig, *, image: ClusterImage, name: str
    ) -> None:
        super().__init__(current, rules)
        self._image = image
        self._name = name

    def default(self, name: str) -> SettingValue:
        return self.settings[name].default

    def validate(self, values: Mapping[str, str]) -> None:
        validate_tenant(self._image, self._name, values, super_users=self.rules.super_users)


def _resource(
    image: ClusterImage, resource: ConfigResource, changes: tuple[ConfigChange, ...], rules: NodeConfig
) -> _Resource:
    current = image.configs.get(resource, {})
    match resource.type:
        case ResourceType.TOPIC:
            _refuse_unknown_topic(image, resource.name)
            return _TopicResource(current, rules)
        case ResourceType.BROKER:
            _refuse_unknown_broker(image, resource.name)
            _refuse_for_one_broker(resource.name, changes)
            return _BrokerResource(current, rules)
        case ResourceType.GROUP:
            if not resource.name:
                raise ApiError(ErrorCode.invalid_request, "Default group resources are not allowed.")
            return _GroupResource(current, rules)
        case ResourceType.CLIENT_METRICS:
            if not resource.name:
                raise ApiError(ErrorCode.invalid_request, "Subscription name can't be empty")
            return _ClientMetricsResource(current, rules)
        case ResourceType.TENANT:
            return _TenantResource(current, rules, image=image, name=resource.name)
        case _:
            raise ApiError(ErrorCode.invalid_request, f"Unknown resource type {resource.type}")


def _refuse_for_one_broker(name: str, changes: tuple[ConfigChange, ...]) -> None:
    """The controller uses these settings to decide which replicas are eligible, so all leaders must use the same."""
    for change in changes:
        if name and change.name in (MIN_ISR, FLUSH_POLICY) and change.value is not None:
            message = f"Broker-level {change.name} cannot be altered while ELR is enabled."
            raise ApiError(ErrorCode.invalid_config, message)


def _refuse_unknown_topic(image: ClusterImage, name: str) -> None:
    if not name:
        raise ApiError(ErrorCode.invalid_request, "Default topic resources are not allowed.")
    if (flaw := topic_name_error(name)) is not None:
        raise ApiError(ErrorCode.invalid_topic_exception, flaw)
    if name not in image.topics:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"The topic '{name}' does not exist.")


def _refuse_unknown_broker(image: ClusterImage, name: str) -> None:
    if not name:
        return
    if parse_node_id(name) not in image.brokers:
        raise ApiError(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected one of {sorted(image.brokers)}, but received {name}",
        )


def parse_node_id(name: str) -> int:
    """The broker id that a resource is named after. Raises INVALID_REQUEST."""
    if not (name.isascii() and name.isdecimal() and len(name) <= _NODE_ID_DIGITS_MAX):
        raise ApiError(ErrorCode.invalid_request, f"Node id must be an integer, but it is: {name}")
    return int(name)
