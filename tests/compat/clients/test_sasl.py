"""Clients that log in with SASL: every mechanism that each of them has, right and wrong passwords, long sessions."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError as AioKafkaError
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError as KafkaPythonError
from tests.brokers import BrokerProcess
from tests.waiting import eventually

#: kafka-python and aiokafka do not escape names.
USER, ESCAPED_USER, PASSWORD = "alice", "a=l,ice", "pass,=word"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SESSION_MS = 3_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """All users of PLAIN are those with a SCRAM credential, apart from the first one."""
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "listener.name.plaintext.plain.sasl.jaas.config": (
            'org.apache.kafka.common.security.plain.PlainLoginModule required user_admin="first";'
        ),
        "penstock.sasl.plain.scram.credentials": "true",
        "connections.max.reauth.ms": str(SESSION_MS),
    }
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), settings).start()
    admin = AdminClient(librdkafka(broker, "PLAIN", "admin", "first"))
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        info = ScramCredentialInfo(mechanism, 4096)
        users = [UserScramCredentialUpsertion(name, info, PASSWORD.encode()) for name in (USER, ESCAPED_USER)]
        for done in admin.alter_user_scram_credentials(users).values():
            done.result()
    yield broker
    assert broker.stop() == 0
    assert "first" not in "".join(broker.output)
    assert PASSWORD not in "".join(broker.output)


def librdkafka(broker: BrokerProcess, mechanism: str, user: str = USER, password: str = PASSWORD) -> Any:
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "log_level": 0,
    }


def in_python(broker: BrokerProcess, mechanism: str, user: str = USER, password: str = PASSWORD) -> Any:
    return {
        "bootstrap_servers": broker.bootstrap_servers,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka(mechanism: str, broker: BrokerProcess) -> None:
    topic = f"confluent-{mechanism}"
    producer = Producer(librdkafka(broker, mechanism, ESCAPED_USER))
    producer.produce(topic, b"hello")
    assert producer.flush(60) == 0
    reading = {"group.id": topic, "auto.offset.reset": "earliest"}
    consumer = Consumer(librdkafka(broker, mechanism, ESCAPED_USER) | reading)
    consumer.subscribe([topic])
    message = eventually(lambda: consumer.poll(1))
    assert message.value() == b"hello"
    consumer.close()


def test_a_session_of_librdkafka_outlives_its_bound(broker: BrokerProcess) -> None:
    """librdkafka logs in again before its session ends, and loses neither records nor its connection."""
    errors: list[KafkaError] = []
    producer = Producer(librdkafka(broker, "SCRAM-SHA-256") | {"error_cb": errors.append})
    sent = 0

    def produce_one() -> bool:
        nonlocal sent
        producer.produce("long-session", b"x")
        assert producer.flush(60) == 0
        sent += 1
        return sessions_over()

    end = time.monotonic() + 2.5 * SESSION_MS / 1000

    def sessions_over() -> bool:
        return time.monotonic() > end

    assert eventually(produce_one)
    assert sent > 1
    assert not errors


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python(mechanism: str, broker: BrokerProcess) -> None:
    topic = f"python-{mechanism}"
    producer = KafkaProducer(**in_python(broker, mechanism))
    producer.send(topic, b"hello").get(60)
    producer.close()
    consumer = KafkaConsumer(topic, **in_python(broker, mechanism), auto_offset_reset="earliest")
    assert next(consumer).value == b"hello"
    consumer.close()


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_aiokafka(mechanism: str, broker: BrokerProcess) -> None:
    topic = f"aio-{mechanism}"
    async with AIOKafkaProducer(**in_python(broker, mechanism)) as producer:
        await producer.send_and_wait(topic, b"hello")
    options = {"auto_offset_reset": "earliest"}
    async with AIOKafkaConsumer(topic, **in_python(broker, mechanism), **options) as consumer:
        assert (await consumer.getone()).value == b"hello"


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("user", "password"), [(USER, "wrong"), ("nobody", PASSWORD)])
async def test_who_is_refused(
    mechanism: str, user: str, password: str, broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[KafkaError] = []
    given = librdkafka(broker, mechanism, user, password) | {"error_cb": errors.append}
    client = AdminClient(given)
    assert eventually(lambda: client.poll(0.1) or errors)
    assert any("invalid credentials with SASL mechanism" in error.str() for error in errors)
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.5)
    eventually(lambda: kafka_python_is_refused(in_python(broker, mechanism, user, password), caplog))
    with pytest.raises(AioKafkaError):
        await AIOKafkaProducer(**in_python(broker, mechanism, user, password)).start()


def kafka_python_is_refused(settings: Any, caplog: pytest.LogCaptureFixture) -> bool:
    """It tries again until its time is up, and tells only its log why."""
    caplog.clear()
    with pytest.raises(KafkaPythonError):
        KafkaProducer(**settings, bootstrap_timeout_ms=500)
    return "SaslAuthenticationFailedError" in caplog.text
