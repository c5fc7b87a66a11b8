"""A node with TLS, every SASL mechanism and access rules, what is planted in it, and what must stay as it is."""

import asyncio
import base64
import random
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from tests import tokens
from tests.brokers import BrokerProcess, executable, set_flags
from tests.certificates import Authority
from tests.fuzz.hostile import Knowledge
from tests.fuzz.logins import Known
from tests.fuzz.security import PREY_USERS
from tests.fuzz.state import SETTINGS, check_node
from tests.ports import free_address
from tests.unit.broker.wire_client import WireClient

from penstock.client.admin.acls import create_acls, list_acls
from penstock.client.admin.quotas import alter_quotas
from penstock.client.admin.tokens import create_token, list_tokens
from penstock.client.admin.users import list_users, set_password
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.acls import (
    WILDCARD,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from penstock.protocol.sasl_client import ScramExchange
from penstock.protocol.schemas import schema_class
from penstock.protocol.scram import SCRAM_HASHES

ADMIN, CALM_USER, MALLORY, TRUDY = "admin", "calm-user", "mallory", "trudy"
#: A topic whose name the attackers know, with records that they must not see; and names that they must not learn.
TARGET, HIDDEN_TOPIC, HIDDEN_USER = "target", "hidden-topic", "hidden-user"
PLANTED_VALUE, PLANTED_SETTING = b"planted-in-a-record", "98765432101"
#: In no answer to a client without rules.
MARKERS = (b"hidden-", b"planted-", PLANTED_SETTING.encode())
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
RECORDS = 50


class ProtectedNode(BrokerProcess):
    """Listens twice: `address` without TLS, `tls_address` with it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.authority = Authority(folder / "certificates")
        self.issuer_key = tokens.new_key()
        keys = folder / "keys.json"
        keys.write_bytes(tokens.key_set(one=self.issuer_key))
        self.passwords = {
            name: f"{name}-{random.SystemRandom().getrandbits(64):x}" for name in (ADMIN, CALM_USER)
        }
        self.passwords |= {MALLORY: "of-mallory", TRUDY: "of-trudy"}
        users = " ".join(f'user_{name}="{password}"' for name, password in self.passwords.items())
        self.tls_address, self._plain_address = free_address("127.0.0.1"), free_address("127.0.0.1")
        self._http = "{}:{}".format(*free_address("127.0.0.1"))
        settings = {
            **SETTINGS,
            "authorizer.class.name": "StandardAuthorizer",
            "connection.failed.authentication.delay.ms": "1",
            "delegation.token.secret.key": "of this node",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{MODULE} required {users};",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{MODULE} required {users};",
            "penstock.http.listen": self._http,
            "sasl.enabled.mechanisms": ",".join(("PLAIN", *SCRAM_HASHES, "OAUTHBEARER")),
            "sasl.oauthbearer.expected.audience": tokens.AUDIENCE,
            "sasl.oauthbearer.expected.issuer": tokens.ISSUER,
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
            "ssl.keystore.location": str(self.authority.issue("node")),
            "ssl.truststore.location": str(self.authority.certificate),
            "super.users": f"User:{ADMIN}",
        }
        super().__init__(folder / "data", settings, log=folder / "log")

    def _command(self) -> list[str]:
        plain, tls = ("{}:{}".format(*address) for address in (self._plain_address, self.tls_address))
        flags = {"listeners": f"SASL_PLAINTEXT://{plain},SASL_SSL://{tls}", "log.dirs": str(self.data_dir)}
        return [*executable(), "serve", *set_flags({**self.settings, **flags})]

    def check(self) -> dict[str, float]:
        return check_node(self, self._http)

    @property
    def memory_kb(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def client_settings(self, user: str, mechanism: str = "SCRAM-SHA-512") -> dict[str, Any]:
        """Of a client over TLS; both librdkafka and the client of this project take them."""
        return {
            "bootstrap.servers": f"localhost:{self.tls_address[1]}",
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.authority.certificate),
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": self.passwords[user],
        }

    def admin(self) -> Cluster:
        return Cluster(ConnectionSettings.parse(self.client_settings(ADMIN, "PLAIN")))


def prepare(node: ProtectedNode) -> Known:
    """Create users, rules and what is planted; return what the attackers know."""
    settings = node.client_settings(ADMIN, "PLAIN")
    client = AdminClient(settings)
    for future in client.create_topics(
        [NewTopic(name, 1, 1, config={"retention.ms": PLANTED_SETTING}) for name in (TARGET, HIDDEN_TOPIC)]
    ).values():
        future.result(60)
    producer = Producer(settings)
    for _ in range(RECORDS):
        producer.produce(TARGET, PLANTED_VALUE)
    assert producer.flush(60) == 0
    with node.admin() as admin:
        for name in (CALM_USER, MALLORY, TRUDY):
            set_password(admin, name, node.passwords[name])
        set_password(admin, HIDDEN_USER, "unused")
        create_acls(admin, [*_rules_of_calm(), *_rules_of_trudy(), *_hidden_rules()])
        alter_quotas(admin, {"user": HIDDEN_USER}, {"producer_byte_rate": 1e9})
        hidden = create_token(admin)
        own, spare = (create_token(admin, owner=f"User:{MALLORY}") for _ in range(2))
        overheard = {mechanism: asyncio.run(_overhear(node, mechanism)) for mechanism in SCRAM_HASHES}
    return Known(
        name=MALLORY,
        password=node.passwords[MALLORY],
        token_id=own.token_id,
        token_hmac=own.hmac,
        spare_hmac=base64.b64decode(spare.hmac),
        others=(ADMIN, CALM_USER, TRUDY),
        other_token_ids=(hidden.token_id,),
        overheard=overheard,
        issuer_key=node.issuer_key,
    )


async def _overhear(node: ProtectedNode, mechanism: str) -> tuple[bytes, bytes]:
    """The messages of a login that succeeds."""
    exchange = ScramExchange(SCRAM_HASHES[mechanism], CALM_USER, node.passwords[CALM_USER], nonce="overheard")
    client = WireClient(*await asyncio.open_connection(*node.address))
    first = exchange.first()
    await client.ask(SaslHandshakeRequest(mechanism=mechanism))
    final = exchange.next((await client.ask(SaslAuthenticateRequest(auth_bytes=first))).auth_bytes)
    assert final is not None
    assert (await client.ask(SaslAuthenticateRequest(auth_bytes=final))).auth_bytes
    await client.close()
    return first, final


def _rule(kind: int, name: str, user: str, operation: int) -> AclBinding:
    return AclBinding(kind, name, PatternType.LITERAL, f"User:{user}", WILDCARD, operation, Permission.ALLOW)


def _rules_of_calm() -> Iterable[AclBinding]:
    for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID):
        yield _rule(kind, WILDCARD, CALM_USER, Operation.ALL)
    for operation in (Operation.CREATE, Operation.DESCRIBE, Operation.IDEMPOTENT_WRITE):
        yield _rule(ResourceType.CLUSTER, "kafka-cluster", CALM_USER, operation)


def _rules_of_trudy() -> Iterable[AclBinding]:
    for operation in (
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.ALTER_CONFIGS,
        Operation.DESCRIBE_CONFIGS,
    ):
        yield _rule(ResourceType.CLUSTER, "kafka-cluster", TRUDY, operation)


def _hidden_rules() -> Iterable[AclBinding]:
    yield _rule(ResourceType.TOPIC, HIDDEN_TOPIC, HIDDEN_USER, Operation.READ)


def knowledge(node: ProtectedNode, known_topics: Iterable[str]) -> Knowledge:
    """With the ids of all topics, as if somebody had told them."""
    with node.admin() as admin:
        metadata = _metadata(admin)
        ids = {topic.name: topic.topic_id for topic in metadata.topics}
        assert admin.cluster_id is not None
        return Knowledge(
            cluster_id=admin.cluster_id,
            topic_ids=tuple(ids[name] or uuid.UUID(int=0) for name in (*known_topics, HIDDEN_TOPIC)),
            node_ids=(1,),
        )


def _metadata(admin: Cluster) -> Any:
    request = schema_class("metadata.v12.request:MetadataRequest")(
        topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=False
    )
    return admin.call_any(lambda connection: connection.call(request))


def snapshot(node: ProtectedNode) -> dict[str, Any]:
    """What nobody but the well-behaved client and the operator may change, without what is prey."""
    prey = {f"User:{name}" for name in PREY_USERS} | {f"Group:{name}" for name in PREY_USERS}
    prey |= {f":{name}" for name in PREY_USERS}
    with node.admin() as admin:
        topics = {topic.name: (topic.topic_id, len(topic.partitions)) for topic in _metadata(admin).topics}
        partitions = [(name, place) for name, (_, count) in topics.items() for place in range(count)]
        return {
            "topics": topics,
            "settings": _settings(admin, topics),
            "ends": _ends(admin, [place for place in partitions if not place[0].startswith("__")]),
            "rules": [rule for rule in list_acls(admin, AclFilter()) if rule.principal not in prey],
            "users": [user for user in list_users(admin) if user.name not in PREY_USERS],
            "quotas": _quotas(admin),
            "tokens": [
                (token.token_id, token.renewers, token.max_ms)
                for token in list_tokens(admin)
                if token.owner not in (f"User:{MALLORY}", f"User:{TRUDY}")
            ],
            "groups": _names(admin, "list_groups.v4", "ListGroupsRequest", "groups", states_filter=()),
            "transactions": _names(
                admin,
                "list_transactions.v0",
                "ListTransactionsRequest",
                "transaction_states",
                state_filters=(),
                producer_id_filters=(),
            ),
        }


def _settings(admin: Cluster, topics: Iterable[str]) -> dict[Any, Any]:
    path = "describe_configs.v4.request"
    resource = schema_class(f"{path}:DescribeConfigsResource")
    wanted = [(2, name) for name in topics] + [(4, ""), (4, "1"), (8, "1")]
    request = schema_class(f"{path}:DescribeConfigsRequest")(
        resources=tuple(
            resource(
                resource_type=kind,
                resource_name=name,
                # Loggers are made when they first write.
                configuration_keys=("root", "penstock") if kind == 8 else None,
            )
            for kind, name in wanted
        ),
        include_synonyms=False,
        include_documentation=False,
    )
    response = admin.call_node(1, lambda connection: connection.call(request))
    return {
        (result.resource_type, result.resource_name, config.name): config.value
        for result in response.results
        for config in result.configs
    }


def _ends(admin: Cluster, places: list[tuple[str, int]]) -> list[Any]:
    path = "list_offsets.v7.request"
    topic_class = schema_class(f"{path}:ListOffsetsTopic")
    partition = schema_class(f"{path}:ListOffsetsPartition")
    found = []
    for kind, timestamp in (("earliest", -2), ("latest", -1)):
        request = schema_class(f"{path}:ListOffsetsRequest")(
            replica_id=-1,
            isolation_level=0,
            topics=tuple(
                topic_class(
                    name=name,
                    partitions=(
                        partition(partition_index=place, current_leader_epoch=-1, timestamp=timestamp),
                    ),
                )
                for name, place in places
            ),
        )
        response = admin.call_node(1, lambda connection, request=request: connection.call(request))  # type: ignore[misc]
        found += [
            (kind, topic.name, part.partition_index, part.offset)
            for topic in response.topics
            for part in topic.partitions
        ]
    return found


def _quotas(admin: Cluster) -> list[str]:
    path = "describe_client_quotas.v1.request"
    request = schema_class(f"{path}:DescribeClientQuotasRequest")(components=(), strict=False)
    response = admin.call_any(lambda connection: connection.call(request))
    entries = [
        (
            [(part.entity_type, part.entity_name) for part in entry.entity],
            [(v.key, v.value) for v in entry.values],
        )
        for entry in response.entries or ()
    ]
    return sorted(str(entry) for entry in entries if not _is_prey(entry[0]))


def _is_prey(entity: list[tuple[str, str | None]]) -> bool:
    return any(name is None or not name.startswith("hidden-") for _, name in entity)


def _names(admin: Cluster, path: str, request: str, of: str, **fields: Any) -> list[str]:
    made = schema_class(f"{path}.request:{request}")(**fields)
    ask: Callable[[Connection], Any] = lambda connection: connection.call(made)  # noqa: E731
    found = getattr(admin.call_node(1, ask), of)
    return sorted(entry.group_id if of == "groups" else entry.transactional_id for entry in found)
