"""The rules of access, one by one; tests/properties/test_access_decisions.py compares them with a plain model."""

from typing import Any
from uuid import UUID

import pytest

from penstock.protocol.acls import (
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    canonical_host,
    parse_principal,
)
from penstock.security.authorizer import AclsNotLoaded, Authorizer, Decisions, all_operations

ALICE, BOB = ("User", "alice"), ("User", "bob")
HOST = "10.0.0.1"
TOPIC = ResourceType.TOPIC


def rule(
    operation: Operation = Operation.READ,
    name: str = "orders",
    *,
    who: str = "User:alice",
    host: str = "*",
    deny: bool = False,
    prefixed: bool = False,
    resource_type: ResourceType = TOPIC,
) -> AclBinding:
    pattern = PatternType.PREFIXED if prefixed else PatternType.LITERAL
    permission = Permission.DENY if deny else Permission.ALLOW
    return AclBinding(resource_type, name, pattern, who, host, operation, permission)


def authorizer(*rules: AclBinding, everyone: bool = False, super_users: tuple[str, ...] = ()) -> Authorizer:
    return Authorizer(
        {UUID(int=number): acl for number, acl in enumerate(rules)},
        super_users=map(parse_principal, super_users),
        allow_everyone_if_no_acl_found=everyone,
    )


def may(
    rules: Authorizer,
    operation: Operation,
    name: str = "orders",
    who: tuple[str, str] = ALICE,
    host: str = HOST,
    resource_type: ResourceType = TOPIC,
) -> bool:
    return rules.authorize(who, host, operation, resource_type, name)


def test_without_a_rule_only_super_users_may_do_anything() -> None:
    rules = authorizer(super_users=("User:admin",))
    assert not may(rules, Operation.READ)
    assert may(rules, Operation.READ, who=("User", "admin"))
    assert not may(rules, Operation.READ, who=("Group", "admin"))


def test_a_rule_counts_for_its_principal_operation_resource_and_host_only() -> None:
    rules = authorizer(rule(host=HOST))
    assert may(rules, Operation.READ)
    assert not may(rules, Operation.READ, who=BOB)
    assert not may(rules, Operation.WRITE)
    assert not may(rules, Operation.READ, "orders2")
    assert not may(rules, Operation.READ, host="10.0.0.2")
    assert not may(rules, Operation.READ, resource_type=ResourceType.GROUP)


def test_prefix_and_wildcard() -> None:
    assert may(authorizer(rule(name="ord", prefixed=True)), Operation.READ)
    assert may(authorizer(rule(name="orders", prefixed=True)), Operation.READ)
    assert not may(authorizer(rule(name="orders-", prefixed=True)), Operation.READ)
    assert may(authorizer(rule(name="*")), Operation.READ)
    assert not may(authorizer(rule(name="*", prefixed=True)), Operation.READ)
    assert may(authorizer(rule(who="User:*")), Operation.READ)


def test_a_denial_wins_wherever_it_stands() -> None:
    for denial in (rule(deny=True), rule(name="ord", prefixed=True, deny=True), rule(name="*", deny=True)):
        for permit in (rule(), rule(name="ord", prefixed=True), rule(name="*"), rule(Operation.ALL, "*")):
            assert not may(authorizer(denial, permit), Operation.READ)


def test_a_denial_of_everybody_or_of_all_operations_wins() -> None:
    assert not may(authorizer(rule(), rule(who="User:*", deny=True)), Operation.READ)
    assert not may(authorizer(rule(), rule(Operation.ALL, deny=True)), Operation.READ)


def test_a_super_user_is_not_denied() -> None:
    assert may(authorizer(rule(deny=True), super_users=("User:alice",)), Operation.READ)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER])
def test_operations_imply_describe_when_they_are_allowed(operation: Operation) -> None:
    assert may(authorizer(rule(operation)), Operation.DESCRIBE)
    assert may(authorizer(rule(operation, deny=True), rule(Operation.DESCRIBE)), Operation.DESCRIBE)


