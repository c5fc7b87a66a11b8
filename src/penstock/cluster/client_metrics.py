"""Client metrics subscriptions (KIP-714): which clients push which metrics, and how often."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from penstock.cluster.topic_settings import (
    NO_LAYERS,
    ConfigSource,
    EffectiveSetting,
    effective_setting,
)
from penstock.protocol.config_def import InvalidSetting, Setting, SettingType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.regex import InvalidRegex, compile_regex

ALL_METRICS: Final = "*"
INTERVAL_MS_DEFAULT: Final = 300_000
_INTERVAL_MS: Final = range(100, 3_600_001)
#: Properties that a subscription can match clients by.
_SELECTORS: Final = frozenset(
    {
        "client_id",
        "client_instance_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    }
)


CLIENT_METRICS_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting
    for setting in (
        Setting(
            "interval.ms",
            SettingType.INT,
            INTERVAL_MS_DEFAULT,
            "How often clients push, in milliseconds; from 100 to 3600000.",
        ),
        Setting(
            "match",
            SettingType.LIST,
            (),
            "Which clients: SELECTOR=REGEX, comma separated, all of which must match; nothing matches every client.",
        ),
        Setting(
            "metrics",
            SettingType.LIST,
            (),
            "Prefixes of the names of the metrics that are wanted, comma separated; * is all of them.",
        ),
    )
}


class ClientMetricsSubscription(NamedTuple):
    metrics: tuple[str, ...]
    interval_ms: int
    #: Pairs of a selector and a compiled regular expression.
    match: tuple[tuple[str, Any], ...]

    def is_for(self, client: Mapping[str, str]) -> bool:
        """Returns whether the client matches; `client` maps each selector to the client's value."""
        return all(pattern.fullmatch(client.get(selector, "")) for selector, pattern in self.match)


def effective_client_metrics(own: Mapping[str, str]) -> dict[str, EffectiveSetting]:
    return {
        name: effective_setting(setting, own, NO_LAYERS, own=ConfigSource.CLIENT_METRICS)
        for name, setting in CLIENT_METRICS_SETTINGS.items()
    }


def client_metrics_subscription(own: Mapping[str, str]) -> ClientMetricsSubscription:
    """Raises ApiError for a `match` that this version does not accept; another version may have stored it."""
    value = {name: effective.value for name, effective in effective_client_metrics(own).items()}
    metrics, interval_ms, match = value["metrics"], value["interval.ms"], value["match"]
    assert isinstance(metrics, tuple)
    assert isinstance(interval_ms, int)
    assert isinstance(match, tuple)
    return ClientMetricsSubscription(metrics, interval_ms, _parsed_match(match))


def validate_client_metrics(own: Mapping[str, str]) -> None:
    """Raises ApiError with the same error codes and messages as Apache Kafka."""
    for name, text in own.items():
        setting = CLIENT_METRICS_SETTINGS.get(name)
        if setting is None:
            raise ApiError(ErrorCode.invalid_request, f"Unknown client metrics configuration: {name}")
        try:
            value = setting.parse(text)
        except InvalidSetting as error:
            raise ApiError(ErrorCode.invalid_config, str(error)) from None
        if name == "interval.ms" and value not in _INTERVAL_MS:
            raise ApiError(
                ErrorCode.invalid_request,
                f"Invalid value {value} for interval.ms, interval must be between 100 and 3600000 (1 hour)",
            )
        if name == "match":
            assert isinstance(value, tuple)
            _parsed_match(value)


def _parsed_match(patterns: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    parsed = []
    for text in patterns:
        selector, separator, pattern = (part.strip() for part in text.partition("="))
        try:
            if not separator or selector not in _SELECTORS:
                raise InvalidRegex("no selector")
            parsed.append((selector, compile_regex(pattern)))
        except InvalidRegex:
            raise ApiError(ErrorCode.invalid_config, f"Illegal client matching pattern: {text}") from None
    return tuple(parsed)
