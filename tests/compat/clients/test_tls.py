"""Clients over TLS, with certificates of their own; certificates that are replaced under load."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer
from kafka import KafkaConsumer, KafkaProducer
from tests.brokers import BrokerProcess
from tests.certificates import Authority
from tests.waiting import eventually

TOPIC = "over-tls"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_broker(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[BrokerProcess]:
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:SSL",
        "ssl.keystore.location": str(authority.issue("node")),
        "ssl.truststore.location": str(authority.certificate),
        "ssl.client.auth": "required",
    }
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), settings).start()
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Path:
    return authority.issue("alice")


@pytest.fixture(scope="module")
def librdkafka(tls_broker: BrokerProcess, authority: Authority, certificate: Path) -> dict[str, str]:
    return {
        "bootstrap.servers": tls_broker.bootstrap_servers,
        "security.protocol": "SSL",
        "ssl.ca.location": str(authority.certificate),
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(certificate),
    }


@pytest.fixture(scope="module")
def context(authority: Authority, certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.load_cert_chain(certificate)
    return context


def test_confluent_kafka(librdkafka: dict[str, str]) -> None:
    producer = Producer(librdkafka)
    values = [str(number).encode() * 1000 for number in range(500)]
    for value in values:
        producer.produce(f"{TOPIC}-1", value)
    assert producer.flush(60) == 0
    consumer = Consumer({**librdkafka, "group.id": "g1", "auto.offset.reset": "earliest"})
    consumer.subscribe([f"{TOPIC}-1"])
    read: list[bytes | None] = []
    while len(read) < len(values):
        read += [message.value() for message in consumer.consume(500, 60)]
    assert read == values
    consumer.close()


def test_kafka_python(tls_broker: BrokerProcess, context: ssl.SSLContext) -> None:
    common = {
        "bootstrap_servers": tls_broker.bootstrap_servers,
        "security_protocol": "SSL",
        "ssl_context": context,
    }
    with KafkaProducer(**common) as producer:
        assert producer.send(f"{TOPIC}-2", b"hello").get(60).offset == 0
    consumer = KafkaConsumer(f"{TOPIC}-2", **common, auto_offset_reset="earliest", consumer_timeout_ms=60_000)
    assert next(consumer).value == b"hello"
    consumer.close()


async def test_aiokafka(tls_broker: BrokerProcess, context: ssl.SSLContext) -> None:
    common = {
        "bootstrap_servers": tls_broker.bootstrap_servers,
        "security_protocol": "SSL",
        "ssl_context": context,
    }
    async with AIOKafkaProducer(**common) as producer:
        assert (await producer.send_and_wait(f"{TOPIC}-3", b"hello")).offset == 0
    async with AIOKafkaConsumer(f"{TOPIC}-3", **common, auto_offset_reset="earliest") as consumer:
        async with asyncio.timeout(60):
            assert (await consumer.getone()).value == b"hello"


def test_certificates_are_replaced_under_load(
    tls_broker: BrokerProcess, authority: Authority, librdkafka: dict[str, str]
) -> None:
    """One producer keeps its connection, new ones connect all the time; none gets an error."""
    errors: list[object] = []
    steady = Producer({**librdkafka, "error_cb": errors.append})
    delivered: list[object] = []

    def report(error: object, message: object) -> None:
        (errors if error else delivered).append(error or message)

    sent = 0
    for round_number in range(3):
        authority.issue(f"node-{round_number}", file="node.pem")

        def is_used(want: str = f"node-{round_number}") -> bool:
            nonlocal sent
            steady.produce(f"{TOPIC}-4", b"steady", on_delivery=report)
            fresh = Producer({**librdkafka, "error_cb": errors.append})
            fresh.produce(f"{TOPIC}-4", b"fresh", on_delivery=report)
            assert fresh.flush(60) == 0
            steady.poll(0)
            sent += 2
            return _common_name(tls_broker, authority, librdkafka["ssl.certificate.location"]) == want

        eventually(is_used)
    assert steady.flush(60) == 0
    assert errors == []
    assert len(delivered) == sent


def _common_name(broker: BrokerProcess, authority: Authority, certificate: str) -> str:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.load_cert_chain(certificate)
    host, port = broker.address
    with (
        socket.create_connection((host, port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        found = secured.getpeercert()
        assert found is not None
        subject = dict(pair[0] for pair in found["subject"])  # type: ignore[misc]
        return str(subject["commonName"])
