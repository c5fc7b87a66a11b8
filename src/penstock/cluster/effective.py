"""The value a setting really has: the strongest layer that sets it, and the others behind it."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.cluster.declaring import NodeSynonym
from penstock.cluster.topic_settings import NODE_SYNONYMS, TOPIC_SETTINGS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.settings import InvalidSetting, Setting, Value


class ConfigSource(IntEnum):
    """Numbered as DescribeConfigs reports them."""

    UNKNOWN = 0
    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    DYNAMIC_BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    GROUP = 8


class Layer(NamedTuple):
    """Some settings as text, all from one source."""

    source: ConfigSource
    values: Mapping[str, str]


class Synonym(NamedTuple):
    name: str
    text: str | None
    source: ConfigSource


class Effective(NamedTuple):
    setting: Setting
    value: Value
    source: ConfigSource
    synonyms: tuple[Synonym, ...]  # the first is the one that counts

    @property
    def text(self) -> str | None:
        return self.setting.text(self.value)


#: A node that sets nothing: topics have their own defaults.
NO_NODE: Final[tuple[Layer, ...]] = ()


def effective_topic_settings(
    overrides: Mapping[str, str], node: Iterable[Layer] = NO_NODE
) -> dict[str, Effective]:
    """Every topic setting. `node` is the node's layers, strongest first."""
    layers = tuple(node)
    return {name: _effective(setting, overrides, layers) for name, setting in TOPIC_SETTINGS.items()}


def effective_setting(
    setting: Setting,
    overrides: Mapping[str, str],
    node: tuple[Layer, ...],
    *,
    synonyms: tuple[NodeSynonym, ...],
    own: ConfigSource,
) -> Effective:
    """One setting of any resource: `overrides` are the resource's own values, which come from `own`."""
    behind = tuple(_node_synonyms(synonyms, node))
    if (text := overrides.get(setting.name)) is not None:
        try:
            value = setting.parse(text)
        except InvalidSetting:
            pass  # stored by another version: it counts for nothing
        else:
            mine = Synonym(setting.name, setting.text(value), own)
            return Effective(setting, value, own, (mine, *(synonym for synonym, _ in behind)))
    for rank, (strongest, factor) in enumerate(behind):
        assert strongest.text is not None
        try:
            value = _in_unit(setting.parse(strongest.text), factor)
        except InvalidSetting:
            # Nodes once took values that no topic can have: one that was stored then counts for nothing.
            continue
        return Effective(setting, value, strongest.source, tuple(synonym for synonym, _ in behind[rank:]))
    return Effective(setting, setting.default, ConfigSource.DEFAULT, ())


def effective_topic_setting(
    name: str, overrides: Mapping[str, str], node: Iterable[Layer] = NO_NODE
) -> Effective:
    return _effective(TOPIC_SETTINGS[name], overrides, tuple(node))


def validate_topic_settings(overrides: Mapping[str, str], node: Iterable[Layer] = NO_NODE) -> None:
    """All of a topic's own settings together. Raises INVALID_CONFIG."""
    for name, text in overrides.items():
        setting = TOPIC_SETTINGS.get(name)
        if setting is None:
            raise ApiError(ErrorCode.invalid_config, f"Unknown topic config name: {name}")
        try:
            setting.parse(text)
        except InvalidSetting as error:
            raise ApiError(ErrorCode.invalid_config, str(error)) from None
    _refuse_contradictions(overrides, tuple(node))


def validate_topic_defaults(values: Mapping[str, str]) -> None:
    """Of settings of nodes, those that topics fall back on. Raises InvalidSetting."""
    for name, synonyms in NODE_SYNONYMS.items():
        for synonym in synonyms:
            if (text := values.get(synonym.name)) is not None:
                TOPIC_SETTINGS[name].parse(text)


def _refuse_contradictions(overrides: Mapping[str, str], node: tuple[Layer, ...]) -> None:
    low, high = "min.compaction.lag.ms", "max.compaction.lag.ms"
    least, most = (_effective(TOPIC_SETTINGS[name], overrides, node).value for name in (low, high))
    assert isinstance(least, int)
    assert isinstance(most, int)
    # Defaults of brokers that contradict each other are no reason to refuse every topic.
    if least > most and overrides.keys() & {low, high}:
        raise ApiError(
            ErrorCode.invalid_config, f"conflict topic config setting {low} ({least}) > {high} ({most})"
        )
    if _effective(TOPIC_SETTINGS["remote.storage.enable"], overrides, node).value:
        raise ApiError(
            ErrorCode.invalid_config,
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage.",
        )


def _effective(setting: Setting, overrides: Mapping[str, str], node: tuple[Layer, ...]) -> Effective:
    synonyms = NODE_SYNONYMS.get(setting.name, ())
    return effective_setting(setting, overrides, node, synonyms=synonyms, own=ConfigSource.TOPIC)


def _node_synonyms(names: tuple[NodeSynonym, ...], node: tuple[Layer, ...]) -> Iterable[tuple[Synonym, int]]:
    for layer in node:
        for name, factor in names:
            if (text := layer.values.get(name)) is not None:
                yield Synonym(name, text, layer.source), factor


def _in_unit(value: Value, factor: int) -> Value:
    # -1 means no bound in every unit.
    return value * factor if factor != 1 and isinstance(value, int) and value > 0 else value
