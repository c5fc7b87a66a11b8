"""Settings of every resource that a node knows, and texts at and beyond what each of them accepts.

The names come from the node's own tables, so that a new setting is attacked from the day it is declared.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from penstock.broker.config.definitions import NODE_SETTINGS
from penstock.cluster.client_metrics import CLIENT_METRICS_SETTINGS, validate_client_metrics
from penstock.cluster.controller.alter_configs import ConfigOp
from penstock.cluster.group_settings import GROUP_SETTINGS
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import TOPIC_SETTINGS
from penstock.protocol.config_def import InvalidSetting, Setting, SettingType
from penstock.protocol.errors import ApiError

TABLES: Final[Mapping[int, Mapping[str, Setting]]] = {
    ResourceType.TOPIC: TOPIC_SETTINGS,
    ResourceType.BROKER: NODE_SETTINGS,
    ResourceType.GROUP: GROUP_SETTINGS,
    ResourceType.CLIENT_METRICS: CLIENT_METRICS_SETTINGS,
}
#: How often each kind of resource is drawn. Loggers seldom: their levels hide what the node would log.
KINDS: Final = {
    ResourceType.BROKER: 10,
    ResourceType.TOPIC: 5,
    ResourceType.GROUP: 3,
    ResourceType.CLIENT_METRICS: 3,
    ResourceType.BROKER_LOGGER: 1,
}
LOGGERS: Final = (
    "root",
    "penstock.broker",
    "penstock.broker.network.server",
    "penstock.broker.network.connection_limits",
    "penstock.log",
    "no.such.logger",
    "",
)
SUBSCRIPTIONS: Final = ("prey-metrics", "m" * 300, "")
#: Settings of brokers that, where a value is accepted, limit what well-behaved clients may do, and only that: how many
#: connect and how often, which records are taken, and how long and how safely they are kept. They are set and undone.
LIMITING: Final = frozenset(
    {
        "max.connections",
        "max.connections.per.ip",
        "max.connections.per.ip.overrides",
        "max.connection.creation.rate",
        "message.max.bytes",
        "min.insync.replicas",
        "log.cleanup.policy",  # compacted topics take no records without a key
        "log.message.timestamp.before.max.ms",
        "log.message.timestamp.after.max.ms",
        "log.retention.ms",
        "log.retention.minutes",
        "log.retention.hours",
        "log.retention.bytes",
        "log.segment.bytes",  # a batch must fit into a segment
        "unclean.leader.election.enable",
    }
)
#: Never set to 0, which only the hosts of max.connections.per.ip.overrides could undo.
LOCKING_OUT: Final = frozenset({"max.connections.per.ip"})

NUMBERS: Final = (
    "0", "-1", "1", "2", "-2", "100", "2147483647", "2147483648", "-2147483648", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809", "9" * 100, "9" * 5000, "", " 5 ", "+5",
    "-0", "1e9", "0.5", "NaN", "inf", "-inf", "1e309", "0x10", "1_000", "\N{ARABIC-INDIC DIGIT FIVE}", "five",
)  # fmt: skip
TEXTS: Final = (
    "", " ", ",", ",,,", "\0", "a,b", "a" * 300, "a" * 30_000, ",".join(map(str, range(2000))), "\N{SNOWMAN}", "*",
    "none", "true", "TRUE", "null", "{topic}", "{topic}{topic}", "../../etc/passwd", "%s%n", "\r\n", "earliest",
)  # fmt: skip
HOSTS: Final = (
    "localhost", "127.0.0.1", "127.0.0.9", "10.0.0.1", "::1", "[::1]", "fe80::1%lo", "a" * 70, "x." * 200, ".",
    "no\0name", "\N{SNOWMAN}", "-", "0", "no-such-host.invalid", "999.999.999.999", "*",
)  # fmt: skip
SELECTORS: Final = ("client_id", "client_software_name", "client_source_port", "no_such_selector", "")
EXPRESSIONS: Final = (
    "(a+)+b", "(a|a)*b", "(.*)*x", "((a*)*)*b", "(a{1,30}){1,30}b", ".*", "(", "[", "\\", "(?=a)", "(a)\\1", "",
    "a" * 5000, "\N{SNOWMAN}+",
)  # fmt: skip
#: Names by which clients call themselves: the second makes the expressions above try everything.
CLIENT_IDS: Final = ("fuzz", "a" * 60 + "!", "\N{SNOWMAN}", "")
DURATIONS: Final = ("PT1H", "P999999999D", "PT0S", "P", "-PT1S", "PT0.000000001S", "PT99999999999999999999S")
LEVELS: Final = ("INFO", "INFO", "DEBUG", "TRACE", "ERROR", "info", "LOUD", "")


class Change(NamedTuple):
    name: str
    op: int
    value: str | None


class Settings:
    """Draws resources and changes of their settings."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._weights = {
            kind: [_weight(kind, setting) for setting in table.values()] for kind, table in TABLES.items()
        }

    def kind(self) -> int:
        return self._chance.choices(list(KINDS), list(KINDS.values()))[0]

    def changes(self, kind: int) -> tuple[Change, ...]:
        """One mostly: of several, a single bad one has all of them refused."""
        count = self._chance.choice((1, 1, 1, 1, 2, 3, 0))
        return tuple(self._change(kind) for _ in range(count))

    def _change(self, kind: int) -> Change:
        chance = self._chance
        ops = (ConfigOp.SET,) * 12 + (ConfigOp.APPEND, ConfigOp.APPEND, ConfigOp.SUBTRACT, ConfigOp.DELETE)
        op: int = chance.choice((*ops, 4, -128) if chance.random() < 0.05 else ops)
        if kind == ResourceType.BROKER_LOGGER:
            return Change(chance.choice(LOGGERS), op, chance.choice(LEVELS))
        table = TABLES.get(kind, TOPIC_SETTINGS)
        if chance.random() < 0.05:
            # A setting of nodes is unknown to topics, and an odd name to all kinds.
            unknown = chance.choice((("unknown.name", "", "x" * 300, "\0"), tuple(NODE_SETTINGS)))
            return Change(chance.choice(unknown), op, self._any_text())
        (setting,) = chance.choices(list(table.values()), self._weights.get(kind))
        if op in (ConfigOp.APPEND, ConfigOp.SUBTRACT) and chance.random() < 0.8:
            # Most settings are no lists, and refused at once.
            lists = [each for each in table.values() if each.type is SettingType.LIST]
            setting = chance.choice(lists or [setting])
        return Change(setting.name, op, None if chance.random() < 0.03 else self.value(setting))

    def value(self, setting: Setting) -> str:
        """More often than not one that is accepted: it is what was stored that can do harm."""
        text = self._value(setting)
        if self._chance.random() < 0.7:
            for _ in range(20):
                if is_accepted(setting, text):
                    break
                text = self._value(setting)
        return "1" if _locks_out(setting, text) else text

    def _value(self, setting: Setting) -> str:
        chance = self._chance
        if chance.random() < 0.05:
            return self._any_text()
        match setting.type:
            case SettingType.INT | SettingType.SHORT | SettingType.LONG | SettingType.DOUBLE:
                # 0 and its neighbours have a meaning of their own in many settings.
                return chance.choice((*NUMBERS, *("0", "0", "1", "-1") * 6, *_near(setting) * 3))
            case SettingType.BOOLEAN:
                return chance.choice(("true", "false", "TRUE", "yes", "", "1"))
            case _ if setting.choices is not None:
                first, second = chance.choice(setting.choices), chance.choice(setting.choices)
                return chance.choice(
                    (first, first, first, f"{first},{second}", first.upper(), f" {first}", "", ",")
                )
            case _:
                return chance.choice(_SHAPES)(chance)

    def _any_text(self) -> str:
        return self._chance.choice((*NUMBERS, *TEXTS, *HOSTS))


