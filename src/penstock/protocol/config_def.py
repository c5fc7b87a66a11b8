"""How a setting is declared, parsed and validated: one mechanism for topics, groups and nodes."""

import re
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple


class SettingType(IntEnum):
    """Numbered as DescribeConfigs reports them."""

    UNKNOWN = 0
    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


SettingValue = bool | int | float | str | tuple[str, ...] | None

_INTEGER_BITS = {SettingType.SHORT: 16, SettingType.INT: 32, SettingType.LONG: 64}
#: Stricter than int(): no underscores, only ASCII digits, and not many more of them than any bound has.
_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
#: IncrementalAlterConfigs appends to lists. Every node keeps each value in memory and sends it in one reply.
TEXT_CHARS_MAX = 262_144
_QUOTED_CHARS_MAX = 200
_BOOLEANS = {"true": True, "false": False}


class InvalidSetting(ValueError):
    """The message names the setting and the value, and says which values are valid."""


class NodeSynonym(NamedTuple):
    """A node setting that gives a setting of topics or groups its default; `factor` converts its unit."""

    name: str
    factor: int = 1


class Setting(NamedTuple):
    name: str
    type: SettingType
    default: SettingValue
    doc: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] | None = None
    check: Callable[[SettingValue], str | None] | None = None  # returns what is wrong, or None
    read_only: bool = False  # for nodes: set at start, not while running
    synonyms: tuple[NodeSynonym, ...] = ()  # for topics and groups; the first one that a node sets applies

    def parse(self, text: str) -> SettingValue:
        """The typed value of what a user wrote. Raises InvalidSetting."""
        if len(text) > TEXT_CHARS_MAX:
            raise self._invalid(text, f"is longer than {TEXT_CHARS_MAX} characters")
        value = self._typed(text.strip() if self.type is not SettingType.STRING else text)
        self._refuse_out_of_bounds(value)
        if self.check is not None and (wrong := self.check(value)) is not None:
            raise self._invalid(text, wrong)
        return value

    def accepts(self, text: str) -> bool:
        """Whether the setting can be set to this value while nodes run."""
        if self.read_only:
            return False
        try:
            self.parse(text)
        except InvalidSetting:
            return False
        return True

    def text(self, value: SettingValue) -> str | None:
        """The value as Kafka prints it."""
        match value:
            case None:
                return None
            case bool():
                return "true" if value else "false"
            case tuple():
                return ",".join(value)
            case _:
                return str(value)

    def _typed(self, text: str) -> SettingValue:
        match self.type:
            case SettingType.BOOLEAN:
                if text.lower() not in _BOOLEANS:
                    raise self._invalid(text, "must be true or false")
                return _BOOLEANS[text.lower()]
            case SettingType.INT | SettingType.SHORT | SettingType.LONG:
                return self._integer(text)
            case SettingType.DOUBLE:
                return self._number(text)
            case SettingType.LIST:
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case _:
                return text

    def _integer(self, text: str) -> int:
        bits = _INTEGER_BITS[self.type]
        if _INTEGER.fullmatch(text) is None:
            raise self._invalid(text, "must be a whole number")
        value = int(text)
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise self._invalid(text, f"must fit in {bits} bits")
        return value

    def _number(self, text: str) -> float:
        try:
            if "_" not in text:
                return float(text)
        except ValueError:
            pass
        raise self._invalid(text, "must be a number")

    def _refuse_out_of_bounds(self, value: SettingValue) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if self.at_least is not None and not value >= self.at_least:
                raise self._invalid(str(value), f"must be at least {self.at_least}")
            if self.at_most is not None and not value <= self.at_most:
                raise self._invalid(str(value), f"must be at most {self.at_most}")
        if self.choices is not None:
            for item in value if isinstance(value, tuple) else (value,):
                if item not in self.choices:
                    raise self._invalid(str(item), f"must be one of {', '.join(self.choices)}")

    def _invalid(self, text: str, wrong: str) -> InvalidSetting:
        if self.type is SettingType.PASSWORD:
            return InvalidSetting(f"Invalid value for configuration {self.name}: {wrong}")
        # Error messages are cut off at their end, where the reason stands.
        if len(text) > _QUOTED_CHARS_MAX:
            text = f"{text[:_QUOTED_CHARS_MAX]}..."
        return InvalidSetting(f"Invalid value {text} for configuration {self.name}: {wrong}")


#: Declares a setting that nodes read at start only.
static_setting: Final = partial(Setting, read_only=True)
