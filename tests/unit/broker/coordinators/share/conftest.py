"""A node, for tests of share groups."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.share.share_client import SETTINGS
from tests.unit.broker.raw_client import running

from penstock.broker.node import Node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, **SETTINGS) as node:
        yield node
