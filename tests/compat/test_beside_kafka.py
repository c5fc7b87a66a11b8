"""The same requests to Apache Kafka and to a Penstock node get the same responses."""

import fnmatch
import importlib
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from tests.brokers import TEST_SETTINGS, BrokerProcess
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka
from tests.compat.raw import RawConnection, connected, schema
from tests.streams_heartbeat import joining_heartbeat
from tests.waiting import eventually

from penstock.broker.config.definitions import NODE_SETTINGS

pytestmark = apache_kafka.NEEDED

TOPIC, BROKER, LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND = 0, 1, 2
PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
#: What only nodes send.
NOT_SERVED = {27, 80, 83, 84, 85, 86, 87}
#: Given to both by these tests, or about their addresses.
GIVEN = {
    "advertised.listeners",
    "controller.quorum.voters",
    "inter.broker.listener.name",
    "listeners",
    "log.dirs",
    "share.coordinator.state.topic.min.isr",
    "share.coordinator.state.topic.replication.factor",
    "transaction.state.log.min.isr",
    "transaction.state.log.replication.factor",
    *TEST_SETTINGS,
}


class Pair:
    """A connection to each of the two."""

    def __init__(self, kafka: RawConnection, ours: RawConnection, addresses: tuple[str, str]) -> None:
        self.kafka, self.ours, self.addresses = kafka, ours, addresses

    def ask(self, request: Any, of: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """What both answer, as far as `of` looks at it; they must agree."""
        theirs, mine = of(self.kafka.call(request)), of(self.ours.call(request))
        assert mine == theirs, request
        return mine

    def both(self, request: Any) -> tuple[Any, Any]:
        return self.kafka.call(request), self.ours.call(request)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApacheKafka, BrokerProcess]]:
    folder = tmp_path_factory.mktemp("beside")
    kafka = ApacheKafka(folder / "kafka", ("PLAINTEXT",), {}).start()
    ours = BrokerProcess(folder / "ours").start()
    yield kafka, ours
    ours.stop()
    kafka.stop()


@pytest.fixture
def pair(brokers: tuple[ApacheKafka, BrokerProcess]) -> Iterator[Pair]:
    kafka, ours = brokers
    address = kafka.address("PLAINTEXT")
    with (
        connected((address.rpartition(":")[0], kafka.ports["PLAINTEXT"])) as theirs,
        connected(ours.address) as mine,
    ):
        yield Pair(theirs, mine, (address, ours.bootstrap_servers))


def messages(api: str, version: int) -> Any:
    return importlib.import_module(f"kio.schema.{api}.v{version}.request")


def test_what_is_not_served_is_known(pair: Pair) -> None:
    request = schema("api_versions", 4, "ApiVersionsRequest")(
        client_software_name="test", client_software_version="1"
    )
    theirs, mine = ({a.api_key: a for a in answer.api_keys} for answer in pair.both(request))
    assert theirs.keys() - mine.keys() == NOT_SERVED
    for key in theirs.keys() & mine.keys():
        assert mine[key].min_version == theirs[key].min_version, key
        # v4 and later of AddPartitionsToTxn are sent by brokers only.
        assert mine[key].max_version >= theirs[key].max_version or key == 24, key


def describe(kind: int, name: str, *keys: str) -> Any:
    schemas = messages("describe_configs", 4)
    resource = schemas.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=keys or None
    )
    return schemas.DescribeConfigsRequest(
        resources=(resource,), include_synonyms=False, include_documentation=False
    )


def test_defaults_and_dynamic_settings_that_differ_are_told(pair: Pair) -> None:
    page = PAGE.read_text()
    theirs, mine = (
        {config.name: config for config in answer.results[0].configs}
        for answer in pair.both(describe(BROKER, "1"))
    )
    common = (theirs.keys() & mine.keys()) - GIVEN
    assert len(common) > 80
    differing = {name for name in common if theirs[name].value != mine[name].value}
    differing |= {name for name in common if theirs[name].read_only != mine[name].read_only}
    assert {name for name in differing if f"`{name}`" not in page} == set()
    quiet = {n for n in common if theirs[n].value != mine[n].value and "Kafka" not in NODE_SETTINGS[n].doc}
    assert quiet == set(), "the text of the setting says so too"


