"""Decisions about access rules: what may be stored, what filters delete, and that snapshots keep the rules."""

from collections.abc import Sequence
from itertools import count
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.controller.acls import create_acls, delete_acls
from penstock.cluster.image import ClusterImage
from penstock.protocol.acls import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish

RULE = AclBinding(
    ResourceType.TOPIC,
    "orders",
    PatternType.LITERAL,
    "User:alice",
    "*",
    Operation.READ,
    Permission.ALLOW,
)
_ids = count(1)


def new_id() -> UUID:
    return UUID(int=next(_ids))


def stored(*rules: AclBinding) -> ClusterImage:
    image = ClusterImage()
    assert create(image, rules) == (None,) * len(rules)
    return image


def create(image: ClusterImage, rules: Sequence[AclBinding]) -> tuple[ApiError | None, ...]:
    decision = finish(create_acls(image, rules, new_id=new_id))
    image.apply(decision.records)
    return decision.reply


def test_a_rule_is_stored_once() -> None:
    image = stored(RULE, RULE)
    assert create(image, [RULE]) == (None,)
    assert list(image.security.acl_ids) == [RULE]
    assert len(image.security.acls) == 1


def test_a_fork_has_rules_of_its_own() -> None:
    image = stored(RULE)
    fork = image.fork()
    fork.apply(finish(delete_acls(fork, [AclFilter()])).records)
    assert (len(image.security.acls), len(fork.security.acls)) == (1, 0)
    assert (len(image.security.acl_ids), len(fork.security.acl_ids)) == (1, 0)


def test_a_change_of_rules_is_a_change_of_the_image() -> None:
    image = ClusterImage()
    delta = image.apply(finish(create_acls(image, [RULE], new_id=new_id)).records)
    assert delta
    assert delta.security_changed


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (RULE._replace(resource_type=ResourceType.ANY), "Invalid resourceType ANY"),
        (RULE._replace(resource_type=99), "Invalid resourceType UNKNOWN"),
        (RULE._replace(pattern_type=PatternType.MATCH), "Invalid patternType MATCH"),
        (RULE._replace(operation=Operation.ANY), "Invalid operation ANY"),
        (RULE._replace(operation=-1), "Invalid operation UNKNOWN"),
        (RULE._replace(permission=Permission.ANY), "Invalid permissionType ANY"),
        (RULE._replace(resource_name=""), "Invalid empty resource name"),
        (RULE._replace(principal="alice"), "Could not parse principal from `alice`"),
        (
            RULE._replace(resource_type=ResourceType.CLUSTER),
            "The only valid name for the CLUSTER resource is kafka-cluster",
        ),
    ],
)
def test_a_rule_without_meaning_is_refused_and_the_others_are_stored(rule: AclBinding, message: str) -> None:
    image = ClusterImage()
    refused, accepted = create(image, [rule, RULE])
    assert refused is not None
    assert refused.code is ErrorCode.invalid_request
    assert refused.message is not None
    assert refused.message.startswith(message)
    assert accepted is None
    assert list(image.security.acl_ids) == [RULE]


def test_filters_delete_what_they_match() -> None:
    other = RULE._replace(resource_name="payments")
    image = stored(RULE, other)
    decision = finish(
        delete_acls(image, [AclFilter(resource_name="orders"), AclFilter(principal="User:bob")])
    )
    image.apply(decision.records)
    assert [found.acls for found in decision.reply] == [(RULE,), ()]
    assert list(image.security.acl_ids) == [other]


def test_a_filter_that_names_a_rule_in_full_deletes_only_that_one() -> None:
    similar = [
        RULE._replace(pattern_type=PatternType.PREFIXED),
        RULE._replace(host="10.0.0.1"),
        RULE._replace(principal="User:bob"),
        RULE._replace(operation=Operation.ALL),
        RULE._replace(permission=Permission.DENY),
        RULE._replace(resource_type=ResourceType.GROUP),
        RULE._replace(resource_name="*"),
    ]
    image = stored(RULE, *similar)
    (found,) = finish(delete_acls(image, [AclFilter(*RULE)])).reply
    assert found.acls == (RULE,)
    # MATCH covers the wildcard too, so it is no name of a rule.
    (found,) = finish(delete_acls(image, [AclFilter(*RULE)._replace(pattern_type=PatternType.MATCH)])).reply
    assert set(found.acls) == {RULE, similar[0], similar[-1]}
    anything = AclFilter()
    fields = (
        "pattern_type",
        "host",
        "principal",
        "operation",
        "permission",
        "resource_type",
        "resource_name",
    )
    for name, rule in zip(fields, similar, strict=True):
        wanted = AclFilter(*RULE)._replace(**{name: getattr(anything, name)})
        (found,) = finish(delete_acls(image, [wanted])).reply
        assert set(found.acls) == {RULE, rule}


names = st.sampled_from(["a", "ab", "abc", "*", "b"])
principals = st.sampled_from(["User:alice", "User:*"])
hosts = st.sampled_from(["*", "10.0.0.1"])
rules = st.builds(
    AclBinding,
    st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
    names,
    st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
    principals,
    hosts,
    st.sampled_from([Operation.READ, Operation.ALL]),
    st.sampled_from([Permission.ALLOW, Permission.DENY]),
)
filters = st.builds(
    AclFilter,
    st.sampled_from([ResourceType.ANY, ResourceType.TOPIC]),
    st.none() | names | st.just("abcd"),
    st.sampled_from([PatternType.ANY, PatternType.MATCH, PatternType.LITERAL, PatternType.PREFIXED]),
    st.none() | principals | st.just("User:bob"),
    st.none() | hosts,
    st.sampled_from([Operation.ANY, Operation.READ]),
    st.sampled_from([Permission.ANY, Permission.ALLOW]),
)


@settings(max_examples=300)
@given(st.lists(rules, max_size=20), st.lists(filters, max_size=4))
def test_each_filter_finds_what_it_would_match_one_by_one(
    made: list[AclBinding], wanted: list[AclFilter]
) -> None:
    image = stored(*made)
    decision = finish(delete_acls(image, wanted))
    for each, found in zip(wanted, decision.reply, strict=True):
        assert {*found.acls} == {rule for rule in made if each.matches(rule)}
        assert len({*found.acls}) == len(found.acls)
    image.apply(decision.records)
    assert {*image.security.acl_ids} == {
        rule for rule in made if not any(each.matches(rule) for each in wanted)
    }


def test_two_filters_that_match_the_same_rule_delete_it_once() -> None:
    image = stored(RULE)
    decision = finish(delete_acls(image, [AclFilter(), AclFilter(resource_name="orders")]))
    assert [found.acls for found in decision.reply] == [(RULE,), (RULE,)]
    assert len(decision.records) == 1


@pytest.mark.parametrize("wanted", [AclFilter(resource_type=0), AclFilter(operation=77)])
def test_a_filter_with_an_unknown_value_is_refused(wanted: AclFilter) -> None:
    (result,) = finish(delete_acls(stored(RULE), [wanted])).reply
    assert result.error is not None
    assert result.error.code is ErrorCode.invalid_request


def test_one_request_causes_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    image = stored(RULE, RULE._replace(resource_name="b"))
    monkeypatch.setattr("penstock.cluster.controller.acls.RECORDS_MAX", 1)
    with pytest.raises(ApiError) as refused:
        finish(create_acls(image, [RULE._replace(resource_name=name) for name in "cd"], new_id=new_id))
    assert refused.value.code is ErrorCode.policy_violation
    with pytest.raises(ApiError) as refused:
        finish(delete_acls(image, [AclFilter()]))
    assert refused.value.code is ErrorCode.invalid_request
