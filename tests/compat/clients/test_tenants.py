"""What the users of a tenant may see and use, with the clients that they have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from prometheus_client.parser import text_string_to_metric_families
from tests import outcomes as delivery
from tests.waiting import eventually

from penstock.client.admin.acls import list_acls
from penstock.client.admin.tenants import (
    Tenant,
    alter_tenant,
    delete_tenant,
    find_tenant,
    list_tenants,
    tenant_changes,
    tenant_usage,
)
from penstock.client.admin.transactions import list_transaction_descriptions
from penstock.client.errors import Refused, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import ConfigResourceType, alter_configs
from penstock.protocol.acls import AclFilter
from penstock.protocol.errors import ErrorCode
from penstock.testing import EmbeddedBroker

QUIET = {"log_level": 0}
ACME = Tenant("acme", ("ann", "app"), "acme.", {"partitions_max": 6, "groups_max": 2})
GLOBEX = Tenant("globex", ("gus",), "globex-", {})


def connected(broker: EmbeddedBroker, user: str | None = None) -> Cluster:
    return Cluster(
        ConnectionSettings.parse({**broker.client_settings(user), "default.api.timeout.ms": "20000"})
    )


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    # Everybody may use what no rule covers, but for the users of tenants.
    settings = {
        "allow.everyone.if.no.acl.found": True,
        "penstock.http.listen": "127.0.0.1:0",
        "quota.window.num": 3,  # a burst of two seconds' worth
    }
    with EmbeddedBroker(secure=True, settings=settings) as broker:
        for user in ("ann", "app", "gus", "eve"):
            broker.create_user(user)
        with connected(broker) as cluster:
            for tenant in (ACME, GLOBEX):
                alter_tenant(cluster, tenant.name, tenant_changes(tenant, None))
        yield broker


@pytest.fixture
def cluster(broker: EmbeddedBroker) -> Iterator[Cluster]:
    with connected(broker) as cluster:
        yield cluster


def admin(broker: EmbeddedBroker, user: str) -> AdminClient:
    return AdminClient({**broker.client_settings(user), **QUIET})


def create(broker: EmbeddedBroker, user: str, name: str, partitions: int = 1) -> str | None:
    """Return why the topic was not created."""
    client = admin(broker, user)  # it has to outlive the request
    (done,) = client.create_topics([NewTopic(name, partitions, 1)]).values()
    try:
        done.result(60)
    except KafkaException as error:
        return f"{error.args[0].name()}: {error.args[0].str()}"
    return None


def produce(broker: EmbeddedBroker, user: str, topic: str, **settings: Any) -> Any:
    outcomes: list[Any] = []
    producer = Producer({**broker.client_settings(user), **QUIET, **settings})
    delivery.produce(producer, topic, b"hello", outcomes.append)
    assert producer.flush(60) == 0
    return outcomes[0] and outcomes[0].code()


def consume(broker: EmbeddedBroker, user: str, topic: str, group: str, **settings: Any) -> Any:
    """Return the first message, or the code of the error."""
    consumer = Consumer(
        {
            **broker.client_settings(user),
            **QUIET,
            "group.id": group,
            "auto.offset.reset": "earliest",
            **settings,
        }
    )
    try:
        consumer.subscribe([topic])
        (message,) = consumer.consume(1, 60)
        return message.value() if message.error() is None else message.error().code()
    finally:
        consumer.close()


def test_users_have_their_namespace_and_see_nothing_else(broker: EmbeddedBroker, cluster: Cluster) -> None:
    assert create(broker, "ann", "acme.orders", 2) is None
    assert create(broker, "gus", "globex-orders") is None
    assert create(broker, "eve", "shared") is None
    assert str(create(broker, "ann", "elsewhere")).startswith("TOPIC_AUTHORIZATION_FAILED")
    assert str(create(broker, "ann", "globex-mine")).startswith("TOPIC_AUTHORIZATION_FAILED")
    assert produce(broker, "app", "acme.orders") is None
    assert produce(broker, "gus", "acme.orders") == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert produce(broker, "ann", "shared") == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert produce(broker, "eve", "acme.orders") == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert consume(broker, "ann", "acme.orders", "acme.billing") == b"hello"
    assert consume(broker, "ann", "acme.orders", "billing") == KafkaError.GROUP_AUTHORIZATION_FAILED
    assert {*admin(broker, "ann").list_topics(timeout=60).topics} == {"acme.orders"}
    assert {*admin(broker, "gus").list_topics(timeout=60).topics} == {"globex-orders"}

    def groups_of(user: str) -> set[str]:
        client = admin(broker, user)
        found = client.list_consumer_groups().result(60)
        return {group.group_id for group in found.valid}

    assert groups_of("ann") == {"acme.billing"}
    assert groups_of("gus") == set()
    rules = {acl.principal for acl in list_acls(cluster, AclFilter(resource_name="acme."))}
    assert rules == {"User:ann", "User:app"}


def test_transactional_ids_are_the_tenants_own(broker: EmbeddedBroker) -> None:
    def begun(user: str, name: str) -> Producer:
        producer = Producer({**broker.client_settings(user), **QUIET, "transactional.id": name})
        producer.init_transactions(60)
        return producer

    with pytest.raises(KafkaException) as raised:
        begun("app", "globex-tx")
    assert raised.value.args[0].code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    begun("app", "acme.tx")
    begun("gus", "globex-tx")
    for user, own in (("app", "acme.tx"), ("gus", "globex-tx")):
        with connected(broker, user) as cluster:
            assert [each.transactional_id for each in list_transaction_descriptions(cluster)] == [own]


def test_partitions_and_groups_are_bounded(broker: EmbeddedBroker) -> None:
    assert create(broker, "app", "acme.more", 3) is None
    refused = create(broker, "app", "acme.too-many", 5)
    assert refused is not None
    assert refused.startswith("POLICY_VIOLATION: Tenant acme has")
    client = admin(broker, "app")
    (grown,) = client.create_partitions([NewPartitions("acme.more", 9)]).values()
    with pytest.raises(KafkaException, match="of at most 6 partitions"):
        grown.result(60)
    produce(broker, "app", "acme.more")
    assert consume(broker, "app", "acme.more", "acme.g1") == b"hello"
    # acme.billing, of the test before, is the other one.
    assert consume(broker, "app", "acme.more", "acme.g2") == KafkaError.POLICY_VIOLATION
    new = {"group.protocol": "consumer"}
    assert consume(broker, "app", "acme.more", "acme.g3", **new) == KafkaError._FATAL
    produce(broker, "app", "acme.more")
    assert consume(broker, "app", "acme.more", "acme.g1") == b"hello"


def test_connections_are_bounded_for_all_users_together(broker: EmbeddedBroker, cluster: Cluster) -> None:
    alter_tenant(cluster, "globex", {"connections_max": "1"})
    with connected(broker, "gus") as first:
        assert first.cluster_id
        late = {**broker.client_settings("gus"), "default.api.timeout.ms": "1000"}
        with pytest.raises(Unavailable), Cluster(ConnectionSettings.parse(late)) as second:
            _ = second.cluster_id
        assert tenant_usage(cluster)["globex"].connections == 1
        alter_tenant(cluster, "globex", {"connections_max": None})
        with connected(broker, "gus") as third:
            assert third.cluster_id
            assert tenant_usage(cluster)["globex"].connections == 2
    eventually(lambda: tenant_usage(cluster)["globex"].connections == 0)


def test_rates_are_limited_for_all_users_together(broker: EmbeddedBroker, cluster: Cluster) -> None:
    """Steadily and with a connection for each record: no more than the rate, a burst, and what is under way."""
    rate, size, burst_s = 100_000, 50_000, 3
    alter_tenant(cluster, "acme", {"producer_byte_rate": str(rate), "consumer_byte_rate": str(rate)})

    def new_producer(user: str) -> Producer:
        return Producer(
            {
                **broker.client_settings(user),
                **QUIET,
                "linger.ms": 0,
            }
        )

    began = time.monotonic()
    try:
        producers = [new_producer(user) for user in ("ann", "app", "ann", "app")]
        sent = 0
        for number in range(16):
            producer = producers[number % 4] if number < 8 else new_producer("ann")
            producer.produce("acme.orders", bytes(size))
            assert producer.flush(60) == 0
            sent += size
            allowed = rate * (time.monotonic() - began + burst_s) + (len(producers) + 1) * size
            assert sent <= 1.1 * allowed
        eventually(lambda: producers[0].poll(0.01) is not None and tenant_usage(cluster)["acme"].throttled_ms)
        assert tenant_usage(cluster)["acme"].produced > 0
    finally:
        alter_tenant(cluster, "acme", {"producer_byte_rate": None, "consumer_byte_rate": None})


def test_requests_are_limited(broker: EmbeddedBroker, cluster: Cluster) -> None:
    alter_tenant(cluster, "globex", {"request_rate": "5"})
    try:
        before = tenant_usage(cluster)["globex"].throttled_ms
        with connected(broker, "gus") as users:
            assert any(tenant_usage(users)["globex"].throttled_ms > before for _ in range(100))
    finally:
        alter_tenant(cluster, "globex", {"request_rate": None})


def test_storage_is_measured_and_a_budget_is_exceeded(broker: EmbeddedBroker, cluster: Cluster) -> None:
    produce(broker, "app", "acme.orders")
    budgets = broker._node().tenants
    alter_tenant(cluster, "acme", {"storage_bytes_max": "1"})
    stored = eventually(lambda: tenant_usage(cluster)["acme"].stored_bytes)
    excess = eventually(lambda: budgets.excess_bytes("acme.orders"))
    assert excess >= stored - 1 > 0
    assert budgets.excess_bytes("globex-orders") == budgets.excess_bytes("shared") == 0
    alter_tenant(cluster, "acme", {"storage_bytes_max": None})
    assert budgets.excess_bytes("acme.orders") == 0


def test_usage_is_in_the_metrics(broker: EmbeddedBroker) -> None:
    produce(broker, "app", "acme.orders")
    with urlopen(f"{broker.http_url}/metrics", timeout=20) as answer:
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
            if sample.name.startswith("penstock_tenant_")
        }
    assert samples["penstock_tenant_produced_bytes_total", "acme"] > 0
    assert samples["penstock_tenant_requests_total", "acme"] > 0
    assert samples["penstock_tenant_stored_bytes", "acme"] > 0
    assert samples["penstock_tenant_refused_total", "acme", "groups"] > 0
    assert ("penstock_tenant_connections", "globex") in samples


def test_share_groups_are_throttled_too(broker: EmbeddedBroker, cluster: Cluster) -> None:
    alter_tenant(cluster, "acme", {"groups_max": "3"})
    with connected(broker, "app") as own:
        alter_configs(own, ConfigResourceType.GROUP, "acme.share", {"share.auto.offset.reset": "earliest"})
    produce(broker, "app", "acme.more")
    settings = {**broker.client_settings("app"), **QUIET, "group.id": "acme.share"}
    consumer = ShareConsumer(settings)
    alter_tenant(cluster, "acme", {"consumer_byte_rate": "6"})
    try:
        before = tenant_usage(cluster)["acme"].throttled_ms
        consumer.subscribe(["acme.more"])
        assert eventually(lambda: [each.value() for each in consumer.poll(1) if each.error() is None])
        assert tenant_usage(cluster)["acme"].throttled_ms > before
    finally:
        alter_tenant(cluster, "acme", {"consumer_byte_rate": None, "groups_max": "2"})
        consumer.close()


def test_super_users_are_no_tenants(cluster: Cluster) -> None:
    with pytest.raises(Refused, match=r"User admin is one of super\.users"):
        alter_tenant(cluster, "root", {"users": "User:admin", "prefix": "root."})
    assert find_tenant(cluster, "root") is None


def test_users_of_tenants_may_not_manage_tenants(broker: EmbeddedBroker) -> None:
    with connected(broker, "ann") as cluster:
        for attempt in (
            lambda: alter_tenant(cluster, "acme", {"partitions_max": "999"}),
            lambda: alter_tenant(cluster, "mine", {"users": "User:ann", "prefix": "x"}),
            lambda: find_tenant(cluster, "acme"),
            lambda: list_tenants(cluster),
        ):
            with pytest.raises(Refused) as raised:
                attempt()
            assert raised.value.code is ErrorCode.cluster_authorization_failed
        assert {*tenant_usage(cluster)} == {"acme"}
    with connected(broker, "eve") as cluster:
        # Everybody may use what no rule covers, so a user of no tenant may look; this says so in the docs.
        assert [*tenant_usage(cluster)] == ["acme", "globex"]


def test_tenants_survive_a_restart_and_access_ends_with_them(
    broker: EmbeddedBroker, cluster: Cluster
) -> None:
    broker.restart()
    with connected(broker) as again:
        assert [tenant.name for tenant in list_tenants(again)] == ["acme", "globex"]
        assert find_tenant(again, "acme") == ACME
        assert find_tenant(again, "nothing") is None
        assert produce(broker, "app", "acme.orders") is None
        assert produce(broker, "gus", "acme.orders") == KafkaError.TOPIC_AUTHORIZATION_FAILED
        delete_tenant(again, GLOBEX)
        assert [tenant.name for tenant in list_tenants(again)] == ["acme"]
        assert list_acls(again, AclFilter(principal="User:gus")) == []
        assert [*tenant_usage(again)] == ["acme"]