def test_settings_that_do_not_exist_here_are_told(pair: Pair) -> None:
    theirs, mine = (
        {config.name for config in answer.results[0].configs} for answer in pair.both(describe(BROKER, "1"))
    )
    named = re.findall(r"`([a-z*][a-z.*]+)`", PAGE.read_text())
    untold = {name for name in theirs - mine if not any(fnmatch.fnmatch(name, told) for told in named)}
    assert untold == set()
    groups = [
        {config.name for config in answer.results[0].configs} for answer in pair.both(describe(GROUP, "g"))
    ]
    assert {name for name in groups[0] - groups[1] if name not in named} == set()


def alter(kind: int, name: str, *changes: tuple[str, int, str | None]) -> Any:
    schemas = messages("incremental_alter_configs", 1)
    configs = tuple(
        schemas.AlterableConfig(name=setting, config_operation=op, value=value)
        for setting, op, value in changes
    )
    resource = schemas.AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
    return schemas.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=True)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        *((BROKER, broker, (name, SET, value)) for broker in ("1", "") for name, value in (
            ("log.dirs", "/x"),
            ("node.id", "3"),
            ("auto.create.topics.enable", "false"),
            ("offsets.retention.minutes", "5"),
            ("max.connections", "500"),
            ("log.cleaner.backoff.ms", "20"),
            ("log.cleaner.threads", "2"),
            ("leader.replication.throttled.rate", "1000"),
            ("unclean.leader.election.enable", "true"),
        )),
        (BROKER, "1", ("min.insync.replicas", SET, "2")),
        (BROKER, "x", ("log.retention.ms", SET, "5")),
        (TOPIC, "none", ("retention.ms", SET, "5")),
        (TOPIC, "", ("retention.ms", SET, "5")),
        (LOGGER, "1", ("no.such.logger", SET, "DEBUG")),
        (LOGGER, "1", ("root", DELETE, "")),
        (LOGGER, "1", ("root", APPEND, "DEBUG")),
        (LOGGER, "1", ("root", SET, "LOUD")),
        (LOGGER, "2", ("root", SET, "DEBUG")),
        (LOGGER, "", ("root", SET, "DEBUG")),
        (CLIENT_METRICS, "s", ("interval.ms", SET, "1000")),
        (CLIENT_METRICS, "s", ("interval.ms", SET, "10")),
        (CLIENT_METRICS, "s", ("match", SET, "foo=a")),
        (CLIENT_METRICS, "s", ("unknown", SET, "a")),
        (CLIENT_METRICS, "", ("interval.ms", SET, "1000")),
        (96, "x", ("a", SET, "1")),  # 64 is a tenant here
    ],
)  # fmt: skip
def test_changes_of_settings_are_taken_or_refused_in_the_same_words(
    pair: Pair, kind: int, name: str, change: tuple[str, int, str | None]
) -> None:
    pair.ask(
        alter(kind, name, change), lambda a: (a.responses[0].error_code, a.responses[0].error_message or "")
    )


@pytest.mark.parametrize(("kind", "name"), [(LOGGER, ""), (LOGGER, "7"), (CLIENT_METRICS, "")])
def test_what_cannot_be_described_is_refused_in_the_same_words(pair: Pair, kind: int, name: str) -> None:
    pair.ask(
        describe(kind, name),
        lambda a: (a.results[0].error_code, a.results[0].error_message, a.results[0].configs),
    )


def test_an_unknown_subscription_has_the_same_defaults(pair: Pair) -> None:
    pair.ask(
        describe(CLIENT_METRICS, "none"),
        lambda a: sorted((c.name, c.value, c.config_source, c.config_type) for c in a.results[0].configs),
    )


