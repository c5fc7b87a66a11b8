"""Requests for features that a node lacks (ACLs, several log directories) get the replies of Apache Kafka."""

from pathlib import Path
from typing import Any

import pytest
from kio.schema.alter_replica_log_dirs.v2 import request as log_dirs
from kio.schema.create_acls.v3 import request as create
from kio.schema.delete_acls.v3 import request as delete
from kio.schema.describe_acls.v3 import request as describe
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.protocol.errors import ErrorCode

ANY, TOPIC, LITERAL, ALLOW = 1, 2, 3, 3
NO_AUTHORIZER = "No Authorizer is configured on the broker"


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_access_rules_are_security_disabled(tmp_path: Path, version: int) -> None:
    anything: dict[str, Any] = {
        "resource_type_filter": ANY,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": None,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }
    rule = create.AclCreation(
        resource_type=TOPIC,
        resource_name="t",
        resource_pattern_type=LITERAL,
        principal="User:a",
        host="*",
        operation=LITERAL,
        permission_type=ALLOW,
    )
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        described = await client.ask(describe.DescribeAclsRequest(**anything), version=version)
        created = await client.ask(create.CreateAclsRequest(creations=(rule, rule)), version=version)
        deleted = await client.ask(
            delete.DeleteAclsRequest(filters=(delete.DeleteAclsFilter(**anything),)), version=version
        )
        await client.close()
    answers = [described, *created.results, *deleted.filter_results]
    assert [(a.error_code, a.error_message) for a in answers] == [
        (ErrorCode.security_disabled, NO_AUTHORIZER)
    ] * 4
    assert described.resources == ()


async def test_a_replica_can_only_stay_in_the_data_folder(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", 2)
        client = await WireClient.connect(node)
        folder = node.settings.data_dir

        async def alter(path: str, topic: str, *partitions: int) -> list[ErrorCode]:
            asked = log_dirs.AlterReplicaLogDirTopic(name=topic, partitions=partitions)
            directory = log_dirs.AlterReplicaLogDir(path=path, topics=(asked,))
            (answer,) = (await client.ask(log_dirs.AlterReplicaLogDirsRequest(dirs=(directory,)))).results
            assert answer.topic_name == topic
            assert [p.partition_index for p in answer.partitions] == list(partitions)
            return [p.error_code for p in answer.partitions]

        assert await alter(folder, "t", 0, 1) == [ErrorCode.none, ErrorCode.none]
        assert await alter("/elsewhere", "t", 0) == [ErrorCode.log_dir_not_found]
        assert await alter(f"{folder}/", "t", 0) == [ErrorCode.log_dir_not_found]
        assert await alter(folder, "t", 7) == [ErrorCode.unknown_topic_or_partition]
        assert await alter(folder, "unknown", 0) == [ErrorCode.unknown_topic_or_partition]
        await client.close()
