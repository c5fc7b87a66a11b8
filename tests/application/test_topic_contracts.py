"""A topic that declares its contract: an application with a weaker contract does not start."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client import ApplicationError, Penstock
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import satisfies_contract, topic_settings

CONTRACTS = ("at-most-once", "at-least-once", "effectively-once", "exactly-once")


def test_what_keeps_what() -> None:
    assert {
        asked: [each for each in CONTRACTS if satisfies_contract(each, asked)]
        for asked in ("none", *CONTRACTS)
    } == {
        "none": list(CONTRACTS),
        "at-most-once": ["at-most-once", "effectively-once", "exactly-once"],
        "at-least-once": ["at-least-once", "effectively-once", "exactly-once"],
        "effectively-once": ["effectively-once", "exactly-once"],
        "exactly-once": ["exactly-once"],
    }
    assert satisfies_contract("at-most-once", "a contract of later versions")


@pytest.fixture
def declared(app: Penstock, unique: Callable[[str], str]) -> str:
    name = unique("payments")
    app.create_topic(name, partitions=1, settings={"penstock.delivery.contract": "at-least-once"})
    return name


@pytest.mark.parametrize("share", [False, True])
def test_a_subscription_that_promises_less_is_refused(
    app: Penstock, declared: str, group: str, share: bool
) -> None:
    @app.subscribe(declared, group=group, delivery="at-most-once", share=share)
    def pay(value: int) -> None: ...

    words = f"topic {declared} requires at-least-once .* which at-most-once does not satisfy"
    with pytest.raises(ApplicationError, match=words):
        app.run()


def test_a_loop_of_ones_own_is_refused_too(app: Penstock, declared: str, group: str) -> None:
    with pytest.raises(ApplicationError, match="requires at-least-once"):
        app.consumer(declared, group=group, delivery="at-most-once")
    app.publish(declared, 1)
    with app.consumer(declared, group=group) as consumer:
        assert len(consumer.poll(timeout="30s")) == 1


def test_a_pipeline_that_promises_less_is_refused(bootstrap: str, declared: str) -> None:
    pytest.importorskip("pyspark")
    from penstock.spark.pipelines.declaration import Contract, Pipeline, PipelineError
    from penstock.spark.pipelines.failure_topics import ensure_failure_topics

    class Declared:
        name, delivery = "clean", Contract("at-most-once")

    with Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})) as cluster:
        pipeline: Pipeline = Declared()  # type: ignore[assignment]
        with pytest.raises(PipelineError, match=f"pipeline clean: topic {declared} requires at-least-once"):
            ensure_failure_topics(cluster, pipeline, cluster.topics([declared]))


def test_a_pipeline_keeps_its_dead_letters_for_thirty_days(bootstrap: str, declared: str) -> None:
    pytest.importorskip("pyspark")
    from penstock.spark.pipelines.declaration import Contract
    from penstock.spark.pipelines.failure_topics import ensure_failure_topics

    errors = SimpleNamespace(attempts=1, backoff=None)
    pipeline: Any = SimpleNamespace(
        name="clean", group="clean", delivery=Contract("at-least-once"), errors=errors, evaluates=False
    )
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap})) as cluster:
        ensure_failure_topics(cluster, pipeline, cluster.topics([declared]))
        settings = topic_settings(cluster, f"{declared}.dlq")
    kept = {name: settings[name] for name in ("retention.ms", "retention.bytes", "cleanup.policy")}
    assert kept == {"retention.ms": "2592000000", "retention.bytes": "-1", "cleanup.policy": "delete"}
