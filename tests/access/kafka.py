"""Plays the matrix at Apache Kafka with its StandardAuthorizer: `python -m tests.access.kafka` records the table.

The clients are alice and, for delegation tokens, the admin, by SASL PLAIN. Otherwise the admin comes over PLAINTEXT as
ANONYMOUS, which is a super user as well. What is for controllers is sent to the controller's listener, where the broker
logs in as the admin.
"""

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.access.matrix import (
    BETWEEN_NODES,
    HIDDEN,
    MADE,
    MILLISECOND,
    TABLE,
    TOPIC,
    Case,
    Token,
    Variant,
    World,
    begin_transaction,
    cases,
    cases_without_rules,
    deletion_request,
    make_tokens,
    play,
    set_up,
)
from tests.access.ours import OPEN
from tests.compat.apache_kafka import HOST, JAAS, ApacheKafka
from tests.compat.raw import RawConnection, Unreadable, schema
from tests.waiting import eventually

from penstock.protocol.acls import AclBinding
from penstock.protocol.errors import ErrorCode

PASSWORD = "open-sesame"
SETTLED_S = 300.0
SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:admin",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.controller.protocol": "PLAIN",
    **{
        f"listener.name.{name}.plain.sasl.jaas.config": (
            f'{JAAS}.plain.PlainLoginModule required username="admin" password="{PASSWORD}" '
            f'user_admin="{PASSWORD}" user_alice="{PASSWORD}";'
        )
        for name in ("sasl_plaintext", "controller")
    },
    "delegation.token.secret.key": "secret",
}


def log_in(kafka: ApacheKafka, listener: str, user: str) -> RawConnection:
    client = RawConnection(socket.create_connection((HOST, kafka.ports[listener]), 60))
    client.call(schema("sasl_handshake", 1, "SaslHandshakeRequest")(mechanism="PLAIN"))
    token = f"\0{user}\0{PASSWORD}".encode()
    answer = client.call(schema("sasl_authenticate", 2, "SaslAuthenticateRequest")(auth_bytes=token))
    assert answer.error_code is ErrorCode.none, answer
    return client


