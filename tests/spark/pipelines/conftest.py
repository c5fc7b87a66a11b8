"""Fixtures for the tests of pipelines."""

from pathlib import Path
from typing import Any

import pytest
from tests.spark.pipelines.lines import Line
from tests.spark.source.topics import Topics


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def line(spark: Any, topics: Topics, tmp_path: Path) -> Line:
    return Line(spark, topics, tmp_path)
