"""DescribeConfigs (key 32), v1-4. All settings of a topic, broker or group with their sources, defaults included.

The broker name "" returns what was set for all brokers at run time. A group or a client metrics subscription need not
exist to have settings. Broker loggers are returned with their levels. A stored broker setting that this version does
not know is returned without its value, as in Apache Kafka: it may be a secret. Before v4 a resource with a value
longer than 32,767 bytes gets UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from kio.schema.describe_configs.v4.response import (
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.broker.config.effective_settings import accepted_settings, node_layers
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_names import topic_name_error
from penstock.cluster.topic_settings import (
    ConfigSource,
    ConfigSynonym,
    EffectiveSetting,
    effective_topic_settings,
)
from penstock.protocol.config_def import Setting, SettingType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

_COMPACT_STRINGS_FROM: Final = 4
_LEGACY_STRING_BYTES_MAX: Final = 32_767


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each resource is described as it is in its own step."""
    results = []
    for resource in request.resources:
        results.append(_describe(ctx, request, resource))
        yield
    return DescribeConfigsResponse(throttle_time=timedelta(0), results=tuple(results))


def _describe(ctx: RequestContext, request: Any, resource: Any) -> Any:
    error: ApiError | None = None
    configs: tuple[Any, ...] = ()
    try:
        configs = tuple(
            _entry(ctx, effective, read_only, request)
            for effective, read_only in _settings(ctx, resource.resource_type, resource.resource_name)
            # An empty list of names selects all, as null does.
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


def _settings(ctx: RequestContext, resource_type: int, name: str) -> Iterable[tuple[EffectiveSetting, bool]]:
    """Each setting with whether it is read-only."""
    match resource_type:
        case ResourceType.TOPIC:
            return [(effective, False) for effective in _topic_settings(ctx, name).values()]
        case ResourceType.BROKER if not name:
            return [(effective, effective.setting.read_only) for effective in _default_broker_settings(ctx)]
        case ResourceType.BROKER:
            _refuse_other_broker(ctx, name)
            return [(effective, effective.setting.read_only) for effective in _broker_settings(ctx)]
        case ResourceType.BROKER_LOGGER:
            if not name:
                raise ApiError(ErrorCode.invalid_request, "Broker id must not be empty")
            if name != str(ctx.services.node_id):
                message = f"Unexpected broker id, expected {ctx.services.node_id} but received {name}"
                raise ApiError(ErrorCode.invalid_request, message)
            return [(effective, False) for effective in _logger_levels()]
        case ResourceType.CLIENT_METRICS:
            return [(effective, False) for effective in _client_metrics(ctx, name)]
        case ResourceType.GROUP:
            return [(effective, False) for effective in _group_settings(ctx, name).values()]
        case ResourceType.TENANT:
            return [(effective, False) for effective in _tenant_settings(ctx, name).values()]
        case _:
            raise ApiError(ErrorCode.invalid_request, f"Unsupported resource type: {resource_type}")


def _topic_settings(ctx: RequestContext, topic: str) -> dict[str, EffectiveSetting]:
    if (flaw := topic_name_error(topic)) is not None:
        raise ApiError(ErrorCode.invalid_topic_exception, flaw)
    image = ctx.services.image
    if topic not in image.topics:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"The topic '{topic}' does not exist.")
    return effective_topic_settings(
        image.config(ResourceType.TOPIC, topic), node_layers(ctx.services.settings, image)
    )


def _group_settings(ctx: RequestContext, group_id: str) -> dict[str, EffectiveSetting]:
    from penstock.cluster.group_settings import effective_group_values

    if not group_id:
        raise ApiError(ErrorCode.invalid_request, "Group name must not be empty")
    image = ctx.services.image
    return effective_group_values(
        image.config(ResourceType.GROUP, group_id), node_layers(ctx.services.settings, image)
    )


def _tenant_settings(ctx: RequestContext, name: str) -> dict[str, EffectiveSetting]:
    from penstock.cluster.tenants import effective_tenant_settings

    stored = ctx.services.image.config(ResourceType.TENANT, name)
    if not stored:
        raise ApiError(ErrorCode.resource_not_found, f"Tenant {name} does not exist.")
    return effective_tenant_settings(stored)


