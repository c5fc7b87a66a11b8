"""How the tables of topic and group settings are written: a line each, with what a node gives where nothing is set."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.protocol.settings import Setting, SettingType, Value


class NodeSynonym(NamedTuple):
    """A node setting that gives another its default; `factor` turns its unit into the other's."""

    name: str
    factor: int = 1


class Declare:
    """Call it with a setting's name, type, default, sentence and bounds."""

    __slots__ = ("_checks", "_synonyms")

    def __init__(
        self,
        synonyms: Mapping[str, tuple[NodeSynonym, ...]],
        checks: Mapping[str, Callable[[Value], str | None]],
    ) -> None:
        self._synonyms = synonyms
        self._checks = checks

    def __call__(
        self,
        name: str,
        kind: SettingType,
        default: Value,
        doc: str,
        at_least: float | None = None,
        at_most: float | None = None,
        choices: tuple[str, ...] | None = None,
    ) -> Setting:
        synonyms = self._synonyms.get(name)
        return Setting(
            name=name,
            type=kind,
            default=default,
            doc=doc,
            at_least=at_least,
            at_most=at_most,
            choices=choices,
            check=self._checks.get(name),
            synonym=synonyms[0].name if synonyms else None,
        )