def test_alter_configs_implies_describe_configs() -> None:
    assert may(authorizer(rule(Operation.ALTER_CONFIGS)), Operation.DESCRIBE_CONFIGS)
    assert not may(authorizer(rule(Operation.ALTER_CONFIGS)), Operation.DESCRIBE)
    assert not may(authorizer(rule(Operation.DESCRIBE_CONFIGS)), Operation.ALTER_CONFIGS)


def test_allow_everyone_holds_only_where_no_rule_covers_the_resource() -> None:
    rules = authorizer(rule(who="User:bob", name="ord", prefixed=True), everyone=True)
    assert may(rules, Operation.WRITE, "payments")
    assert not may(rules, Operation.READ, "orders")
    assert not may(authorizer(rule(name="*", who="User:bob"), everyone=True), Operation.READ, "payments")


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (Operation.CREATE_TOKENS, ResourceType.USER),
        (Operation.DESCRIBE_TOKENS, ResourceType.USER),
        (Operation.DESCRIBE, ResourceType.DELEGATION_TOKEN),
    ],
)
def test_allow_everyone_gives_nobody_the_tokens_of_others(operation: Operation, kind: ResourceType) -> None:
    """With the token of a super user, anybody would be one."""
    rules = authorizer(everyone=True)
    assert not rules.authorize(ALICE, HOST, operation, kind, "User:admin")
    assert not rules.authorize_any(ALICE, HOST, operation, kind)
    assert rules.authorize(ALICE, HOST, Operation.READ, TOPIC, "User:admin")


def test_before_the_rules_are_loaded_only_super_users_get_an_answer() -> None:
    rules = Authorizer(super_users=[ALICE], allow_everyone_if_no_acl_found=True)
    assert may(rules, Operation.READ)
    with pytest.raises(AclsNotLoaded):
        may(rules, Operation.READ, who=BOB)
    with pytest.raises(AclsNotLoaded):
        rules.authorize_any(BOB, HOST, Operation.WRITE, TOPIC)


def test_any_resource() -> None:
    def may_any(*rules: AclBinding, everyone: bool = False) -> bool:
        return authorizer(*rules, everyone=everyone).authorize_any(ALICE, HOST, Operation.WRITE, TOPIC)

    write = Operation.WRITE
    assert not may_any()
    assert may_any(everyone=True)
    assert may_any(rule(write))
    assert not may_any(rule(write), rule(write, deny=True))
    assert not may_any(rule(write), rule(write, "ord", prefixed=True, deny=True))
    assert may_any(rule(write, "ord", prefixed=True), rule(write, "orders", deny=True))
    assert not may_any(rule(write), rule(write, "*", deny=True))
    assert may_any(rule(write, "*"), rule(write, "ord", prefixed=True, deny=True))
    assert not may_any(rule(write, who="User:bob"))


def test_changes_take_effect_and_leave_other_rules_alone() -> None:
    first, second = UUID(int=1), UUID(int=2)
    rules = Authorizer({first: rule(), second: rule(name="ord", prefixed=True)})
    decisions = Decisions(rules, ALICE, HOST)
    assert decisions.allows(Operation.READ, TOPIC, "orders")
    rules.update({second: rule(name="ord", prefixed=True)})
    assert decisions.allows(Operation.READ, TOPIC, "orders")
    rules.update({})
    assert not decisions.allows(Operation.READ, TOPIC, "orders")


def test_the_same_rule_twice_is_gone_when_both_are() -> None:
    rules = Authorizer({UUID(int=1): rule(), UUID(int=2): rule()})
    rules.update({UUID(int=2): rule()})
    assert may(rules, Operation.READ)
    rules.update({})
    assert not may(rules, Operation.READ)


def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.security.authorizer._REMEMBERED_MAX", 3)
    decisions = Decisions(authorizer(rule(name="*")), ALICE, HOST)
    for number in range(10):
        assert decisions.allows(Operation.READ, TOPIC, f"topic-{number}")
        assert decisions.allows(Operation.WRITE, TOPIC, f"topic-{number}") is False
    assert remembered(decisions) <= 3


def remembered(decisions: Decisions) -> int:
    return sum(len(known) for by_operation in decisions._known for known in by_operation if known)


