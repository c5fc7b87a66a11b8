"""SCRAM credentials of users on a running node: set, described and removed, and there again after a restart."""

from pathlib import Path
from typing import Any

from kio.schema.alter_user_scram_credentials.v0 import request as alter
from kio.schema.describe_user_scram_credentials.v0 import request as describe
from tests.unit.broker.raw_client import running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.network.error_responses import error_response
from penstock.protocol.errors import ErrorCode


def upsertion(name: str, mechanism: int = 1, iterations: int = 4096) -> Any:
    return alter.ScramCredentialUpsertion(
        name=name, mechanism=mechanism, iterations=iterations, salt=b"salt", salted_password=b"salted"
    )


def altered(*upsertions: Any, deletions: tuple[tuple[str, int], ...] = ()) -> Any:
    return alter.AlterUserScramCredentialsRequest(
        deletions=tuple(
            alter.ScramCredentialDeletion(name=name, mechanism=mechanism) for name, mechanism in deletions
        ),
        upsertions=upsertions,
    )


def described(*names: str, is_null: bool = False) -> Any:
    users = None if is_null else tuple(describe.UserName(name=name) for name in names)
    return describe.DescribeUserScramCredentialsRequest(users=users)


def found(response: Any) -> dict[str, Any]:
    assert response.error_code is ErrorCode.none
    return {
        result.user: [(info.mechanism, info.iterations) for info in result.credential_infos]
        if result.error_code is ErrorCode.none
        else result.error_code
        for result in response.results
    }


async def test_set_describe_and_remove(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        response = await client.ask(
            altered(upsertion("alice"), upsertion("bob", 2, 8192), upsertion("eve", 1, 1))
        )
        assert {r.user: r.error_code.name for r in response.results} == {
            "alice": "none",
            "bob": "none",
            "eve": "unacceptable_credential",
        }
        await client.ask(altered(upsertion("alice", 2, 5000)))
        everybody = {"alice": [(1, 4096), (2, 5000)], "bob": [(2, 8192)]}
        assert found(await client.ask(described())) == everybody
        assert found(await client.ask(described(is_null=True))) == everybody
        assert found(await client.ask(described("bob", "nobody", "alice", "alice"))) == {
            "bob": [(2, 8192)],
            "nobody": ErrorCode.resource_not_found,
            "alice": ErrorCode.duplicate_resource,
        }
        await client.ask(altered(deletions=(("alice", 1),)))
        await client.close()
    async with running(tmp_path) as node:
        client = await WireClient.connect(node)
        assert found(await client.ask(described())) == {"alice": [(2, 5000)], "bob": [(2, 8192)]}
        await client.close()


def test_an_error_of_the_whole_request_names_each_user_once() -> None:
    request = altered(upsertion("alice"), upsertion("bob"), deletions=(("alice", 1), ("carol", 1)))
    response = error_response(51, 0, request, ErrorCode.not_controller, "why")
    assert sorted(result.user for result in response.results) == ["alice", "bob", "carol"]
    assert {(r.error_code, r.error_message) for r in response.results} == {(ErrorCode.not_controller, "why")}
