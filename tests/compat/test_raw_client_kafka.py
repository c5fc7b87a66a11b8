"""The raw client on Apache Kafka, if its jars are available, also with TLS and SASL."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.compat import apache_kafka
from tests.compat.apache_kafka import PASSWORD, SCRAM_PASSWORD, ApacheKafka
from tests.compat.raw_client import batch, read, read_committed, settings, values
from tests.waiting import eventually

from penstock.client.errors import AuthenticationFailed, OutOfRange, Refused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import PartitionReader
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import (
    EARLIEST,
    LATEST,
    CommittedOffset,
    commit_offsets,
    committed_offsets,
    group_info,
    list_offsets,
)
from penstock.client.wire.producer import RawProducer, TwoPhaseKind, end_prepared_transaction
from penstock.client.wire.topics import (
    NewTopic,
    alter_topic_settings,
    create_topics,
    delete_topics,
    topic_settings,
)
from penstock.client.wire.transactions import describe_transaction, list_transactions
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ErrorCode

pytestmark = [
    *apache_kafka.NEEDED,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate"),
]

PROTOCOLS = pytest.mark.parametrize("version", [0, 2], ids=["older protocol", "newer protocol"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka")


@pytest.fixture(scope="module")
def certificate(folder: Path) -> Path:
    return apache_kafka.make_certificate(folder)


@pytest.fixture(scope="module")
def kafka(folder: Path, certificate: Path) -> Iterator[ApacheKafka]:
    broker = apache_kafka.secure_kafka(folder)
    yield broker
    broker.stop()


@pytest.fixture
def cluster(kafka: ApacheKafka) -> Iterator[Cluster]:
    with Cluster(
        settings(kafka.address("PLAINTEXT"), **{"topic.metadata.propagation.max.ms": "500"})
    ) as made:
        yield made


@pytest.fixture
def topic(cluster: Cluster, unique: Callable[[str], str]) -> str:
    name = unique("orders")
    create_topics(cluster, [NewTopic(name=name, partitions=2)])
    return name


@pytest.mark.parametrize("codec", Codec)
def test_what_was_written_is_read(cluster: Cluster, topic: str, codec: Codec) -> None:
    with RawProducer(cluster) as producer:
        producer.init()
        deliveries = [producer.send(topic, n % 2, batch(b"%d" % n, codec=codec)) for n in range(100)]
        producer.flush()
    assert [each.offset for each in deliveries[::2]] == list(range(50))
    assert values(read(cluster, topic, 1, bytes_max=500)) == [b"%d" % n for n in range(1, 100, 2)]
    ends = list_offsets(cluster, {(topic, 0): EARLIEST, (topic, 1): LATEST})
    assert [each and each.offset for each in ends.values()] == [0, 50]
    with pytest.raises(OutOfRange):
        PartitionReader(cluster, topic, cluster.topic(topic).id, 0).fetch(51, wait_ms=10)


def test_topics_and_groups(cluster: Cluster, topic: str, group: str) -> None:
    alter_topic_settings(cluster, topic, {"retention.ms": "1234"})
    eventually(lambda: topic_settings(cluster, topic)["retention.ms"] == "1234", what="the setting")
    commit_offsets(cluster, group, {(topic, 1): 3}, metadata="m")
    assert committed_offsets(cluster, group) == {(topic, 1): CommittedOffset(offset=3, metadata="m")}
    told = group_info(cluster, group)
    assert told is not None
    assert told.state == "Empty"
    delete_topics(cluster, [topic])
    eventually(lambda: cluster.topics([topic]) == {}, what="its end")


@PROTOCOLS
def test_transactions(cluster: Cluster, topic: str, group: str, version: int) -> None:
    with RawProducer(cluster, transactional_id=topic, transaction_version_max=version) as producer:
        producer.init()
        assert producer.transaction_version == version
        for turn in range(4):
            producer.send(topic, 0, batch(b"%d" % turn))
            producer.send(topic, 1, batch(b"%d" % turn))
            producer.commit_offsets(group, {(topic, 0): turn + 1})
            producer.end(turn % 2 == 0)
    for index in (0, 1):
        assert read_committed(cluster, topic, index) == [b"0", b"2"]
    assert committed_offsets(cluster, group, [(topic, 0)]) == {(topic, 0): CommittedOffset(offset=3)}


@PROTOCOLS
def test_prepared_by_one_and_ended_by_another(
    cluster: Cluster, kafka: ApacheKafka, topic: str, version: int
) -> None:
    """Two phases are not switched on there: the longest timeout has to do."""
    prepared = []
    for name in ("winner", "loser"):
        with (
            Cluster(settings(kafka.address("PLAINTEXT"))) as other,
            RawProducer(
                other, transactional_id=f"{name}-{topic}", two_phase=True, transaction_version_max=version
            ) as producer,
        ):
            producer.init()
            assert producer.two_phase_kind is TwoPhaseKind.UNTIL_TIMEOUT
            assert producer.transaction_timeout_ms == 900_000
            producer.send(topic, 0, batch(name.encode()))
            prepared.append(producer.prepare())
    winner, loser = prepared
    assert read(cluster, topic, isolation=IsolationLevel.READ_COMMITTED) == []
    info = describe_transaction(cluster, winner.transactional_id)
    assert info is not None
    assert (info.state, info.partitions) == ("Ongoing", ((topic, 0),))
    for _ in range(3):
        end_prepared_transaction(cluster, winner, commit=True)
        end_prepared_transaction(cluster, loser, commit=False)
    for other_way in (winner, loser):
        with pytest.raises(Refused) as caught:
            end_prepared_transaction(cluster, other_way, commit=other_way is loser)
        assert caught.value.code is ErrorCode.invalid_txn_state
    assert read_committed(cluster, topic) == [b"winner"]


@PROTOCOLS
def test_a_prepared_transaction_that_took_too_long(cluster: Cluster, topic: str, version: int) -> None:
    with RawProducer(
        cluster, transactional_id=topic, transaction_timeout_ms=3000, transaction_version_max=version
    ) as producer:
        producer.init()
        producer.send(topic, 0, batch(b"slow"))
        prepared = producer.prepare()
    eventually(lambda: list_transactions(cluster, topic) == {topic: "CompleteAbort"}, what="its end")
    with pytest.raises(Refused):
        end_prepared_transaction(cluster, prepared, commit=True)
    for _ in range(2):
        end_prepared_transaction(cluster, prepared, commit=False)
    assert read_committed(cluster, topic) == []


# Ways in


def secure(kafka: ApacheKafka, protocol: str, host: str = "127.0.0.1", **more: str) -> Cluster:
    given = {"security.protocol": protocol, "default.api.timeout.ms": "3000"}
    given |= {name.replace("_", "."): value for name, value in more.items()}
    return Cluster(settings(kafka.address(protocol, host), **given))


def credentials(mechanism: str, password: str) -> dict[str, str]:
    return {"sasl_mechanism": mechanism, "sasl_username": "alice", "sasl_password": password}


@pytest.mark.parametrize(
    ("mechanism", "password"),
    [("PLAIN", PASSWORD), ("SCRAM-SHA-256", SCRAM_PASSWORD), ("SCRAM-SHA-512", SCRAM_PASSWORD)],
)
def test_logging_in(kafka: ApacheKafka, topic: str, mechanism: str, password: str) -> None:
    with secure(kafka, "SASL_PLAINTEXT", **credentials(mechanism, password)) as cluster:
        assert topic in cluster.topics()
    with (
        secure(kafka, "SASL_PLAINTEXT", **credentials(mechanism, "wrong")) as cluster,
        pytest.raises(AuthenticationFailed, match="refuses the login of alice"),
    ):
        cluster.topics()


def test_tls(kafka: ApacheKafka, topic: str, certificate: Path) -> None:
    """Brokers advertise an address that the certificate does not name."""
    lenient = {"ssl_ca_location": str(certificate), "ssl_endpoint_identification_algorithm": "none"}
    with secure(kafka, "SSL", **lenient) as cluster, RawProducer(cluster) as producer:
        producer.init()
        sent = [b"%d" % n * 20_000 for n in range(20)]
        for value in sent:
            producer.send(topic, 0, batch(value))
        producer.flush()
        assert values(read(cluster, topic)) == sent
    with secure(kafka, "SASL_SSL", **lenient, **credentials("SCRAM-SHA-512", SCRAM_PASSWORD)) as cluster:
        assert topic in cluster.topics()
    with (
        secure(kafka, "SSL", host="localhost") as cluster,
        pytest.raises(AuthenticationFailed, match="not trusted: self-signed"),
    ):
        cluster.topics()
    strict = {"ssl_ca_location": str(certificate)}
    with (
        secure(kafka, "SSL", **strict) as cluster,
        pytest.raises(AuthenticationFailed, match="not valid for"),
    ):
        cluster.topics()