def test_names_longer_than_those_of_topics_are_not_remembered() -> None:
    """Otherwise one connection could make a node remember hundreds of megabytes of names."""
    decisions = Decisions(authorizer(rule(name="*")), ALICE, HOST)
    for length in (249, 250, 32_767):
        assert decisions.allows(Operation.READ, TOPIC, "x" * length)
    assert remembered(decisions) == 1


def test_connections_of_a_principal_share_its_decisions() -> None:
    rules = authorizer(rule())
    decisions = rules.decisions(ALICE, HOST)
    assert rules.decisions(("User", "".join("alice")), HOST) is decisions
    assert rules.decisions(BOB, HOST) is not decisions
    assert rules.decisions(ALICE, "10.0.0.2") is not decisions
    assert decisions.allows(Operation.READ, TOPIC, "orders")
    assert not rules.decisions(BOB, HOST).allows(Operation.READ, TOPIC, "orders")
    assert len(rules._decisions) == 1, "what no connection uses is forgotten"


def test_whether_any_resource_is_allowed_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through all rules, which a client without any right could ask for with each request."""
    rules = authorizer(rule(Operation.WRITE))
    decide, count = Authorizer.authorize_any, 0

    def counted(self: Authorizer, *asked: Any) -> bool:
        nonlocal count
        count += 1
        return decide(self, *asked)

    monkeypatch.setattr(Authorizer, "authorize_any", counted)
    decisions = rules.decisions(BOB, HOST)
    for _ in range(10):
        assert not decisions.allows_any(Operation.WRITE, TOPIC)
    assert count == 1
    rules.update({UUID(int=9): rule(Operation.WRITE, who="User:bob")})
    assert decisions.allows_any(Operation.WRITE, TOPIC)


def test_a_change_of_something_else_keeps_the_decisions() -> None:
    first = {UUID(int=1): rule()}
    rules = Authorizer(first)
    generation = rules.generation
    rules.update(dict(first))
    assert rules.generation == generation


def test_prefixes_of_many_lengths_come_and_go() -> None:
    """Their lengths are counted, so that 10,000 rules are loaded and removed without a pause."""
    acls = {UUID(int=number): rule(name="x" * (number // 2 + 1), prefixed=True) for number in range(500)}
    acls |= {UUID(int=1000 + number): rule(name=f"y{number:04}", prefixed=True) for number in range(500)}
    rules = Authorizer(acls)
    section = rules._sections[TOPIC]
    assert section._lengths == list(range(1, 251))
    assert may(rules, Operation.READ, "x" * 249)
    rules.update({acl_id: acl for acl_id, acl in acls.items() if acl.resource_name in ("x", "y0000")})
    assert section._lengths == [1, 5]
    assert may(rules, Operation.READ, "x" * 249)
    assert not may(rules, Operation.READ, "y0001")
    rules.update({})
    assert section._lengths == []
    assert section._counts == {}


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::ffff:10.0.0.1", HOST),
        ("fe80::1%eth0", "fe80::1"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_every_spelling_of_an_address_is_the_same_host(written: str, same: str) -> None:
    assert canonical_host(written) == same
    if written:
        assert may(authorizer(rule(host=written)), Operation.READ, host=same)


def test_all_operations_are_the_bits_of_the_protocol() -> None:
    assert all_operations(TOPIC) == 0b110111111000


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (AclFilter(), True),
        (AclFilter(resource_name="orders"), False),
        (AclFilter(resource_name="ord"), True),
        (AclFilter(resource_name="orders", pattern_type=PatternType.MATCH), True),
        (AclFilter(resource_name="or", pattern_type=PatternType.MATCH), False),
        (AclFilter(resource_name="ord", pattern_type=PatternType.LITERAL), False),
        (AclFilter(principal="User:bob"), False),
        (AclFilter(host=HOST), False),
        (AclFilter(operation=Operation.WRITE), False),
        (AclFilter(permission=Permission.DENY), False),
        (AclFilter(resource_type=ResourceType.GROUP), False),
    ],
)
def test_filters(wanted: AclFilter, expected: bool) -> None:
    assert wanted.matches(rule(name="ord", prefixed=True)) is expected


def test_a_filter_that_matches_a_name_finds_the_wildcard() -> None:
    assert AclFilter(resource_name="orders", pattern_type=PatternType.MATCH).matches(rule(name="*"))