class KafkaPlayer:
    def __init__(self, kafka: ApacheKafka) -> None:
        self._kafka = kafka
        self._admin = RawConnection(socket.create_connection((HOST, kafka.ports["PLAINTEXT"]), 60))
        self._clients: dict[tuple[str, str], RawConnection] = {}
        self._rules: set[AclBinding] = set()
        self._tokens: dict[str, Token] = {}
        self._is_made = False

    def _logged_in(self, listener: str, user: str) -> RawConnection:
        if (listener, user) not in self._clients:
            self._clients[listener, user] = log_in(self._kafka, listener, user)
        return self._clients[listener, user]

    async def ask(self, variant: Variant, request: Any) -> Any:
        listener = "CONTROLLER" if variant.api_key in BETWEEN_NODES else "SASL_PLAINTEXT"
        try:
            return self._logged_in(listener, "alice").call(request)
        except Unreadable as error:
            return error
        except (AssertionError, ConnectionError):
            del self._clients[listener, "alice"]
            return None

    async def prepare(self, case: Case) -> World:
        await self._prepare_topics((TOPIC, HIDDEN))
        if self._is_made:  # in the background
            eventually(lambda: self._topics((MADE,))[MADE], within_s=SETTLED_S, what="the topic")
        self._is_made = case.makes_topic
        while self._topics((MADE,))[MADE] is not None:
            self._admin.call(deletion_request())
        await set_up(self._ask_as_admin)
        if not self._tokens:
            await begin_transaction(self._ask_as_admin)
            self._tokens = await make_tokens(self._ask_about_tokens)
        world = World(self._topics((TOPIC,))[TOPIC], self._tokens)
        self._set_rules({world.named(acl) for acl in case.rules})
        return world

    async def _ask_about_tokens(self, request: Any) -> Any:
        return self._logged_in("SASL_PLAINTEXT", "admin").call(request)

    async def _ask_as_admin(self, request: Any) -> Any:
        return self._admin.call(request)

    async def _prepare_topics(self, names: tuple[str, ...]) -> None:
        while True:
            found = self._topics(names)
            if None not in found.values():
                return
            for name in names:
                if found[name] is None:
                    self._create(name)
            await asyncio.sleep(0.01)

    def _topics(self, names: tuple[str, ...]) -> dict[str, Any]:
        metadata = schema("metadata", 12, "MetadataRequest")
        element = schema("metadata", 12, "MetadataRequestTopic")
        request = metadata(
            topics=tuple(element(topic_id=None, name=name) for name in names),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        return {
            topic.name: topic.topic_id
            if topic.error_code is ErrorCode.none and topic.partitions[0].leader_id > 0
            else None
            for topic in self._admin.call(request).topics
        }

    def _create(self, name: str) -> None:
        topic = schema("create_topics", 7, "CreatableTopic")(
            name=name, num_partitions=1, replication_factor=1, assignments=(), configs=()
        )
        self._admin.call(
            schema("create_topics", 7, "CreateTopicsRequest")(
                topics=(topic,), timeout=10_000 * MILLISECOND, validate_only=False
            )
        )

    def _set_rules(self, rules: set[AclBinding]) -> None:
        gone, new = self._rules - rules, rules - self._rules
        if gone:
            matching = schema("delete_acls", 3, "DeleteAclsFilter")
            filters = tuple(
                matching(
                    resource_type_filter=acl.resource_type,
                    resource_name_filter=acl.resource_name,
                    pattern_type_filter=acl.pattern_type,
                    principal_filter=acl.principal,
                    host_filter=acl.host,
                    operation=acl.operation,
                    permission_type=acl.permission,
                )
                for acl in gone
            )
            self._admin.call(schema("delete_acls", 3, "DeleteAclsRequest")(filters=filters))
        if new:
            creation = schema("create_acls", 3, "AclCreation")
            creations = tuple(
                creation(
                    resource_type=acl.resource_type,
                    resource_name=acl.resource_name,
                    resource_pattern_type=acl.pattern_type,
                    principal=acl.principal,
                    host=acl.host,
                    operation=acl.operation,
                    permission_type=acl.permission,
                )
                for acl in new
            )
            answer = self._admin.call(schema("create_acls", 3, "CreateAclsRequest")(creations=creations))
            assert all(result.error_code is ErrorCode.none for result in answer.results), answer
        self._rules = rules
        # The broker and the controller, which decides about what is forwarded, learn the rules by themselves.
        for listener in ("SASL_PLAINTEXT", "CONTROLLER"):
            eventually(
                lambda where=listener: self._stored(where) == rules, within_s=SETTLED_S, what="the rules"
            )

    def _stored(self, listener: str) -> set[AclBinding]:
        answer = self._logged_in(listener, "admin").call(
            schema("describe_acls", 3, "DescribeAclsRequest")(
                resource_type_filter=1,
                resource_name_filter=None,
                pattern_type_filter=1,
                principal_filter=None,
                host_filter=None,
                operation=1,
                permission_type=1,
            )
        )
        return {
            AclBinding(
                resource.resource_type,
                resource.resource_name,
                resource.pattern_type,
                acl.principal,
                acl.host,
                acl.operation,
                acl.permission_type,
            )
            for resource in answer.resources
            for acl in resource.acls
        }


def record(wanted: Iterable[Case], settings: Mapping[str, str]) -> dict[str, Any]:
    listeners = ("PLAINTEXT", "SASL_PLAINTEXT")
    with tempfile.TemporaryDirectory() as folder:
        kafka = ApacheKafka(Path(folder), listeners, settings, controller_protocol="SASL_PLAINTEXT").start()
        try:
            player = KafkaPlayer(kafka)
            return asyncio.run(play(player.ask, player.prepare, wanted))
        finally:
            kafka.stop()


def main() -> None:
    table = {
        "header": "Recorded from Apache Kafka (4.x, StandardAuthorizer) by tests.access.kafka.",
        "answers": record(cases(), SETTINGS),
        "answers_without_rules": record(cases_without_rules(), SETTINGS | OPEN),
    }
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    target.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
