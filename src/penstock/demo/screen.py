"""The demo on a terminal: the whole screen is drawn anew twice a second, and given back at the end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from penstock.demo.scene import Scene
from penstock.demo.view import draw


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, scene: Scene) -> None:
        width, height = self._console.size
        self._live.update(draw(scene, width=width, height=height), refresh=True)
