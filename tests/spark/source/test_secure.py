"""TLS and passwords in Spark's options, against Apache Kafka, if its jars are available."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from tests.compat import apache_kafka
from tests.compat.apache_kafka import JAAS, PASSWORD, SCRAM_PASSWORD, ApacheKafka
from tests.spark.source.topics import Topics, numbers

pytestmark = [
    *apache_kafka.NEEDED,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka")


@pytest.fixture(scope="module")
def kafka(folder: Path) -> Iterator[ApacheKafka]:
    apache_kafka.make_certificate(folder)
    broker = apache_kafka.secure_kafka(folder)
    yield broker
    broker.stop()


@pytest.fixture
def topics(kafka: ApacheKafka) -> Topics:
    return Topics(kafka.address("PLAINTEXT"))


@pytest.fixture
def tls(folder: Path) -> dict[str, str]:
    """The broker advertises an address that its certificate does not contain."""
    return {
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": str(folder / "server.pem"),
        "kafka.ssl.endpoint.identification.algorithm": "none",
    }


def login(module: str, mechanism: str, password: str) -> dict[str, str]:
    escaped = password.replace('"', '\\"')
    return {
        "kafka.sasl.mechanism": mechanism,
        "kafka.sasl.jaas.config": f'{JAAS}.{module} required username="alice" password="{escaped}";',
    }


PLAIN = login("plain.PlainLoginModule", "PLAIN", PASSWORD)
SCRAM = login("scram.ScramLoginModule", "SCRAM-SHA-512", SCRAM_PASSWORD)


def way_in(kafka: ApacheKafka, protocol: str, *settings: dict[str, str]) -> dict[str, str]:
    given = {"kafka.bootstrap.servers": kafka.address(protocol), "kafka.security.protocol": protocol}
    for each in settings:
        given |= each
    return given


def copy(spark: Any, given: dict[str, str], source: str, target: str, checkpoint: Path) -> None:
    reading = spark.readStream.format("penstock").options(**given, subscribe=source)
    frame = reading.option("startingOffsets", "earliest").load().select("value")
    writer = frame.writeStream.format("penstock").options(**given, topic=target, contract="exactly-once")
    running = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert running.awaitTermination(100)


@pytest.mark.parametrize("protocol", ["SSL", "SASL_PLAINTEXT", "SASL_SSL"])
def test_written_streamed_and_read(spark, kafka, topics, tls, unique, tmp_path, protocol):
    """By driver and tasks, with transactions and without."""
    settings = {"SSL": [tls], "SASL_PLAINTEXT": [PLAIN], "SASL_SSL": [tls, SCRAM]}[protocol]
    given = way_in(kafka, protocol, *settings)
    source, target = (topics.create(unique(name), 2) for name in ("in", "out"))
    rows = spark.range(20).selectExpr("cast(id as string) as value")
    rows.write.format("penstock").mode("append").options(**given, topic=source).save()
    copy(spark, given, source, target, tmp_path / "checkpoint")
    reader = spark.read.format("penstock").options(**given, subscribe=target)
    assert numbers(reader.option("kafka.isolation.level", "read_committed").load().collect()) == [*range(20)]


def test_a_wrong_password_is_an_error_that_does_not_contain_the_password(spark, kafka, tls, topics, unique):
    topic = topics.create(unique("t"))
    wrong = login("scram.ScramLoginModule", "SCRAM-SHA-512", "guessed-secret")
    cases = [
        (way_in(kafka, "SASL_SSL", tls, wrong), "refuses the login of alice"),
        (way_in(kafka, "SASL_SSL", SCRAM), "not trusted"),
    ]
    for given, words in cases:
        frame = spark.read.format("penstock").options(**given, subscribe=topic).load()
        with pytest.raises(PySparkException) as raised:
            frame.collect()
        assert words in str(raised.value)
        assert "guessed-secret" not in str(raised.value)
        assert "Traceback" not in str(raised.value)
