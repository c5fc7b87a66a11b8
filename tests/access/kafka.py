"""Plays the matrix at Apache Kafka with its StandardAuthorizer: `python -m tests.access.kafka` records the table.

The client is alice, by SASL PLAIN. The admin comes over PLAINTEXT as ANONYMOUS, which is a super user.
"""

import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

from kio.serial.errors import OutOfBoundValue
from tests.access.matrix import (
    BETWEEN_NODES,
    HIDDEN,
    MADE,
    MILLISECOND,
    TABLE,
    TOPIC,
    Case,
    cases,
    deletion_request,
    play,
)
from tests.access.ours import play_here, set_up
from tests.compat.apache_kafka import HOST, JAAS, ApacheKafka
from tests.compat.raw import RawConnection, schema

from penstock.protocol.acls import AclBinding
from penstock.protocol.errors import ErrorCode

PASSWORD = "open-sesame"
SETTLED_S = 300.0
SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        f'{JAAS}.plain.PlainLoginModule required user_alice="{PASSWORD}";'
    ),
}


def start(folder: Path) -> ApacheKafka:
    return ApacheKafka(folder, ("PLAINTEXT", "SASL_PLAINTEXT"), SETTINGS).start()


class KafkaPlayer:
    def __init__(self, kafka: ApacheKafka) -> None:
        self._kafka = kafka
        self._admin = RawConnection(socket.create_connection((HOST, kafka.ports["PLAINTEXT"]), 60))
        self._client: RawConnection | None = None
        self._rules: set[AclBinding] = set()

    async def ask(self, request: Any) -> Any:
        if self._client is None:
            address = (HOST, self._kafka.ports["SASL_PLAINTEXT"])
            self._client = RawConnection(socket.create_connection(address, 60))
            self._client.call(schema("sasl_handshake", 1, "SaslHandshakeRequest")(mechanism="PLAIN"))
            token = b"\0alice\0" + PASSWORD.encode()
            answer = self._client.call(
                schema("sasl_authenticate", 2, "SaslAuthenticateRequest")(auth_bytes=token)
            )
            assert answer.error_code is ErrorCode.none, answer
        try:
            return self._client.call(request)
        except OutOfBoundValue as error:
            return error
        except (AssertionError, ConnectionError):
            self._client = None
            return None

    async def prepare(self, case: Case) -> UUID:
        self._set_rules(set(case.rules))
        await self._prepare_topics((TOPIC, HIDDEN))
        while self._topics((MADE,))[MADE] is not None:
            self._admin.call(deletion_request())
        await set_up(self._ask_as_admin)
        topic_id: UUID = self._topics((TOPIC,))[TOPIC]
        return topic_id

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
        deadline = time.monotonic() + SETTLED_S
        while self._stored() != len(rules):
            assert time.monotonic() < deadline, "the broker has not learned the rules"
            time.sleep(0.005)

    def _stored(self) -> int:
        answer = self._admin.call(
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
        return sum(len(resource.acls) for resource in answer.resources)


def played_at_kafka() -> Iterable[Case]:
    return (case for case in cases() if case.variant.api_key not in BETWEEN_NODES)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kafka = start(Path(folder) / "kafka")
        try:
            player = KafkaPlayer(kafka)
            answers = asyncio.run(play(player.ask, player.prepare, played_at_kafka()))
        finally:
            kafka.stop()
        between = [case for case in cases() if case.variant.api_key in BETWEEN_NODES]
        of_nodes = asyncio.run(play_here(Path(folder) / "ours", between))
    header = (
        "Recorded from Apache Kafka (4.x, StandardAuthorizer) by tests.access.kafka. What Apache "
        "Kafka serves on controllers only (`between_nodes`) is not played there: its source refuses it "
        "without CLUSTER_ACTION."
    )
    table = {"header": header, "answers": answers, "between_nodes": of_nodes}
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    target.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
