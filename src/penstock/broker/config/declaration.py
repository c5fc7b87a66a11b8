"""How a node setting is declared: read at start, dynamic, or the default of a topic setting (also dynamic)."""

from functools import partial
from typing import Final

from penstock.protocol.config_def import Setting, SettingType, SettingValue


def _setting(
    name: str,
    kind: SettingType,
    default: SettingValue,
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
