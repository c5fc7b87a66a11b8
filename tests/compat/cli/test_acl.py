"""`penstock acl`, and what librdkafka's admin client sees of the same rules."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from tests.brokers import BrokerProcess


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    # The client of this test is not authenticated, and is the admin.
    settings = {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:ANONYMOUS"}
    return broker_with(settings)


def described(broker: BrokerProcess) -> set[tuple[str, str, str, str]]:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    anything = AclBindingFilter(
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    return {
        (acl.name, acl.principal, acl.operation.name, acl.resource_pattern_type.name)
        for acl in admin.describe_acls(anything).result(60)
    }


def test_rules_are_added_listed_and_removed(penstock: Any, answer: Any, broker: BrokerProcess) -> None:
    penstock(
        "acl", "add", "--allow-principal", "User:ann", "--consumer", "--topic", "orders", "--group", "billing"
    )
    penstock(
        *("acl", "add", "--deny-principal", "User:bob", "--operation", "write", "--topic", "pay"),
        *("--resource-pattern-type", "prefixed", "--deny-host", "10.0.0.9"),
    )
    assert described(broker) == {
        ("orders", "User:ann", "READ", "LITERAL"),
        ("orders", "User:ann", "DESCRIBE", "LITERAL"),
        ("billing", "User:ann", "READ", "LITERAL"),
        ("pay", "User:bob", "WRITE", "PREFIXED"),
    }
    denial = {
        "resource": "Topic",
        "name": "pay",
        "pattern": "prefixed",
        "principal": "User:bob",
        "host": "10.0.0.9",
        "operation": "Write",
        "permission": "Deny",
    }
    assert answer("acl", "list", "--principal", "User:bob") == [denial]
    assert answer("acl", "list", "--topic", "payments", "--resource-pattern-type", "match") == [denial]
    assert answer("acl", "list", "--topic", "payments") == []
    assert len(answer("acl", "list")) == 4
    assert "billing" in penstock("acl", "list")[0]
    penstock(
        "acl", "remove", "--allow-principal", "User:ann", "--operation", "Read", "--topic", "orders", "--yes"
    )
    assert len(answer("acl", "list")) == 3
    for options in (("--topic", "orders"), ("--group", "billing"), ("--topic", "pay")):
        penstock("acl", "remove", *options, "--resource-pattern-type", "any", "--yes")
    assert answer("acl", "list") == []


def test_a_producer_gets_what_it_needs(penstock: Any, answer: Any) -> None:
    options = (
        "--allow-principal",
        "User:ann",
        "--producer",
        "--idempotent",
        "--topic",
        "a",
        "--transactional-id",
        "t",
    )
    penstock("acl", "add", *options)
    assert {(acl["resource"], acl["operation"]) for acl in answer("acl", "list")} == {
        ("Topic", "Write"),
        ("Topic", "Describe"),
        ("Topic", "Create"),
        ("TransactionalId", "Write"),
        ("TransactionalId", "Describe"),
        ("Cluster", "IdempotentWrite"),
    }
    penstock("acl", "remove", *options, "--yes")
    assert answer("acl", "list") == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("add", "--topic", "a"), 2, "rules about whom?"),
        (("add", "--allow-principal", "User:a"), 2, "rules about what?"),
        (("add", "--allow-principal", "ann", "--topic", "a"), 2, "'ann' is no principal"),
        (("add", "--allow-principal", "User:a", "--consumer", "--topic", "a"), 2, "consumers need a group"),
        (("add", "--allow-principal", "User:a", "--topic", "a", "--operation", "fly"), 2, "no operation fly"),
        (
            ("add", "--allow-principal", "User:a", "--group", "a", "--operation", "write"),
            2,
            "no Write on a Group",
        ),
        (("remove", "--topic", "nothing", "--yes"), 1, "there is no such rule"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    penstock: Any, words: tuple[str, ...], code: int, message: str
) -> None:
    assert message in penstock("acl", *words, code=code)[1]
