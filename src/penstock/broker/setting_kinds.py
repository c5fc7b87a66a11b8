"""The two kinds of settings that a node has: read at its start, and fallbacks of what topics may set."""

from penstock.protocol.settings import Setting, SettingType, Value


def node_setting(
    name: str,
    kind: SettingType,
    default: Value,
    doc: str,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Setting:
    return Setting(
        name=name,
        type=kind,
        default=default,
        doc=doc,
        at_least=at_least,
        at_most=at_most,
        choices=choices,
        read_only=True,
    )


def topic_default(
    name: str,
    kind: SettingType,
    default: Value,
    doc: str,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Setting:
    return Setting(
        name=name, type=kind, default=default, doc=doc, at_least=at_least, at_most=at_most, choices=choices
    )
