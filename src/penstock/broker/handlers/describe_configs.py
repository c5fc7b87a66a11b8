"""DescribeConfigs (key 32), v1-4. Every setting of a topic, a broker or a group, defaults included, and its source.

A broker named "" gives what was set for all brokers at run time. A group or a client metrics subscription need not
exist to have settings. A broker's loggers are shown with their levels. A broker setting that is stored and that this
version does not know is shown without its value, as in Apache Kafka: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from kio.schema.describe_configs.v4.response import (
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)

from penstock.broker.context import RequestContext
from penstock.broker.dynamic_settings import usable_settings
from penstock.broker.settings_table import NODE_SETTINGS
from penstock.broker.topic_settings import node_layers
from penstock.cluster.effective import ConfigSource, Effective, Synonym, effective_topic_settings
from penstock.cluster.names import topic_name_flaw
from penstock.cluster.state import ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.settings import Setting, SettingType


def handle(ctx: RequestContext, request: Any) -> Any:
    return DescribeConfigsResponse(
        throttle_time=timedelta(0),
        results=tuple(_describe(ctx, request, resource) for resource in request.resources),
    )


def _describe(ctx: RequestContext, request: Any, resource: Any) -> Any:
    error: ApiError | None = None
    configs: tuple[Any, ...] = ()
    try:
        configs = tuple(
            _entry(effective, read_only, request)
            for effective, read_only in _settings(ctx, resource.resource_type, resource.resource_name)
            # An empty list of names asks for all, as null does.
            if not resource.configuration_keys or effective.setting.name in resource.configuration_keys
        )
    except ApiError as refusal:
        error = refusal
    return DescribeConfigsResult(
        error_code=error.code if error else ErrorCode.none,
        error_message=error.message if error else None,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
        configs=configs,
    )


def _settings(ctx: RequestContext, resource_type: int, name: str) -> Iterable[tuple[Effective, bool]]:
    """Each setting with whether it is read-only."""
    match resource_type:
        case ResourceType.TOPIC:
            return [(effective, False) for effective in _topic_settings(ctx, name).values()]
        case ResourceType.BROKER if not name:
            return [(effective, effective.setting.read_only) for effective in _cluster_wide(ctx)]
        case ResourceType.BROKER:
            _refuse_other_broker(ctx, name)
            return [(effective, effective.setting.read_only) for effective in _broker_settings(ctx)]
        case ResourceType.BROKER_LOGGER:
            if not name:
                raise ApiError(ErrorCode.invalid_request, "Broker id must not be empty")
            if name != str(ctx.node.node_id):
                message = f"Unexpected broker id, expected {ctx.node.node_id} but received {name}"
                raise ApiError(ErrorCode.invalid_request, message)
            return [(effective, False) for effective in _logger_levels()]
        case ResourceType.CLIENT_METRICS:
            return [(effective, False) for effective in _client_metrics(ctx, name)]
        case ResourceType.GROUP:
            return [(effective, False) for effective in _group_settings(ctx, name).values()]
        case _:
            raise ApiError(ErrorCode.invalid_request, f"Unsupported resource type: {resource_type}")


def _topic_settings(ctx: RequestContext, topic: str) -> dict[str, Effective]:
    if (flaw := topic_name_flaw(topic)) is not None:
        raise ApiError(ErrorCode.invalid_topic_exception, flaw)
    image = ctx.node.image
    if topic not in image.topics:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"The topic '{topic}' does not exist.")
    return effective_topic_settings(
        image.config(ResourceType.TOPIC, topic), node_layers(ctx.node.settings, image)
    )


def _group_settings(ctx: RequestContext, group_id: str) -> dict[str, Effective]:
    from penstock.cluster.group_settings import effective_group_values

    if not group_id:
        raise ApiError(ErrorCode.invalid_request, "Group name must not be empty")
    image = ctx.node.image
    return effective_group_values(
        image.config(ResourceType.GROUP, group_id), node_layers(ctx.node.settings, image)
    )


def _logger_levels() -> Iterable[Effective]:
    from penstock.broker.broker_loggers import logger_levels

    source = ConfigSource.DYNAMIC_BROKER_LOGGER
    for name, level in logger_levels().items():
        setting = Setting(name=name, type=SettingType.UNKNOWN, default=None, doc="")
        yield Effective(setting, level, source, ())


def _client_metrics(ctx: RequestContext, name: str) -> Iterable[Effective]:
    from penstock.cluster.client_metrics import effective_client_metrics

    if not name:
        message = "Client metrics subscription name must not be empty"
        raise ApiError(ErrorCode.invalid_request, message)
    return effective_client_metrics(ctx.node.image.config(ResourceType.CLIENT_METRICS, name)).values()


def _broker_settings(ctx: RequestContext) -> list[Effective]:
    layers = node_layers(ctx.node.settings, ctx.node.image)
    found = []
    for name, setting in NODE_SETTINGS.items():
        synonyms = tuple(
            Synonym(name, layer.values[name], layer.source) for layer in layers if name in layer.values
        )
        source = synonyms[0].source if synonyms else ConfigSource.DEFAULT
        value = setting.parse(synonyms[0].text or "") if synonyms else None
        found.append(Effective(setting, value, source, synonyms))
    return [*found, *_unknown_settings(ctx)]


def _unknown_settings(ctx: RequestContext) -> Iterable[Effective]:
    stored: dict[str, list[Synonym]] = {}
    for resource, source in (
        (str(ctx.node.node_id), ConfigSource.DYNAMIC_BROKER),
        ("", ConfigSource.DYNAMIC_DEFAULT_BROKER),
    ):
        for name, text in ctx.node.image.config(ResourceType.BROKER, resource).items():
            if name not in NODE_SETTINGS:
                stored.setdefault(name, []).append(Synonym(name, text, source))
    for name, synonyms in stored.items():
        yield Effective(_unknown(name), None, synonyms[0].source, tuple(synonyms))


def _unknown(name: str) -> Setting:
    return Setting(name=name, type=SettingType.UNKNOWN, default=None, doc="", read_only=True)


def _cluster_wide(ctx: RequestContext) -> list[Effective]:
    """As they are stored, also those that do not count."""
    source = ConfigSource.DYNAMIC_DEFAULT_BROKER
    stored = ctx.node.image.config(ResourceType.BROKER, "")
    usable = usable_settings(stored)
    found = []
    for name, text in stored.items():
        setting = NODE_SETTINGS.get(name) or _unknown(name)
        value = setting.parse(text) if name in usable else text
        found.append(Effective(setting, value, source, (Synonym(name, text, source),)))
    return found


def _refuse_other_broker(ctx: RequestContext, name: str) -> None:
    if name != str(ctx.node.node_id):
        raise ApiError(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected {ctx.node.node_id} or empty string, but received {name}",
        )


def _entry(effective: Effective, read_only: bool, request: Any) -> Any:
    is_logger = effective.source is ConfigSource.DYNAMIC_BROKER_LOGGER
    is_unknown = effective.setting.type is SettingType.UNKNOWN and not is_logger
    is_sensitive = is_unknown or effective.setting.type is SettingType.PASSWORD
    return DescribeConfigsResourceResult(
        name=effective.setting.name,
        value=None if is_sensitive else effective.text,
        read_only=read_only,
        config_source=effective.source,
        is_sensitive=is_sensitive,
        synonyms=tuple(
            DescribeConfigsSynonym(name=name, value=None if is_sensitive else text, source=source)
            for name, text, source in effective.synonyms
        )
        if request.include_synonyms
        else (),
        config_type=effective.setting.type,
        documentation=effective.setting.doc if request.include_documentation else None,
    )