def test_access_rules_are_refused_alike(pair: Pair) -> None:
    schemas = messages("describe_acls", 3)
    anything = {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    pair.ask(schemas.DescribeAclsRequest(**anything))
    schemas = messages("delete_acls", 3)
    one = schemas.DeleteAclsFilter(**anything)
    pair.ask(schemas.DeleteAclsRequest(filters=(one,)), lambda a: a.filter_results[0].error_code)


def about(topic: str, *, creates: bool) -> Any:
    schemas = messages("metadata", 12)
    asked = schemas.MetadataRequestTopic(topic_id=None, name=topic)
    return schemas.MetadataRequest(
        topics=(asked,), allow_auto_topic_creation=creates, include_topic_authorized_operations=False
    )


def test_topics_are_created_on_demand_alike(pair: Pair) -> None:
    for name in ("no way!", "", ".", "x" * 250, "__cluster_metadata"):
        pair.ask(about(name, creates=True), lambda answer: answer.topics)
    pair.ask(about("asked", creates=False), lambda answer: answer.topics)
    pair.ask(about("born", creates=True), lambda answer: answer.topics)
    eventually(lambda: pair.ask(about("born", creates=True), lambda a: len(a.topics[0].partitions)) == 1)


def create(pair: Pair, topic: str) -> None:
    schemas = messages("create_topics", 7)
    new = schemas.CreatableTopic(
        name=topic, num_partitions=1, replication_factor=1, assignments=(), configs=()
    )
    pair.ask(schemas.CreateTopicsRequest(topics=(new,)), lambda answer: answer.topics[0].error_code)
    eventually(lambda: pair.ask(about(topic, creates=False), lambda a: len(a.topics[0].partitions)) == 1)


def test_the_last_stable_offset_is_told_to_every_reader(pair: Pair) -> None:
    create(pair, "stable")
    for address in pair.addresses:
        producer = Producer({"bootstrap.servers": address, "transactional.id": f"t-{time.time_ns()}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        for _ in range(3):
            producer.produce("stable", b"x")
        assert producer.flush(30) == 0
    schemas = messages("fetch", 12)
    asked = schemas.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=0,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=10_000,
    )
    for isolation in (0, 1):
        request = schemas.FetchRequest(
            replica_id=-1,
            max_wait=timedelta(0),
            min_bytes=0,
            max_bytes=10_000,
            isolation_level=isolation,
            session_id=0,
            session_epoch=-1,
            topics=(schemas.FetchTopic(topic="stable", partitions=(asked,)),),
            forgotten_topics_data=(),
            rack_id="",
        )

        def offsets(answer: Any) -> tuple[int, int, int]:
            read = answer.responses[0].partitions[0]
            return read.high_watermark, read.last_stable_offset, read.log_start_offset

        assert pair.ask(request, offsets) == (3, 0, 0)


def test_replicas_stay_in_their_folder(pair: Pair) -> None:
    create(pair, "placed")
    schemas = messages("alter_replica_log_dirs", 2)
    for path, topic in (("/nowhere", "placed"), ("relative", "placed"), ("", "placed"), ("/nowhere", "none")):
        one = schemas.AlterReplicaLogDirTopic(name=topic, partitions=(0,))
        folder = schemas.AlterReplicaLogDir(path=path, topics=(one,))
        pair.ask(schemas.AlterReplicaLogDirsRequest(dirs=(folder,)))


def _internal(name: str, partitions: int = 0) -> dict[str, Any]:
    return {"name": name, "partitions": partitions, "replication_factor": 1, "topic_configs": ()}


@pytest.mark.parametrize(
    "subtopology",
    [
        {"source_topics": ("no way!",)},
        {"source_topics": ("__consumer_offsets",)},
        {"repartition_sink_topics": ("no way!",)},
        {"state_changelog_topics": ("no way!",)},
        {"state_changelog_topics": ("__transaction_state",)},
        {"state_changelog_topics": (("counts", 3),)},
        {"source_topic_regex": ("a.*",)},
        {"source_topics": ()},
        {"repartition_source_topics": ("never-written",)},
        {"source_topics": (), "repartition_source_topics": ("loop",), "repartition_sink_topics": ("loop",)},
    ],
    ids=str,
)
def test_topologies_of_streams_groups_are_refused_in_the_same_words(
    pair: Pair, subtopology: dict[str, Any]
) -> None:
    if not pair.ours.call(about("words", creates=False)).topics[0].partitions:
        create(pair, "words")
    schemas = messages("streams_group_heartbeat", 0)
    for name in subtopology.keys() & {"state_changelog_topics", "repartition_source_topics"}:
        given = (each if isinstance(each, tuple) else (each,) for each in subtopology[name])
        subtopology = {**subtopology, name: tuple(schemas.TopicInfo(**_internal(*each)) for each in given)}
    joining = joining_heartbeat(schemas, f"streams-{time.time_ns()}", **subtopology)

    def refusal(answer: Any) -> tuple[Any, str]:
        return answer.error_code, answer.error_message

    coordinator = messages("find_coordinator", 4).FindCoordinatorRequest(
        key_type=0, coordinator_keys=(joining.group_id,)
    )

    def coordinated() -> bool:
        """The first request creates the topic of coordinators."""
        found = pair.both(coordinator)
        return all(answer.coordinators[0].error_code.value == 0 for answer in found) and all(
            refusal(answer)[0].value not in (14, 15, 16) for answer in pair.both(joining)
        )

    eventually(coordinated)
    assert pair.ask(joining, refusal)[0].value != 0