def _logger_levels() -> Iterable[EffectiveSetting]:
    from penstock.broker.config.broker_loggers import logger_levels

    source = ConfigSource.DYNAMIC_BROKER_LOGGER
    for name, level in logger_levels().items():
        setting = Setting(name=name, type=SettingType.UNKNOWN, default=None, doc="")
        yield EffectiveSetting(setting, level, source, ())


def _client_metrics(ctx: RequestContext, name: str) -> Iterable[EffectiveSetting]:
    from penstock.cluster.client_metrics import effective_client_metrics

    if not name:
        message = "Client metrics subscription name must not be empty"
        raise ApiError(ErrorCode.invalid_request, message)
    return effective_client_metrics(ctx.services.image.config(ResourceType.CLIENT_METRICS, name)).values()


def _broker_settings(ctx: RequestContext) -> list[EffectiveSetting]:
    layers = node_layers(ctx.services.settings, ctx.services.image)
    found = []
    for name, setting in NODE_SETTINGS.items():
        synonyms = tuple(
            ConfigSynonym(name, layer.values[name], layer.source) for layer in layers if name in layer.values
        )
        source = synonyms[0].source if synonyms else ConfigSource.DEFAULT
        value = setting.parse(synonyms[0].text or "") if synonyms else None
        found.append(EffectiveSetting(setting, value, source, synonyms))
    return [*found, *_unknown_settings(ctx)]


def _unknown_settings(ctx: RequestContext) -> Iterable[EffectiveSetting]:
    stored: dict[str, list[ConfigSynonym]] = {}
    for resource, source in (
        (str(ctx.services.node_id), ConfigSource.DYNAMIC_BROKER),
        ("", ConfigSource.DYNAMIC_DEFAULT_BROKER),
    ):
        for name, text in ctx.services.image.config(ResourceType.BROKER, resource).items():
            if name not in NODE_SETTINGS:
                stored.setdefault(name, []).append(ConfigSynonym(name, text, source))
    for name, synonyms in stored.items():
        yield EffectiveSetting(_unknown_setting(name), None, synonyms[0].source, tuple(synonyms))


def _unknown_setting(name: str) -> Setting:
    return Setting(name=name, type=SettingType.UNKNOWN, default=None, doc="", read_only=True)


def _default_broker_settings(ctx: RequestContext) -> list[EffectiveSetting]:
    """Settings as they are stored, including invalid ones that have no effect."""
    source = ConfigSource.DYNAMIC_DEFAULT_BROKER
    stored = ctx.services.image.config(ResourceType.BROKER, "")
    usable = accepted_settings(stored)
    found = []
    for name, text in stored.items():
        setting = NODE_SETTINGS.get(name) or _unknown_setting(name)
        value = setting.parse(text) if name in usable else text
        found.append(EffectiveSetting(setting, value, source, (ConfigSynonym(name, text, source),)))
    return found


def _refuse_other_broker(ctx: RequestContext, name: str) -> None:
    if name != str(ctx.services.node_id):
        raise ApiError(
            ErrorCode.invalid_request,
            f"Unexpected broker id, expected {ctx.services.node_id} or empty string, but received {name}",
        )


def _refuse_too_long(ctx: RequestContext, effective: EffectiveSetting) -> None:
    """Raises ApiError: older versions cannot carry a long value, and a client might write a truncated one back."""
    texts = (effective.text, *(synonym.text for synonym in effective.synonyms))
    if ctx.version < _COMPACT_STRINGS_FROM and any(
        text is not None and len(text.encode()) > _LEGACY_STRING_BYTES_MAX for text in texts
    ):
        raise ApiError(
            ErrorCode.unsupported_version,
            f"The value of {effective.setting.name} is longer than {_LEGACY_STRING_BYTES_MAX} bytes: "
            f"it can be described from version {_COMPACT_STRINGS_FROM} of the request on.",
        )


def _entry(ctx: RequestContext, effective: EffectiveSetting, read_only: bool, request: Any) -> Any:
    _refuse_too_long(ctx, effective)
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
