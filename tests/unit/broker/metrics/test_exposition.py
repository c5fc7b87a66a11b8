"""The metrics page: known counts are shown, and scraping is safe while the node is busy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.config.node_settings import load_settings
from penstock.broker.metrics.counters import LATENCY_BUCKETS, HistogramSnapshot, MetricFamily, Metrics
from penstock.broker.metrics.exposition import Exposition, render
from penstock.broker.network.apis import FETCH, PRODUCE
from penstock.broker.network.audit import AuditTrail
from penstock.broker.partition.leader_replica import monotonic_ms
from penstock.groups.group import CommitRequest, OffsetToCommit
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.replication.leader import LeaderRules

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _samples(text: bytes) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


class _Shards:
    """Stands for the group coordinator: one real shard, without a log."""

    def __init__(self, shard: GroupCoordinatorShard) -> None:
        self.shard = shard
        self.error: ApiError | None = None

    async def read_all(self, question: Callable[[GroupCoordinatorShard], Any]) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [question(self.shard)]

    async def read_each(self, question: Callable[[GroupCoordinatorShard], Any]) -> AsyncIterator[Any]:
        if self.error is not None:
            raise self.error
        yield question(self.shard)

    async def read(self, group_id: str, question: Callable[[GroupCoordinatorShard], Any]) -> Any:
        return question(self.shard)


def _partition(topic: str, index: int, *, start: int, end: int, high: int) -> Any:
    log = SimpleNamespace(
        start_offset=start, end_offset=end, size_bytes=end * 100, segments=[None] * 3, damages=()
    )
    return SimpleNamespace(
        topic=topic,
        index=index,
        log=log,
        high_watermark=high,
        last_stable_offset=high - 5,
        leading=None,
        is_leader=True,
        leader_id=3,
        replicas=(3,),
        isr_size=1,
        has_enough_replicas=True,
    )


def _led(partition: Any, replicas: tuple[int, ...], isr: tuple[int, ...], isr_min: int) -> Any:
    """With followers, of which broker 4 has everything and broker 5 has never been heard of."""
    now_ms = monotonic_ms()
    end_offset = partition.log.end_offset
    rules = LeaderRules(
        local_id=3,
        leader_epoch=1,
        partition_epoch=1,
        replicas=replicas,
        isr=isr,
        epoch_start_offset=0,
        high_watermark=0,
        local_offset=end_offset,
        lag_ms_max=10_000,
        isr_min=isr_min,
        now_ms=now_ms,
    )
    rules.fetched(4, offset=end_offset - 2, log_end=end_offset, broker_epoch=1, now_ms=now_ms - 3_000)
    partition.leading = SimpleNamespace(rules=rules)
    partition.replicas, partition.isr_size = replicas, len(isr)
    partition.has_enough_replicas = len(isr) >= isr_min
    return partition


class _Partitions(list[Any]):
    refused = frozenset({("orders", 9)})
    missing = frozenset[Any]()
    lost = SimpleNamespace(keys=frozenset({("orders", 8), ("orders", 9)}))

    def get(self, topic: str, index: int) -> Any:
        return next((each for each in self if (each.topic, each.index) == (topic, index)), None)


FAR = OffsetToCommit(topic="far", partition=0, offset=3)


def _shard() -> GroupCoordinatorShard:
    shard = GroupCoordinatorShard(GroupCoordinatorConfig())
    offsets = tuple(
        OffsetToCommit(topic=topic, partition=partition, offset=offset)
        for topic, partition, offset in (("orders", 0, 90), ("orders", 1, 7), ("gone", 0, 1))
    )
    work = shard.commit(CommitRequest(group_id="billing", offsets=offsets), object(), now_ms=1)
    for key, value in work.records:
        shard.replay(key, value)
    return shard


@pytest.fixture
def node() -> Any:
    async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)

    connections = [SimpleNamespace(listener="INTERNAL"), SimpleNamespace(listener="INTERNAL")]
    return SimpleNamespace(
        is_serving=lambda: True,
        metrics=Metrics(),
        quotas=SimpleNamespace(throttled_ms={"producer_byte_rate": 1500}),
        tenants=SimpleNamespace(here=()),
        overflow=SimpleNamespace(drops=()),
        group_drops=SimpleNamespace(dropped={}),
        store=SimpleNamespace(cluster_id="cluster", failed={("orders", 9): OSError()}),
        quorum=SimpleNamespace(epoch=4, leader_id=3),
        metadata=SimpleNamespace(
            is_active=True,
            applied_offset=77,
            image=SimpleNamespace(
                topics_by_id={}, partition=lambda topic, index: object() if topic == "far" else None
            ),
        ),
        brokers=None,
        audit=AuditTrail(),
        fetchers=lambda: SimpleNamespace(
            bytes_fetched=0, bytes_moved=0, truncations=0, records_lost=0, lags=list
        ),
        **dict.fromkeys(
            ("telemetry", "transactions", "share_state", "share", "schedule"), SimpleNamespace(existing=None)
        ),
        server=SimpleNamespace(
            connections=connections,
            buffers=SimpleNamespace(bytes_in_use=4096),
            unauthenticated_counts=lambda: {"EXTERNAL": 2},
        ),
        listeners=(SimpleNamespace(name="INTERNAL"), SimpleNamespace(name="EXTERNAL")),
        fetch_sessions=_Sessions(),
        partitions=_Partitions(
            [
                _partition("orders", 0, start=10, end=101, high=100),
                _partition("orders", 1, start=0, end=7, high=7),
            ]
        ),
        groups=_Shards(_shard()),
        settings=load_settings({"node.id": "3"}, {}),
        threads=SimpleNamespace(in_thread=in_thread),
    )


class _Sessions:
    evictions = 2

    def __len__(self) -> int:
        return 5


async def _scrape(node: Any) -> Samples:
    return _samples(await Exposition(node).scrape())


async def test_replication(node: Any) -> None:
    _led(node.partitions[0], (3, 4, 5), (3, 4), isr_min=2)
    _led(node.partitions[1], (3, 4, 5), (3,), isr_min=2)
    followed = _partition("late", 0, start=0, end=5, high=5)
    followed.is_leader, followed.leader_id = False, -1
    node.partitions.append(followed)
    node.metrics.isr_shrinks, node.metrics.isr_expands = 4, 3
    node.metrics.unclean_leaderships, node.metrics.replicas_lost = 2, 1
    node.metrics.controller_elections, node.metrics.brokers_fenced, node.metrics.unclean_elections = 5, 6, 8
    lag = SimpleNamespace(topic="late", partition=0, leader=4, records=12)
    node.fetchers = lambda: SimpleNamespace(
        bytes_fetched=10_000, bytes_moved=500, truncations=6, records_lost=7, lags=lambda: [lag]
    )
    samples = await _scrape(node)
    shown = {name: value for (name, labels), value in samples.items() if not labels}
    assert shown["penstock_replicas"] == 3
    assert shown["penstock_partitions_led"] == 2
    assert shown["penstock_partitions_under_replicated"] == 2
    assert shown["penstock_partitions_under_min_isr"] == 1
    assert shown["penstock_partitions_offline"] == 3
    assert (shown["penstock_isr_shrinks_total"], shown["penstock_isr_expands_total"]) == (4, 3)
    assert (shown["penstock_unclean_leaderships_total"], shown["penstock_replicas_lost_total"]) == (2, 1)
    assert shown["penstock_committed_messages_lost_total"] == 7
    assert (shown["penstock_controller_elections_total"], shown["penstock_brokers_fenced_total"]) == (5, 6)
    assert shown["penstock_unclean_elections_total"] == 8
    assert (shown["penstock_controller_active"], shown["penstock_quorum_leader"]) == (1, 3)
    assert (shown["penstock_quorum_epoch"], shown["penstock_metadata_applied_offset"]) == (4, 77)
    of_4 = (("partition", "0"), ("replica", "4"), ("topic", "orders"))
    of_5 = (("partition", "0"), ("replica", "5"), ("topic", "orders"))
    assert samples["penstock_replica_lag_messages", of_4] == 2
    assert ("penstock_replica_lag_messages", of_5) not in samples, "what is not known is not zero"
    assert samples["penstock_replica_lag_seconds", of_5] > 10
    behind = (("leader", "4"), ("partition", "0"), ("topic", "late"))
    assert samples["penstock_follower_lag_messages", behind] == 12


async def test_acknowledgements_are_timed_by_topic(node: Any) -> None:
    node.metrics.traffic("orders").acks.observe(0.02)
    samples = await _scrape(node)
    assert samples["penstock_topic_ack_seconds_sum", (("topic", "orders"),)] == 0.02


async def test_traffic_of_a_topic(node: Any) -> None:
    traffic = node.metrics.traffic("orders")
    traffic.bytes_in, traffic.bytes_out, traffic.messages_in, traffic.messages_out = 1000, 3000, 10, 30
    samples = await _scrape(node)
    topic = (("topic", "orders"),)
    assert samples["penstock_topic_in_bytes_total", topic] == 1000
    assert samples["penstock_topic_out_bytes_total", topic] == 3000
    assert samples["penstock_topic_in_messages_total", topic] == 10
    assert samples["penstock_topic_out_messages_total", topic] == 30


async def test_request_times_are_cumulative_and_by_name(node: Any) -> None:
    for seconds in (0.0001, 0.02, 0.02, 99.0):
        node.metrics.observe_request(PRODUCE, seconds)
    node.metrics.observe_request(FETCH, 0.3)
    samples = await _scrape(node)

    def at_most(api: str, bound: str) -> float:
        return samples["penstock_request_seconds_bucket", (("api", api), ("le", bound))]

    bounds = [*map(str, LATENCY_BUCKETS), "+Inf"]
    assert [at_most("produce", bound) for bound in bounds] == [1] * 7 + [3] * 7 + [4]
    assert samples["penstock_request_seconds_count", (("api", "produce"),)] == 4
    assert samples["penstock_request_seconds_sum", (("api", "produce"),)] == pytest.approx(99.0401)
    assert at_most("fetch", "0.25") == 0
    assert at_most("fetch", "0.5") == 1


async def test_errors_by_api_and_code(node: Any) -> None:
    node.metrics.count_error("produce", "message_too_large")
    node.metrics.count_error("produce", "message_too_large")
    node.metrics.count_error("fetch", "kafka_storage_error")
    samples = await _scrape(node)
    assert samples["penstock_request_errors_total", (("api", "produce"), ("error", "message_too_large"))] == 2
    assert samples["penstock_storage_errors_total", ()] == 1


async def test_lag_is_what_a_group_could_still_read(node: Any) -> None:
    samples = await _scrape(node)

    def labels(topic: str, partition: str) -> tuple[tuple[str, str], ...]:
        return ("group", "billing"), ("partition", partition), ("topic", topic)

    assert samples["penstock_group_committed_offset", labels("orders", "0")] == 90
    assert samples["penstock_group_lag_messages", labels("orders", "0")] == 10
    assert samples["penstock_group_lag_messages", labels("orders", "1")] == 0
    assert samples["penstock_group_committed_offset", labels("gone", "0")] == 1
    assert ("penstock_group_lag_messages", labels("gone", "0")) not in samples
    assert samples["penstock_groups", (("state", "Empty"),)] == 1


@pytest.mark.parametrize("told", [10, ApiError(ErrorCode.leader_not_available)], ids=["known", "unknown"])
async def test_lag_of_partitions_that_other_nodes_have(
    node: Any, monkeypatch: pytest.MonkeyPatch, told: int | ApiError
) -> None:
    asked: list[Any] = []

    async def end_offsets(metadata: Any, brokers: Any, partitions: Any) -> dict[Any, Any]:
        asked.append(partitions)
        return dict.fromkeys(partitions, told)

    monkeypatch.setattr("penstock.broker.coordinators.groups.end_offsets.end_offsets", end_offsets)
    await node.groups.read("billing", lambda shard: _commit(shard, "billing", FAR))
    exposition = Exposition(node)
    key = "penstock_group_lag_messages", (("group", "billing"), ("partition", "0"), ("topic", "far"))
    for _ in range(2):
        samples = _samples(await exposition.scrape())
        assert samples.get(key) == (7 if told == 10 else None)
        assert samples["penstock_group_lag_unknown", ()] == (0 if told == 10 else 1)
    assert asked == [[("far", 0)]] * (1 if told == 10 else 2), (
        "what is known is not asked for at every scrape"
    )


def _commit(shard: GroupCoordinatorShard, group: str, *offsets: OffsetToCommit) -> None:
    work = shard.commit(CommitRequest(group_id=group, offsets=offsets), object(), now_ms=1)
    for key, value in work.records:
        shard.replay(key, value)


async def test_groups_beyond_the_bound_are_counted(node: Any) -> None:
    shard = node.groups.shard
    for number in range(5):
        _commit(shard, f"group-{number}", OffsetToCommit(topic="orders", partition=0, offset=1))
    shard.groups["group-3"] = SimpleNamespace(state_name="Stable", member_count=2)
    node.settings = load_settings({"penstock.metrics.groups.max": "2"}, {})
    samples = await _scrape(node)
    assert samples["penstock_groups_omitted", ()] == 4
    assert samples["penstock_groups", (("state", "Empty"),)] == 5
    assert samples["penstock_groups", (("state", "Stable"),)] == 1
    shown = {labels[0][1] for name, labels in samples if name == "penstock_group_members"}
    assert shown == {"group-3", "billing"}, "those with members come first, then by name"
    assert samples["penstock_group_offsets_omitted", ()] == 0


async def test_committed_offsets_beyond_the_bound_are_counted(node: Any) -> None:
    _commit(node.groups.shard, "many", *(OffsetToCommit(topic="t", partition=i, offset=1) for i in range(10)))
    node.settings = load_settings({"penstock.metrics.group.offsets.max": "5"}, {})
    samples = await _scrape(node)
    assert len([name for name, _ in samples if name == "penstock_group_committed_offset"]) == 5
    assert samples["penstock_group_offsets_omitted", ()] == 8
    assert samples["penstock_groups_omitted", ()] == 0


async def test_without_coordinators_the_rest_is_still_shown(node: Any) -> None:
    node.groups.error = ApiError(ErrorCode.coordinator_load_in_progress)
    samples = await _scrape(node)
    assert samples["penstock_coordinators_ready", ()] == 0
    assert samples["penstock_ready", ()] == 1
    assert not [name for name, _ in samples if name.startswith("penstock_group_")]


async def test_logs_and_the_node_itself(node: Any) -> None:
    node.metrics.malformed_frames = 4
    node.metrics.flushes.observe(0.003)
    samples = await _scrape(node)
    partition = (("partition", "0"), ("topic", "orders"))
    assert samples["penstock_partition_start_offset", partition] == 10
    assert samples["penstock_partition_end_offset", partition] == 101
    assert samples["penstock_partition_high_watermark_offset", partition] == 100
    assert samples["penstock_partition_last_stable_offset", partition] == 95
    assert samples["penstock_partition_size_bytes", partition] == 10_100
    assert samples["penstock_partition_segments", partition] == 3
    assert samples["penstock_connections", (("listener", "INTERNAL"),)] == 2
    assert samples["penstock_connections", (("listener", "EXTERNAL"),)] == 0
    assert samples["penstock_unauthenticated_connections", (("listener", "EXTERNAL"),)] == 2
    assert samples["penstock_malformed_frames_total", ()] == 4
    assert samples["penstock_flush_seconds_count", ()] == 1
    assert samples["penstock_partitions_failed", ()] == 1
    assert samples["penstock_fetch_sessions", ()] == 5
    assert samples["penstock_request_buffer_bytes", ()] == 4096
    assert samples["process_resident_memory_bytes", ()] > 0


async def test_everything_has_a_help_text_and_our_name(node: Any) -> None:
    families = list(text_string_to_metric_families((await Exposition(node).scrape()).decode()))
    assert all(family.documentation for family in families)
    assert {family.name.split("_")[0] for family in families} == {"penstock", "process"}


async def test_those_who_ask_at_once_share_one_scrape(node: Any) -> None:
    exposition, renders = Exposition(node), []
    in_thread = node.threads.in_thread

    def counted(*args: Any) -> Any:
        renders.append(args)
        return in_thread(*args)

    node.threads.in_thread = counted
    first, *others = await asyncio.gather(*(exposition.scrape() for _ in range(10)))
    assert others == [first] * 9
    await exposition.scrape()
    assert len(renders) == 2


async def test_one_who_gives_up_does_not_take_the_others_along(node: Any) -> None:
    exposition = Exposition(node)
    first, second = (asyncio.create_task(exposition.scrape()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert b"penstock_build_info" in await second


async def test_a_failed_scrape_does_not_spoil_the_next(node: Any) -> None:
    exposition, partitions = Exposition(node), node.partitions
    node.partitions = None
    with pytest.raises(TypeError):
        await exposition.scrape()
    node.partitions = partitions
    assert await exposition.scrape()


def test_label_values_are_escaped() -> None:
    name = 'a"b\\c\nd'
    text = render([MetricFamily("gauge", "penstock_x", "X.", ("group",), [((name,), 1.0)])])
    assert _samples(text)["penstock_x", (("group", name),)] == 1


def test_a_histogram_without_labels() -> None:
    counts = (1,) * (len(LATENCY_BUCKETS) + 1)
    text = render(
        [MetricFamily("histogram", "penstock_x_seconds", "X.", (), [((), HistogramSnapshot(counts, 2.5))])]
    )
    samples = _samples(text)
    assert samples["penstock_x_seconds_count", ()] == len(counts)
    assert samples["penstock_x_seconds_sum", ()] == 2.5
