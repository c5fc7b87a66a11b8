"""The settings of a node as they are now: what it was started with, and what an operator has changed since.

IncrementalAlterConfigs changes the settings that are not read-only, for one broker or for all. They are metadata, so
every node finds them in its image; `watch` tells the parts of the node that have to act on a change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from penstock.broker.settings_table import NODE_SETTINGS
from penstock.cluster.state import ResourceType
from penstock.protocol.settings import Value

if TYPE_CHECKING:
    from penstock.broker.settings import Settings
    from penstock.cluster.image import ClusterImage

logger = logging.getLogger(__name__)


def usable_settings(stored: Mapping[str, str]) -> dict[str, str]:
    """Of what is stored for brokers: a newer version may have stored settings or values that this one does not have."""
    return {
        name: text
        for name, text in stored.items()
        if (setting := NODE_SETTINGS.get(name)) is not None and setting.accepts(text)
    }


class DynamicSettings:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._altered: dict[str, Value] = {}
        self._ignored: set[str] = set()
        self._watchers: list[tuple[frozenset[str], Callable[[], None]]] = []

    def __repr__(self) -> str:
        return f"<DynamicSettings {self._altered}>"

    def __getitem__(self, name: str) -> Value:
        return self._altered[name] if name in self._altered else self._settings[name]

    def integer(self, name: str) -> int:
        value = self[name]
        assert isinstance(value, int), (name, value)
        return value

    def boolean(self, name: str) -> bool:
        value = self[name]
        assert isinstance(value, bool), (name, value)
        return value

    def overruled(self) -> list[str]:
        """Settings that were given to this node at its start and have no effect, as others were set at run time."""
        return sorted(
            name
            for name, value in self._altered.items()
            if name in self._settings.origins and self._settings[name] != value
        )

    def watch(self, names: Iterable[str], changed: Callable[[], None]) -> None:
        """Call `changed` whenever one of these has another value."""
        watched = frozenset(names)
        assert not any(NODE_SETTINGS[name].read_only for name in watched), watched
        self._watchers.append((watched, changed))

    def image_changed(self, image: ClusterImage) -> None:
        """A setting of this broker counts before the one for all brokers."""
        everywhere = image.config(ResourceType.BROKER, "")
        here = image.config(ResourceType.BROKER, str(self._settings.node_id))
        for stored in (everywhere, here):
            self._warn_of({*stored} - {*usable_settings(stored)})
        usable = {**usable_settings(everywhere), **usable_settings(here)}
        altered = {name: NODE_SETTINGS[name].parse(text) for name, text in usable.items()}
        before = {name: self[name] for name in {*altered, *self._altered}}
        self._altered = altered
        different = {name for name, value in before.items() if self[name] != value}
        for names, changed in self._watchers:
            if names & different:
                changed()

    def _warn_of(self, names: set[str]) -> None:
        for name in sorted(names - self._ignored):
            logger.warning(
                "ignoring a stored broker setting that this version does not accept", extra={"setting": name}
            )
        self._ignored |= names
