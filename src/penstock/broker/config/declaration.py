"""How a node setting is declared: read at start, dynamic, or the default of a topic setting (also dynamic)."""

from functools import partial
from typing import Final

from penstock.protocol.config_def import Setting

node_setting: Final = partial(Setting, read_only=True)
dynamic_setting: Final = Setting
topic_default: Final = dynamic_setting
