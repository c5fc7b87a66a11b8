"""Access rules over the wire: created, described and deleted, and in force at once and after a restart."""

from pathlib import Path
from typing import Any

from kio.schema.create_acls.v3 import request as create
from kio.schema.delete_acls.v3 import request as delete
from kio.schema.describe_acls.v3 import request as describe
from tests.access.matrix import TOPIC, VARIANTS, World, answer_of
from tests.access.ours import ADMIN, SETTINGS, Client
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import create_topic

from penstock.protocol.acls import Operation, PatternType, Permission, ResourceType
from penstock.protocol.errors import ErrorCode

ANYTHING: dict[str, Any] = {
    "resource_type_filter": ResourceType.ANY,
    "resource_name_filter": None,
    "pattern_type_filter": PatternType.ANY,
    "principal_filter": None,
    "host_filter": None,
    "operation": Operation.ANY,
    "permission_type": Permission.ANY,
}
RULE: dict[str, Any] = {
    "resource_type": ResourceType.TOPIC,
    "resource_name": TOPIC,
    "resource_pattern_type": PatternType.LITERAL,
    "principal": "User:alice",
    "host": "*",
    "operation": Operation.READ,
    "permission_type": Permission.ALLOW,
}
(FETCH,) = (variant for variant in VARIANTS if variant.label == "fetch")


async def test_rules_come_into_force_and_go(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        await create_topic(node, TOPIC)
        admin, alice = Client(node, principal=ADMIN), Client(node)
        read = FETCH.request(World(node.image.topics[TOPIC].id, {}))
        assert answer_of(await alice.ask(read), {})["refused"]
        creations = (create.AclCreation(**RULE), create.AclCreation(**RULE | {"resource_name": ""}))
        made = await admin.ask(create.CreateAclsRequest(creations=creations))
        assert [result.error_code for result in made.results] == [ErrorCode.none, ErrorCode.invalid_request]
        assert answer_of(await alice.ask(read), {})["refused"] == []
    async with sasl_node(tmp_path, **SETTINGS) as node:  # the rules are in the metadata log
        admin, alice = Client(node, principal=ADMIN), Client(node)
        assert answer_of(await alice.ask(read), {})["refused"] == []
        (found,) = (await admin.ask(describe.DescribeAclsRequest(**ANYTHING))).resources
        assert (found.resource_name, [acl.principal for acl in found.acls]) == (TOPIC, ["User:alice"])
        gone = await admin.ask(delete.DeleteAclsRequest(filters=(delete.DeleteAclsFilter(**ANYTHING),)))
        assert [acl.resource_name for acl in gone.filter_results[0].matching_acls] == [TOPIC]
        assert answer_of(await alice.ask(read), {})["refused"]
        assert (await admin.ask(describe.DescribeAclsRequest(**ANYTHING))).resources == ()


async def test_a_filter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        request = describe.DescribeAclsRequest(**ANYTHING | {"operation": 0})
        answer = await Client(node, principal=ADMIN).ask(request)
    assert answer.error_code is ErrorCode.invalid_request
