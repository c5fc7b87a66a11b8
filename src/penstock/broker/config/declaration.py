"""The kinds of settings that a node has: read at its start, dynamic, and fallbacks of what topics may set."""

from functools import partial
from typing import Final

from penstock.protocol.settings import Setting, SettingType, Value


def _setting(
    name: str,
    kind: SettingType,
    default: Value,
    doc: str,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    *,
    read_only: bool,
) -> Setting:
    return Setting(
        name=name,
        type=kind,
        default=default,
        doc=doc,
        at_least=at_least,
        at_most=at_most,
        choices=choices,
        read_only=read_only,
    )


node_setting: Final = partial(_setting, read_only=True)
dynamic_setting: Final = partial(_setting, read_only=False)
topic_default: Final = dynamic_setting
