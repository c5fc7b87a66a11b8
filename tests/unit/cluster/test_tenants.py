"""Tenants: what may be declared, who owns what, which rules follow, and how many partitions may be created."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from uuid import UUID

import pytest

from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    AlterConfigsResult,
    ConfigChange,
    ConfigOp,
    NodeConfig,
    incremental_alter_configs,
)
from penstock.cluster.controller.alter_topics import NewPartitions, create_partitions
from penstock.cluster.controller.create_topics import NewTopic, Randomness, TopicDefaults, create_topics
from penstock.cluster.image import ClusterImage, ConfigResource, ResourceType
from penstock.cluster.image_snapshot import snapshot_records
from penstock.cluster.metadata_records import ConfigRecord, RegisterBrokerRecord
from penstock.cluster.tenants import (
    LIMITS,
    Tenant,
    format_users,
    parse_users,
    stored_tenant,
    tenant_rules,
    tenants_of,
)
from penstock.protocol.acls import Operation, PatternType
from penstock.protocol.acls import ResourceType as AclResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import finish
from penstock.security.authorizer import Authorizer
from penstock.security.principal import USER, Principal

ACME = {"users": "User:ann;User:app", "prefix": "acme."}


def alter(image: ClusterImage, *tenants: tuple[str, Mapping[str, str | None]]) -> list[AlterConfigsResult]:
    resources = [
        AlterConfigsResource(
            resource=ConfigResource(ResourceType.TENANT, name),
            changes=tuple(
                ConfigChange(key, ConfigOp.DELETE if value is None else ConfigOp.SET, value)
                for key, value in changes.items()
            ),
        )
        for name, changes in tenants
    ]
    decision = finish(incremental_alter_configs(image, resources, rules=NodeConfig(node_settings={})))
    image.apply(decision.records)
    return list(decision.reply)


@pytest.fixture
def image() -> ClusterImage:
    """A cluster of one broker with the tenant acme."""
    image = ClusterImage()
    image.apply(
        [
            RegisterBrokerRecord(
                broker_id=0, incarnation_id=UUID(int=9), broker_epoch=1, end_points=(), fenced=False
            )
        ]
    )
    (result,) = alter(image, ("acme", ACME))
    assert result.error is ErrorCode.none, result.message
    return image


def refusal(image: ClusterImage, name: str, changes: Mapping[str, str | None]) -> str:
    before = image.fork()
    (result,) = alter(image, (name, changes))
    assert result.error is not ErrorCode.none
    assert image == before
    assert result.message
    return result.message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("*", {}, "The name of a tenant has"),
        ("a b", {}, "The name of a tenant has"),
        ("", {}, "The name of a tenant has"),
        ("a" * 101, {}, "The name of a tenant has"),
        ("new", {"prefix": None}, "Tenant new has no prefix"),
        ("new", {"users": None}, "Tenant new has no users"),
        ("new", {"users": " ; "}, "must name a user"),
        ("new", {"users": "User:*"}, "not a wildcard"),
        ("new", {"users": "User:ANONYMOUS"}, "everybody who has not logged in"),
        ("new", {"users": "User:bob;User:app"}, "User app belongs to tenant acme"),
        ("new", {"prefix": ""}, "must begin names of topics"),
        ("new", {"prefix": "*"}, "other than ASCII alphanumerics"),
        ("new", {"prefix": "p" * 201}, "at most 200 characters"),
        ("new", {"prefix": "__"}, "those of internal topics"),
        ("new", {"prefix": "_"}, "those of internal topics"),
        ("new", {"prefix": "__consumer"}, "those of internal topics"),
        ("new", {"prefix": "."}, "those of internal topics"),
        ("new", {"prefix": "acme."}, "overlaps with acme., the prefix of tenant acme"),
        ("new", {"prefix": "acme.eu."}, "overlaps with acme."),
        ("new", {"prefix": "ac"}, "overlaps with acme."),
        ("new", {"prefix": "acme_"}, "overlaps with acme."),
        ("new", {"partitions_max": "0"}, "must be at least 1"),
        ("new", {"storage_bytes_max": str(2**63)}, "must fit in 64 bits"),
        ("new", {"request_rate": "-1"}, "must be at least 1"),
        ("new", {"groups_max": "many"}, "must be a whole number"),
        ("new", {"connections": "5"}, "Unknown tenant configuration: connections"),
        ("acme", {"prefix": "other."}, "The prefix of tenant acme is acme.; it cannot be changed"),
        ("acme", {"users": None}, "Tenant acme has no users"),
    ],
)
def test_what_cannot_be_a_tenant_is_refused(
    image: ClusterImage, name: str, changes: Mapping[str, str | None], message: str
) -> None:
    given = changes if name == "acme" else {"users": "User:new", "prefix": "new.", **changes}
    assert message in refusal(image, name, given)


def test_a_tenant_is_altered_deleted_and_kept_in_snapshots(image: ClusterImage) -> None:
    alter(image, ("acme", {"partitions_max": str(2**63 - 1), "groups_max": "7"}))
    alter(image, ("acme", {"partitions_max": None}))
    restored = ClusterImage()
    for batch in snapshot_records(image):
        restored.apply(batch)
    assert restored == image
    acme = tenants_of(restored).by_name["acme"]
    assert (acme.users, acme.prefix, dict(acme.limits)) == (("ann", "app"), "acme.", {"groups_max": 7})
    alter(image, ("acme", {"users": None, "prefix": None, "groups_max": None}))
    assert tenants_of(image).by_name == {}
    (result,) = alter(image, ("next", ACME))
    assert result.error is ErrorCode.none


def test_two_tenants_of_one_request_are_not_compared_so_it_is_refused(image: ClusterImage) -> None:
    one = {"users": "User:x", "prefix": "x."}
    results = alter(image, ("x", one), ("y", one))
    assert {result.error for result in results} == {ErrorCode.invalid_request}
    assert list(tenants_of(image).by_name) == ["acme"]


def test_names_and_users_have_at_most_one_tenant(image: ClusterImage) -> None:
    for name in ("b", "zoo", "acme2"):
        (result,) = alter(image, (name, {"users": f"User:{name}", "prefix": f"{name}-"}))
        assert result.error is ErrorCode.none, result.message
    tenants = tenants_of(image)
    owners = {
        "acme.": "acme", "acme.orders": "acme", "b-1": "b", "zoo-z": "zoo", "acme2-t": "acme2",
        "acme": None, "acme-": None, "acme2": None, "b": None, "a": None, "zzz": None, "": None,
    }  # fmt: skip
    found = {name: tenants.of_name(name) for name in owners}
    assert {name: tenant and tenant.name for name, tenant in found.items()} == owners
    ann = tenants.of_user("ann")
    assert ann is not None
    assert ann.name == "acme"
    assert tenants.of_user("nobody") is None


def test_users_may_have_commas_in_their_names() -> None:
    users = parse_users("User:CN=ann,O=acme; bob;User:bob;")
    assert users == ("CN=ann,O=acme", "bob")
    assert parse_users(format_users(users)) == users


def test_rules_follow_from_users_and_prefix_and_keep_their_identifiers(image: ClusterImage) -> None:
    tenants = tenants_of(image)
    rules = tenant_rules(tenants.by_name["acme"])
    assert {rule.principal for rule in rules} == {"User:ann", "User:app"}
    assert {(rule.resource_name, rule.pattern_type, rule.host) for rule in rules} == {
        ("acme.", PatternType.PREFIXED, "*")
    }
    transactional = {
        rule.operation for rule in rules if rule.resource_type == AclResourceType.TRANSACTIONAL_ID
    }
    assert transactional == {Operation.DESCRIBE, Operation.WRITE}
    assert not any(rule.resource_type == AclResourceType.CLUSTER for rule in rules)
    assert tenants.access_rules() == tenants_of(image).access_rules()
    assert sorted(tenants.access_rules().values()) == sorted(rules)


def created(image: ClusterImage, *topics: tuple[str, int]) -> list[str | None]:
    numbers = count(len(image.topics) + 1)
    decision = finish(
        create_topics(
            image,
            [NewTopic(name=name, partitions=partitions) for name, partitions in topics],
            rules=TopicDefaults(partitions=1, replication_factor=1, partitions_max=1000),
            chance=Randomness(draw=lambda _: 0, fresh_id=lambda: UUID(int=next(numbers))),
        )
    )
    image.apply(decision.records)
    return [result.message for result in decision.reply]


def test_partitions_are_limited_for_topics_that_are_created_together_or_grow(image: ClusterImage) -> None:
    alter(image, ("acme", {"partitions_max": "5"}))
    refused = "Tenant acme has 4 of at most 5 partitions; 2 more are too many."
    assert created(image, ("acme.a", 3), ("acme.b", 1), ("acme.c", 2), ("other", 9)) == [
        None,
        None,
        refused,
        None,
    ]

    def grown(name: str, size: int) -> str | None:
        decision = finish(
            create_partitions(
                image, [NewPartitions(name=name, count=size)], partitions_max=1000, draw=lambda _: 0
            )
        )
        image.apply(decision.records)
        (result,) = decision.reply
        assert result.error in (ErrorCode.none, ErrorCode.policy_violation)
        return result.message

    assert grown("acme.b", 3) == refused
    assert grown("acme.b", 2) is None
    assert grown("other", 20) is None
    assert created(image, ("acme.d", 1)) == [
        "Tenant acme has 5 of at most 5 partitions; 1 more are too many."
    ]


# -- tenants that another version has stored -----------------------------------------------------------


def stored(image: ClusterImage, name: str, values: Mapping[str, str]) -> Tenant:
    image.apply(
        [
            ConfigRecord(resource_type=ResourceType.TENANT, resource_name=name, name=key, value=value)
            for key, value in values.items()
        ]
    )
    return tenants_of(image).by_name[name]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("text", ["20MB/s", "0", "", str(2**63)])
def test_a_limit_that_cannot_be_read_allows_nothing(image: ClusterImage, limit: str, text: str) -> None:
    tenant = stored(image, "later", {"users": "User:bob", "prefix": "later.", "groups_max": "7", limit: text})
    assert tenant.limits == {"groups_max": 7, limit: 0}
    assert limit in str(tenant.flaw)
    # Its users keep what is theirs.
    assert not tenant.is_closed
    assert tenant_rules(tenant) == tenant_rules(stored_tenant("x", {"users": "User:bob", "prefix": "later."}))
    assert tenants_of(image).of_user("bob") == tenant
    assert tenants_of(image).of_name("later.orders") == tenant


def test_settings_of_a_later_version_leave_the_others_in_effect(image: ClusterImage) -> None:
    tenant = stored(
        image, "later", {"users": "bob", "prefix": "later.", "topics_max": "5", "groups_max": "7"}
    )
    assert (tenant.limits, tenant.flaw, tenant.is_closed) == ({"groups_max": 7}, None, False)


@pytest.mark.parametrize(
    ("values", "users", "prefix"),
    [
        ({"users": "User:bob;User:*", "prefix": "later."}, ("bob",), "later."),
        ({"prefix": "later."}, (), "later."),
        ({"users": "User:bob", "prefix": "l*"}, ("bob",), ""),
        ({"users": "User:bob", "prefix": "__consumer"}, ("bob",), ""),
        ({"users": "User:bob"}, ("bob",), ""),
        ({"storage_bytes_max": "1"}, (), ""),
    ],
)
def test_without_certain_users_and_prefix_a_tenant_is_closed(
    image: ClusterImage, values: dict[str, str], users: tuple[str, ...], prefix: str
) -> None:
    tenant = stored(image, "later", values)
    assert tenant.is_closed
    assert (tenant.users, tenant.prefix) == (users, prefix)
    # Its users stay users of a tenant: they do not become users that may do what no rule covers.
    assert set(users) <= set(tenants_of(image).users)
    authorizer = Authorizer(tenants_of(image).access_rules(), allow_everyone_if_no_acl_found=True)
    authorizer.confine(Principal(USER, user) for user in tenants_of(image).users)
    bob, carol, ann = (authorizer.decisions(Principal(USER, name), "::1") for name in ("bob", "carol", "ann"))
    if prefix:
        assert not carol.allows(Operation.READ, AclResourceType.TOPIC, f"{prefix}orders")
        assert not bob.allows(Operation.READ, AclResourceType.TOPIC, f"{prefix}orders")
    if "bob" in users:
        assert not bob.allows(Operation.READ, AclResourceType.TOPIC, "other")
    assert carol.allows(Operation.READ, AclResourceType.TOPIC, "other")
    assert ann.allows(Operation.READ, AclResourceType.TOPIC, "acme.orders")
    # Nobody knows what a new tenant would share with it.
    assert "cannot be read" in refusal(image, "new", {"users": "User:eve", "prefix": "new."})
    (result,) = alter(image, ("later", dict.fromkeys(values)))
    assert result.error is ErrorCode.none
    (result,) = alter(image, ("new", {"users": "User:eve", "prefix": "new."}))
    assert result.error is ErrorCode.none


def test_of_prefixes_that_overlap_the_shorter_one_owns_the_names(image: ClusterImage) -> None:
    closed = stored(image, "later", {"users": "User:*", "prefix": "acme.eu."})
    assert closed.is_closed
    names = ("acme.a", "acme.eu.a", "acme.z", "acme", "b")
    owners = [owner.name if owner else None for owner in map(tenants_of(image).of_name, names)]
    assert owners == ["acme", "acme", "acme", None, None]
