"""Random rules and requests are decided as a plain model decides them, also while rules come and go.

Only `Authorizer` decides here; tests/access/test_random_requests.py sends requests. `PENSTOCK_SEED` repeats a failure.
"""

import os
from random import Random
from uuid import UUID

from tests.access.model import Model

from penstock.protocol.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from penstock.security.authorizer import Authorizer, Decisions

REQUESTS = 100_000
REQUESTS_PER_RULES = 50

_NAMES = ("a", "ab", "abc", "abd", "b", "*", "a*", "hardcode", "x.y", "x.z")
_PREFIXES = ("", *_NAMES, "x.", "h")
_PRINCIPALS = (("User", "alice"), ("User", "bob"), ("User", "*"), ("Group", "alice"))
_HOSTS = ("10.0.0.1", "10.0.0.2")
_TYPES = tuple(ResourceType)[ResourceType.TOPIC :]
_OPERATIONS = tuple(Operation)[Operation.READ :]


def random_rule(random: Random) -> AclBinding:
    is_prefixed = random.random() < 0.4
    return AclBinding(
        random.choice(_TYPES),
        random.choice(_PREFIXES if is_prefixed else _NAMES),
        PatternType.PREFIXED if is_prefixed else PatternType.LITERAL,
        ":".join(random.choice(_PRINCIPALS)),
        random.choice((*_HOSTS, "*", "*")),
        random.choice((Operation.ALL, *_OPERATIONS)),
        random.choice((Permission.ALLOW, Permission.ALLOW, Permission.DENY)),
    )


def test_every_decision_is_that_of_the_model() -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "15"))
    random = Random(seed)
    allowed = 0
    for number in range(REQUESTS // REQUESTS_PER_RULES):
        everyone = random.random() < 0.3
        authorizer = Authorizer({}, super_users=[("User", "root")], allow_everyone_if_no_acl_found=everyone)
        decisions = {
            (who, host): Decisions(authorizer, who, host)
            for who in (*_PRINCIPALS, ("User", "root"))
            for host in _HOSTS
        }
        rules: dict[UUID, AclBinding] = {}
        for step in range(REQUESTS_PER_RULES):
            if step % 10 == 0:
                for _ in range(random.randrange(8)):
                    rules[UUID(int=random.getrandbits(128))] = random_rule(random)
                for acl_id in random.sample(list(rules), len(rules) // 4):
                    del rules[acl_id]
                authorizer.update(rules)
            who, host = random.choice(list(decisions))
            asked = (random.choice(_OPERATIONS), random.choice(_TYPES), random.choice(_NAMES))
            is_root = who == ("User", "root")
            model = Model(rules.values(), ":".join(who), host, is_super_user=is_root, is_open=everyone)
            expected = model.may(*asked)
            context = f"seed {seed}, rules {number}: {who} {host} {asked} of {rules}"
            assert authorizer.authorize(who, host, *asked) is expected, context
            assert decisions[who, host].allows(*asked) is expected, context
            allowed += expected
    assert REQUESTS // 5 < allowed < REQUESTS * 4 // 5, "the requests say little"


def test_authorize_any_is_true_only_if_some_name_is_allowed() -> None:
    """Without wildcards the answer must be exact: some name that a rule speaks of is allowed."""
    random = Random(15)
    for _ in range(2000):
        rules = {UUID(int=number): random_rule(random) for number in range(random.randrange(10))}
        exact = {
            acl_id: acl
            for acl_id, acl in rules.items()
            if acl.resource_name not in ("*", "") and acl.operation in (Operation.ALL, Operation.WRITE)
        }
        authorizer = Authorizer(exact)
        who, host = random.choice(_PRINCIPALS), random.choice(_HOSTS)
        names = {acl.resource_name for acl in exact.values()} | {
            f"{acl.resource_name}~"
            for acl in exact.values()  # no rule names it literally
        }
        expected = any(
            authorizer.authorize(who, host, Operation.WRITE, ResourceType.TOPIC, name) for name in names
        )
        found = authorizer.authorize_any(who, host, Operation.WRITE, ResourceType.TOPIC)
        assert found is expected, (who, host, exact)
