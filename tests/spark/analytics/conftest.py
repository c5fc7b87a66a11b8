"""Fixtures for the tests of analytics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.spark.source.topics import Topics

from penstock.spark.pipelines import assembly
from penstock.spark.pipelines.declaration import Pipeline, RunSettings

WITHIN_S = 600.0


@pytest.fixture
def topics(broker: Any) -> Topics:
    return Topics(broker.bootstrap_servers)


@pytest.fixture
def run(topics: Topics, tmp_path: Path) -> RunSettings:
    return RunSettings(
        bootstrap=topics.bootstrap,
        checkpoint=str(tmp_path / "checkpoint"),
        connection={"topic.metadata.propagation.max.ms": "300"},
        once=True,
    )


@pytest.fixture
def run_once(spark: Any, run: RunSettings) -> Callable[[Pipeline], None]:
    """Run until everything is read."""

    def started(pipeline: Pipeline) -> None:
        queries = assembly.start(spark, pipeline, run)
        try:
            for query in queries:
                assert query.awaitTermination(WITHIN_S), f"{query.name} takes too long"
        finally:
            for query in queries:
                query.stop()

    return started