def is_accepted(setting: Setting, text: str) -> bool:
    try:
        setting.parse(text)
        if CLIENT_METRICS_SETTINGS.get(setting.name) is setting:
            validate_client_metrics({setting.name: text})
    except (InvalidSetting, ApiError):
        return False
    return True


def _locks_out(setting: Setting, text: str) -> bool:
    return setting.name in LOCKING_OUT and is_accepted(setting, text) and setting.parse(text) == 0


def _weight(kind: int, setting: Setting) -> float:
    """Settings that are read only at start are all refused alike; text without a list of choices is parsed further."""
    if kind == ResourceType.BROKER and setting.read_only:
        return 0.02
    return 4 if setting.type in (SettingType.STRING, SettingType.LIST) and setting.choices is None else 1


def _near(setting: Setting) -> tuple[str, ...]:
    """The bounds of a number, and what lies beside them."""
    limits = [
        limit
        for limit in (setting.at_least, setting.at_most, setting.default)
        if isinstance(limit, (int, float))
    ]
    unit = 0.001 if setting.type is SettingType.DOUBLE else 1
    return tuple(str(limit + step) for limit in limits for step in (-unit, 0, 0, unit))


def _host_limits(chance: random.Random) -> str:
    limits = [
        f"{chance.choice(HOSTS)}:{chance.choice(('0', '1', '100', '2147483648', '9' * 5000, '-1', 'many', ''))}"
        for _ in range(chance.choice((1, 1, 2, 50)))
    ]
    return ",".join(limits)


def _client_matches(chance: random.Random) -> str:
    count = chance.choice((1, 1, 2, 50))
    return ",".join(
        f"{chance.choice((SELECTORS[0], *SELECTORS))}={chance.choice(EXPRESSIONS)}" for _ in range(count)
    )


def _replicas(chance: random.Random) -> str:
    return chance.choice(
        ("*", "none", "0:1", "0:1,1:2,2:3", "2147483648:1", "0:", ":", "*,0:1", "9" * 5000 + ":1", "-1:1")
    )


_SHAPES: Final[tuple[Callable[[random.Random], str], ...]] = (
    _host_limits,
    _client_matches,
    _replicas,
    lambda chance: chance.choice(TEXTS),
    lambda chance: chance.choice(EXPRESSIONS),
    lambda chance: "by_duration:" + chance.choice(DURATIONS),
    lambda chance: chance.choice(("org.apache.kafka.", "*", "a" * 300, ",".join(["m"] * 1000))),
)
