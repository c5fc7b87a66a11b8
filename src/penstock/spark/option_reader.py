"""Reads options as Spark passes them: text, under names of any case. Every error names the option."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from penstock.client.errors import ClientError
from penstock.client.retry import UNITS_MS
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.settings import ConnectionSettings

#: Options with this prefix are connection settings.
CONNECTION_PREFIX: Final = "kafka."
_FLAGS: Final = {"true": True, "false": False}
#: A number without a unit means milliseconds.
_UNITS_MS: Final = {"": 1, **UNITS_MS}
_DURATION: Final = re.compile(r"(\d{1,12})\s*([a-z]*)")
_OFFSET_MAX: Final = (1 << 63) - 1
_PARTITION_MAX: Final = (1 << 31) - 1
T = TypeVar("T")


class OptionError(ClientError):
    """An option of a query is missing, unknown or wrong."""


def invalid_option(name: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"option {name}={value}: {wanted}")


class OptionReader:
    """The options of a query that have not been read yet. Reading an option removes it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._left = {str(name).strip().lower(): str(value) for name, value in options.items()}

    def connection(self, refused: Mapping[str, str]) -> ConnectionSettings:
        """Parse the options that begin with `kafka.` and have not been read yet.

        Raises OptionError for invalid settings, and for the `refused` ones, with the advice that belongs to each.
        """
        names = [name for name in self._left if name.startswith(CONNECTION_PREFIX)]
        settings = {name.removeprefix(CONNECTION_PREFIX): self._left.pop(name) for name in names}
        for name, advice in refused.items():
            if name in settings:
                raise OptionError(f"option {CONNECTION_PREFIX}{name} cannot be set: {advice}")
        try:
            return ConnectionSettings.parse({"client.id": "penstock-spark", **settings})
        except ClientError as error:
            raise OptionError(f"option {CONNECTION_PREFIX}{error}") from None

    def text(self, name: str) -> str | None:
        value = self._left.pop(name.lower(), None)
        return value.strip() if value is not None else None

    def choice(self, name: str, choices: Mapping[str, T], default: T) -> T:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in choices:
            raise invalid_option(name, value, f"must be one of {', '.join(choices)}")
        return choices[value.lower()]

    def flag(self, name: str, *, default: bool) -> bool:
        return self.choice(name, _FLAGS, default)

    def number(self, name: str, *, at_least: int = 1, at_most: int = _OFFSET_MAX) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not re.fullmatch(r"\d{1,18}", value) or not at_least <= int(value) <= at_most:
            raise invalid_option(name, value, f"must be a whole number of at least {at_least}")
        return int(value)

    def duration_ms(self, name: str, *, default_ms: int) -> int:
        value = self.text(name)
        if value is None:
            return default_ms
        match = _DURATION.fullmatch(value.lower())
        if match is None or match[2] not in _UNITS_MS:
            raise invalid_option(name, value, "must be a time such as 500ms, 30s, 15m or 1h")
        return int(match[1]) * _UNITS_MS[match[2]]

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise OptionError if an option has not been read, and suggest a known option with a similar name."""
        if not self._left:
            return
        name = min(self._left)
        names = {each.lower(): each for each in known}
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {names[near[0]]}?" if near else f"the options are {', '.join(sorted(known))}"
        raise OptionError(f"there is no option {name}; {advice}")


def numbers_by_partition(name: str, text: str, *, least: int) -> dict[TopicPartition, int]:
    """Parse `{"topic": {"0": 23, "1": -2}}`. Raises OptionError."""
    found: dict[TopicPartition, int] = {}
    for topic, parts in _json_object(name, text).items():
        if not isinstance(parts, dict):
            raise invalid_option(name, text, 'must look like {"topic": {"0": 23, "1": 42}}')
        for partition, number in parts.items():
            found[topic, _partition_index(name, topic, partition)] = _checked_number(
                name, topic, partition, number, least
            )
    if not found:
        raise invalid_option(name, text, "contains no partition")
    return found


def assigned_partitions(name: str, text: str) -> tuple[TopicPartition, ...]:
    """Parse `{"topic": [0, 1]}`. Raises OptionError."""
    found = []
    for topic, parts in _json_object(name, text).items():
        if not isinstance(parts, list):
            raise invalid_option(name, text, 'must look like {"topic": [0, 1]}')
        found += [(topic, _partition_index(name, topic, partition)) for partition in parts]
    if not found:
        raise invalid_option(name, text, "contains no partition")
    return tuple(sorted(set(found)))


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as flaw:
        raise invalid_option(name, text, f"is not valid JSON ({flaw})") from None
    if not isinstance(found, dict):
        raise invalid_option(name, text, "must be a JSON object with a member for each topic")
    return found


def _partition_index(name: str, topic: str, partition: object) -> int:
    if re.fullmatch(r"\d{1,10}", str(partition)) is None or int(str(partition)) > _PARTITION_MAX:
        raise invalid_option(name, partition, f"is not a partition number (topic {topic})")
    return int(str(partition))


def _checked_number(name: str, topic: str, partition: str, number: object, least: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= _OFFSET_MAX:
        raise invalid_option(
            name, number, f"must be a whole number of at least {least} ({topic}[{partition}])"
        )
    return number
