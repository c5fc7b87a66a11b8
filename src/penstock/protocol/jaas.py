"""`sasl.jaas.config`, the text in which Kafka's settings name a login module and its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

#: `module.Class required name="value" other='value' third=value;`
_JAAS: Final = re.compile(
    r"\s*(?P<module>[\w.$]+)\s+(?:required|requisite|sufficient|optional)\b(?P<options>.*)",
    re.DOTALL | re.IGNORECASE,
)
_OPTION: Final = re.compile(
    r"""([\w.$@/+-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))""", re.DOTALL
)


class JaasConfig(NamedTuple):
    """`module` is the name of the class without its package. The options contain passwords."""

    module: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"JaasConfig({self.module!r}, {sorted(self.options)})"


def parse_jaas(text: str) -> JaasConfig:
    """Raises ValueError, whose message never shows the text, because it contains passwords."""
    match = _JAAS.fullmatch(text)
    if match is None:
        raise ValueError('must look like: <LoginModule> required username="..." password="...";')
    module = match["module"].rpartition(".")[2]
    return JaasConfig(module, {name: _value(*values) for name, *values in _OPTION.findall(match["options"])})


def _value(double: str, single: str, bare: str) -> str:
    return bare or re.sub(r"\\(.)", r"\1", double or single, flags=re.DOTALL)
