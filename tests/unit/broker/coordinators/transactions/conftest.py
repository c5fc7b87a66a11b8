"""A node with a topic, for tests of transactions."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.transactions.transaction_stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as stage:
        yield stage
