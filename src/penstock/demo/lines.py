"""The demo where nobody looks at a screen: what happens as it happens, and every few seconds how things are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.demo.journal import Journal
from penstock.demo.scene import Scene
from penstock.demo.view import clock_text

_INDENT: Final = " " * 8


class Lines:
    def __init__(self, journal: Journal, write: Callable[[str], None], *, every_s: float) -> None:
        self._journal = journal
        self._write = write
        self._seen = 0
        self._every_s = every_s
        self._told_at = 0.0

    def show(self, scene: Scene) -> None:
        self._tell_events()
        if scene.now_s - self._told_at >= self._every_s:
            self._told_at = scene.now_s
            for line in block(scene):
                self._write(line)

    def _tell_events(self) -> None:
        self._seen, events = self._journal.since(self._seen)
        for event in events:
            self._write(f"{clock_text(event.at_s):>6}  {event.text}")


def block(scene: Scene) -> list[str]:
    """What is where, and how far behind its readers are."""
    totals = [
        f"{flow.name.partition(' ')[0]} {flow.total:,}" + (f" ({flow.per_s:,.0f}/s)" if flow.per_s else "")
        for flow in scene.flows
        if flow.total is not None
    ]
    lags = [f"{flow.name} {flow.lag:,}" for flow in scene.flows if flow.lag is not None]
    return [
        f"{clock_text(scene.now_s):>6}  {' · '.join(totals)}",
        f"{_INDENT}lag: {', '.join(lags) or 'nobody reads yet'}",
    ]
