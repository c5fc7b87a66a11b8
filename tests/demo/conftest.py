"""Starts the demo, several times in one folder if a test needs that."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.demo.demos import Demo

Run = Callable[..., Demo]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    demos: list[Demo] = []

    def start(*flags: str) -> Demo:
        demos.append(Demo(tmp_path / "data", *flags))
        return demos[-1]

    yield start
    for demo in demos:
        demo.kill()
