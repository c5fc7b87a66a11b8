"""The plan of `penstock apply` leads to what the file declares, by changes that a cluster accepts in their order."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.cli.access.declared.declaration import (
    Declaration,
    DeclarationError,
    DeclaredUser,
    PasswordSource,
)
from penstock.cli.access.declared.plan import (
    AccessState,
    Action,
    Change,
    Plan,
    Protected,
    QuotaChange,
    RuleChange,
    TenantChange,
    UserChange,
    action_of,
    derived_rules,
    make_plan,
    nodes_by_rules,
    wanted_credentials,
)
from penstock.client.admin.tenants import Tenant
from penstock.cluster.tenants import prefixes_overlap
from penstock.protocol.acls import CLUSTER_NAME, AclBinding, Operation, PatternType, Permission, ResourceType

K, V = TypeVar("K"), TypeVar("V")
USERS = ("ann", "bob", "cy", "dee", "eve")
PREFIXES = {"one": "one.", "two": "two-", "three": "three.", "four": "one.four."}


def cluster_after(state: AccessState, change: Change) -> AccessState:
    """What a cluster does with a change; it refuses what no cluster accepts."""
    match change:
        case TenantChange(before, None):
            assert before is not None
            assert state.tenants[before.name] == before
            return replace(state, tenants=without(state.tenants, before.name))
        case TenantChange(before, after):
            assert after is not None
            assert state.tenants.get(after.name) == before
            assert after.users
            for other in state.tenants.values():
                if other.name != after.name:
                    assert not set(other.users) & set(after.users), "a user belongs to one tenant at a time"
                    assert not prefixes_overlap(other.prefix, after.prefix)
            return replace(state, tenants={**state.tenants, after.name: after})
        case QuotaChange(entity, before, after):
            assert dict(state.quotas.get(entity, {})) == dict(before)
            rest = without(state.quotas, entity)
            return replace(state, quotas={**rest, entity: after} if after else rest)
        case UserChange(name, before, after, sets_password):
            assert dict(state.users.get(name, {})) == dict(before)
            assert sets_password or after.items() <= before.items(), "new credentials need a password"
            rest = without(state.users, name)
            return replace(state, users={**rest, name: after} if after else rest)
        case RuleChange(rule, Action.CREATE):
            return replace(state, rules=state.rules | {rule})
        case RuleChange(rule, _):
            assert rule in state.rules
            return replace(state, rules=state.rules - {rule})


def without(mapping: Mapping[K, V], key: K) -> dict[K, V]:
    return {name: value for name, value in mapping.items() if name != key}


def cluster_after_all(state: AccessState, plan: Plan) -> AccessState:
    for change in plan.changes:
        state = cluster_after(state, change)
    return state


@st.composite
def tenants(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Tenant]:
    """Each user belongs to at most one; prefixes do not overlap."""
    owners = {user: draw(st.sampled_from([None, *names])) for user in USERS}
    found = {}
    for name in names:
        users = tuple(user for user in USERS if owners[user] == name)
        if users and not any(prefixes_overlap(PREFIXES[name], other.prefix) for other in found.values()):
            limits = draw(st.dictionaries(st.sampled_from(["groups_max", "request_rate"]), st.integers(1, 2)))
            found[name] = Tenant(name, users, PREFIXES[name], limits)
    return found


mechanisms = st.sampled_from(["SCRAM-SHA-256", "SCRAM-SHA-512"])
credentials = st.dictionaries(mechanisms, st.sampled_from([4096, 8192]), min_size=1)
rules = st.frozensets(
    st.builds(
        AclBinding,
        st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
        st.sampled_from(["orders", "one.", "two-"]),
        st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
        st.sampled_from([f"User:{user}" for user in (*USERS, "*")]),
        st.just("*"),
        st.sampled_from([Operation.READ, Operation.DESCRIBE]),
        st.sampled_from([Permission.ALLOW, Permission.DENY]),
    ),
    max_size=8,
)
quotas = st.dictionaries(
    st.sampled_from([(("user", "ann"),), (("user", None),), (("client-id", "app"), ("user", "ann"))]),
    st.dictionaries(
        st.sampled_from(["producer_byte_rate", "consumer_byte_rate"]), st.sampled_from([1.0, 2.0]), min_size=1
    ),
)


@st.composite
def states(draw: st.DrawFn) -> AccessState:
    present = draw(tenants(("one", "two", "three", "four")))
    return AccessState(
        tenants=present,
        users=draw(st.dictionaries(st.sampled_from(USERS), credentials)),
        rules=draw(rules) - derived_rules(present.values()),
        quotas=draw(quotas),
    )


@st.composite
def declared_users(draw: st.DrawFn) -> dict[str, DeclaredUser]:
    names = draw(st.sets(st.sampled_from(USERS)))
    return {
        name: DeclaredUser(
            name=name,
            mechanisms=draw(
                st.none() | st.sets(mechanisms, min_size=1).map(lambda found: tuple(sorted(found)))
            ),
            iterations=draw(st.none() | st.sampled_from([4096, 8192])),
            password=PasswordSource("password", "x"),
        )
        for name in names
    }


@st.composite
def declarations(draw: st.DrawFn) -> Declaration:
    names = draw(st.sampled_from([("one", "two", "three"), ("four", "two"), ("two",)]))
    return Declaration(
        tenants=draw(st.none() | tenants(names)),
        users=draw(st.none() | declared_users()),
        rules=draw(st.none() | rules),
        quotas=draw(st.none() | quotas),
    )


@settings(max_examples=300)
@given(states(), declarations(), st.booleans())
def test_the_plan_leads_to_what_the_file_declares(
    state: AccessState, declared: Declaration, prune: bool
) -> None:
    try:
        plan = make_plan(declared, state, prune=prune)
    except DeclarationError as error:
        event(f"refused: {str(error).partition(': ')[2][:20]}")
        return
    after = cluster_after_all(state, plan)
    assert_as_declared(declared, state, after, prune)
    # Rules that have come to follow from tenants are listed as rules of tenants.
    listed = replace(after, rules=after.rules - derived_rules(after.tenants.values()))
    assert make_plan(declared, listed, prune=prune).changes == ()


def assert_as_declared(declared: Declaration, before: AccessState, after: AccessState, prune: bool) -> None:
    if declared.tenants is not None:
        others = {} if prune else without_all(before.tenants, declared.tenants)
        assert sorted(map(comparable, after.tenants.values())) == sorted(
            map(comparable, {**others, **declared.tenants}.values())
        )
    else:
        assert after.tenants == before.tenants
    if declared.users is not None:
        others = {} if prune else without_all(before.users, declared.users)
        wanted = {
            name: wanted_credentials(user, before.users.get(name, {}))
            for name, user in declared.users.items()
        }
        assert after.users == {**others, **wanted}
    else:
        assert after.users == before.users
    if declared.rules is not None:
        held = after.rules | derived_rules(after.tenants.values())
        assert declared.rules <= held
        assert after.rules - declared.rules == (frozenset() if prune else before.rules - declared.rules)
    else:
        assert after.rules == before.rules
    if declared.quotas is not None:
        others = {} if prune else without_all(before.quotas, declared.quotas)
        assert after.quotas == {**others, **declared.quotas}
    else:
        assert after.quotas == before.quotas


def without_all(mapping: Mapping[K, V], keys: Mapping[K, object]) -> dict[K, V]:
    return {name: value for name, value in mapping.items() if name not in keys}


def comparable(tenant: Tenant) -> tuple[object, ...]:
    return tenant.name, sorted(tenant.users), tenant.prefix, sorted(tenant.limits.items())


@settings(max_examples=200)
@given(states(), declarations(), st.booleans(), st.integers(0, 30))
def test_a_plan_that_was_cut_off_is_finished_by_the_next_one(
    state: AccessState, declared: Declaration, prune: bool, made: int
) -> None:
    try:
        plan = make_plan(declared, state, prune=prune)
    except DeclarationError:
        return
    for change in plan.changes[:made]:
        state = cluster_after(state, change)
    listed = replace(state, rules=state.rules - derived_rules(state.tenants.values()))
    rest = make_plan(declared, listed, prune=prune)
    after = cluster_after_all(listed, rest)
    listed = replace(after, rules=after.rules - derived_rules(after.tenants.values()))
    assert make_plan(declared, listed, prune=prune).changes == ()


@given(states(), declarations())
def test_limits_come_before_access_and_removals_last(state: AccessState, declared: Declaration) -> None:
    try:
        changes = make_plan(declared, state, prune=True).changes
    except DeclarationError:
        return
    created = [each for each in changes if isinstance(each, RuleChange) and each.action is Action.CREATE]
    removed = [each for each in changes if isinstance(each, RuleChange) and each.action is Action.REMOVE]
    assert [each.rule.permission for each in created] == sorted(each.rule.permission for each in created)
    assert [-each.rule.permission for each in removed] == sorted(-each.rule.permission for each in removed)
    for each in created:
        before = changes[: changes.index(each)]
        assert all(
            isinstance(other, TenantChange) or action_of(other) is not Action.REMOVE for other in before
        )
    if created:
        after = changes[changes.index(created[0]) :]
        assert not any(
            isinstance(other, QuotaChange | UserChange) and action_of(other) is not Action.REMOVE
            for other in after
        )


def tenant(name: str, *users: str) -> Tenant:
    return Tenant(name, users, PREFIXES[name], {})


def test_users_that_change_places_leave_first() -> None:
    state = AccessState(tenants={"one": tenant("one", "ann", "bob"), "two": tenant("two", "cy", "dee")})
    wanted = {"one": tenant("one", "cy", "bob"), "two": tenant("two", "ann", "dee")}
    plan = make_plan(Declaration(tenants=wanted), state)
    assert len(plan.changes) == 3
    assert cluster_after_all(state, plan).tenants == wanted


def test_what_no_order_of_changes_reaches_is_refused() -> None:
    state = AccessState(tenants={"one": tenant("one", "ann"), "two": tenant("two", "cy")})
    wanted = {"one": tenant("one", "cy"), "two": tenant("two", "ann")}
    with pytest.raises(DeclarationError, match="move them in two steps"):
        make_plan(Declaration(tenants=wanted), state)
    moved = {"one": Tenant("one", ("ann",), "else.", {})}
    with pytest.raises(DeclarationError, match=r"tenants\.one\.prefix: is one\. in the cluster"):
        make_plan(Declaration(tenants=moved), state)
    with pytest.raises(DeclarationError, match="ann belongs to tenant one, which the file does not name"):
        make_plan(Declaration(tenants={"three": tenant("three", "ann")}), state)
    renamed = make_plan(Declaration(tenants={"three": tenant("three", "ann")}), state, prune=True)
    assert set(cluster_after_all(state, renamed).tenants) == {"three"}


def test_a_user_that_exists_is_left_alone() -> None:
    """Its password cannot be read back."""
    ann = DeclaredUser(name="ann", password=PasswordSource("password", "x"))
    present = AccessState(users={"ann": {"SCRAM-SHA-512": 8192}})
    assert make_plan(Declaration(users={"ann": ann}), present).changes == ()
    rotated = make_plan(Declaration(users={"ann": ann}), present, rotate=frozenset({"ann"}))
    assert rotated.changes == (UserChange("ann", {"SCRAM-SHA-512": 8192}, {"SCRAM-SHA-512": 8192}, True),)
    fewer = replace(ann, mechanisms=("SCRAM-SHA-256",))
    (change,) = make_plan(Declaration(users={"ann": fewer}), present).changes
    assert change == UserChange("ann", {"SCRAM-SHA-512": 8192}, {"SCRAM-SHA-256": 4096}, True)
    with pytest.raises(DeclarationError, match="--rotate: the file has no user bob"):
        make_plan(Declaration(users={"ann": ann}), present, rotate=frozenset({"bob"}))


def on_cluster(who: str, operation: Operation, permission: Permission = Permission.ALLOW) -> AclBinding:
    return AclBinding(
        ResourceType.CLUSTER, CLUSTER_NAME, PatternType.LITERAL, who, "*", operation, permission
    )


ADMINS = {
    "User:me": on_cluster("User:me", Operation.ALTER),
    "User:gone": on_cluster("User:gone", Operation.ALTER),
    "User:*": on_cluster("User:*", Operation.ALL),
    "User:admin": on_cluster("User:admin", Operation.CREATE),
    "User:loader": on_cluster("User:loader", Operation.IDEMPOTENT_WRITE),
}


def test_prune_keeps_the_access_of_the_caller_and_of_super_users() -> None:
    state = AccessState(
        users={name: {"SCRAM-SHA-512": 4096} for name in ("me", "admin", "gone")},
        rules=frozenset(ADMINS.values()),
    )
    protected = Protected(caller="User:me", super_users=frozenset({"User:admin"}))
    plan = make_plan(Declaration(users={}, rules=frozenset()), state, prune=True, protected=protected)
    after = cluster_after_all(state, plan)
    assert {rule.principal for rule in after.rules} == {"User:me", "User:*", "User:admin"}
    assert set(after.users) == {"me", "admin"}
    assert {each.item for each in plan.kept} == {*after.users, *after.rules}


def test_prune_keeps_what_nodes_need() -> None:
    """Their users, and the rules that let them send requests to each other."""
    needed = {on_cluster("User:node", Operation.CLUSTER_ACTION), on_cluster("User:node", Operation.DESCRIBE)}
    everybody = on_cluster("User:*", Operation.CLUSTER_ACTION)
    denied = on_cluster("User:other", Operation.CLUSTER_ACTION, Permission.DENY)
    state = AccessState(
        users={name: {"SCRAM-SHA-512": 4096} for name in ("node", "gone")},
        rules=frozenset({*needed, everybody, denied}),
    )
    nodes = nodes_by_rules(state.rules)
    assert nodes == {"User:node"}
    protected = Protected(caller="User:me", nodes=nodes)
    plan = make_plan(Declaration(users={}, rules=frozenset()), state, prune=True, protected=protected)
    after = cluster_after_all(state, plan)
    assert (set(after.users), after.rules) == ({"node"}, needed)


def test_a_rule_that_would_lock_the_caller_out_is_refused() -> None:
    for who in ("User:me", "User:*"):
        denied = Declaration(rules=frozenset({on_cluster(who, Operation.ALTER, Permission.DENY)}))
        with pytest.raises(DeclarationError, match=r"rules: one of them denies User:.* and so you"):
            make_plan(denied, AccessState(), protected=Protected(caller="User:me"))
        # Rules do not bind super users.
        safe = Protected(caller="User:me", super_users=frozenset({"User:me"}))
        assert make_plan(denied, AccessState(), protected=safe).changes
