"""The file of `penstock apply`: what it says is read, and every mistake is reported with its key."""

import tomllib

import pytest

from penstock.cli.access.declared.declaration import Declaration, DeclarationError, parse_declaration
from penstock.protocol.acls import CLUSTER_NAME, AclBinding, Operation, PatternType, Permission, ResourceType


def parse(text: str) -> Declaration:
    return parse_declaration(tomllib.loads(text))


def test_all_that_a_file_can_say() -> None:
    declared = parse(
        """
        [tenants.acme]
        users = ["ann", "User:app"]
        prefix = "acme."
        in = "20MB/s"
        partitions = 300
        groups = "none"

        [users.ann]
        password_env = "ANN"
        mechanisms = "SCRAM-SHA-512"
        iterations = 8192
        [users.bob]

        [[rules]]
        allow = ["User:bob", "User:CN=svc,O=acme"]
        role = "consumer"
        topic = "orders"
        group = ["billing"]
        [[rules]]
        deny = "User:*"
        host = "10.0.0.9"
        operation = "write"
        topic = "pay"
        pattern = "prefixed"
        [[rules]]
        allow = "User:bob"
        role = "producer"
        idempotent = true
        topic = "orders"
        [[rules]]
        allow = "User:ops"
        operation = ["Alter", "DescribeConfigs"]
        cluster = true

        [[quotas]]
        user = "default"
        client_id = "app"
        consume = "500KB/s"
        requests = 12.5
        [[quotas]]
        ip = "127.0.0.9"
        connections = 3
        """
    )
    assert declared.tenants is not None
    assert declared.tenants["acme"].users == ("ann", "app")
    assert declared.tenants["acme"].limits == {"producer_byte_rate": 20_000_000, "partitions_max": 300}
    assert declared.users is not None
    ann = declared.users["ann"]
    assert (ann.mechanisms, ann.iterations) == (("SCRAM-SHA-512",), 8192)
    assert ann.password is not None
    assert tuple(ann.password) == ("password_env", "ANN")
    assert declared.users["bob"].password is None
    assert declared.quotas == {
        (("client-id", "app"), ("user", None)): {"consumer_byte_rate": 5e5, "request_percentage": 12.5},
        (("ip", "127.0.0.9"),): {"connection_creation_rate": 3.0},
    }

    def rule(
        kind: ResourceType,
        name: str,
        who: str,
        operation: Operation,
        permission: Permission = Permission.ALLOW,
        pattern: PatternType = PatternType.LITERAL,
        host: str = "*",
    ) -> AclBinding:
        return AclBinding(kind, name, pattern, who, host, operation, permission)

    assert declared.rules == {
        *(
            rule(*granted)
            for who in ("User:bob", "User:CN=svc,O=acme")
            for granted in (
                (ResourceType.TOPIC, "orders", who, Operation.READ),
                (ResourceType.TOPIC, "orders", who, Operation.DESCRIBE),
                (ResourceType.GROUP, "billing", who, Operation.READ),
            )
        ),
        rule(ResourceType.TOPIC, "orders", "User:bob", Operation.WRITE),
        rule(ResourceType.TOPIC, "orders", "User:bob", Operation.CREATE),
        rule(ResourceType.CLUSTER, CLUSTER_NAME, "User:bob", Operation.IDEMPOTENT_WRITE),
        rule(
            ResourceType.TOPIC,
            "pay",
            "User:*",
            Operation.WRITE,
            Permission.DENY,
            PatternType.PREFIXED,
            "10.0.0.9",
        ),
        rule(ResourceType.CLUSTER, CLUSTER_NAME, "User:ops", Operation.ALTER),
        rule(ResourceType.CLUSTER, CLUSTER_NAME, "User:ops", Operation.DESCRIBE_CONFIGS),
    }


def test_a_section_that_is_missing_is_not_managed_and_one_that_is_empty_is() -> None:
    assert parse("") == Declaration()
    assert parse("rules = []\nquotas = []\n[users]\n[tenants]") == Declaration(
        tenants={}, users={}, rules=frozenset(), quotas={}
    )


TENANT = '[tenants.acme]\nusers = ["ann"]\nprefix = "acme."\n'
RULE = '[[rules]]\nallow = "User:ann"\noperation = "Read"\ntopic = "orders"\n'
QUOTA = '[[quotas]]\nuser = "ann"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenant.acme]", "tenant: there is no such key (did you mean tenants?)"),
        ("tenants = 3", "tenants: must be tables [tenants.NAME], not a number"),
        ("tenants.acme = 3", "tenants.acme: must be a table, not a number"),
        ('[tenants.acme]\nprefix = "x"', "tenants.acme: users is missing"),
        ('[tenants.acme]\nusers = ["ann"]', "tenants.acme: prefix is missing"),
        (TENANT + "topics = 1", "tenants.acme.topics: there is no such key (known: users, prefix, in,"),
        (TENANT + "grops = 1", "tenants.acme.grops: there is no such key (did you mean groups?)"),
        (TENANT + "groups = 0", "tenants.acme.groups: Invalid value 0 for configuration groups_max"),
        (TENANT + "groups = -1", "tenants.acme.groups: '-1' is no number"),
        (TENANT + f"storage = {2**63}", "tenants.acme.storage: Invalid value"),
        (TENANT + f'in = "{2**63}"', "tenants.acme.in: Invalid value"),
        (TENANT + 'in = "fast"', "tenants.acme.in: 'fast' is no rate"),
        (TENANT + "in = 1.5", "tenants.acme.in: must be a limit, not a number"),
        (TENANT + "in = true", "tenants.acme.in: must be a limit, not true or false"),
        ('[tenants."a b"]\nusers = ["ann"]\nprefix = "a"', "tenants.a b: The name of a tenant has"),
        ('[tenants.x]\nusers = []\nprefix = "a"', "tenants.x.users: must not be empty"),
        ('[tenants.x]\nusers = ["*"]\nprefix = "a"', "not a wildcard"),
        ('[tenants.x]\nusers = ["a", "User:a"]\nprefix = "a"', "tenants.x.users: names a twice"),
        ('[tenants.x]\nusers = ["a;b"]\nprefix = "a"', "tenants.x.users: a;b contains a semicolon"),
        ('[tenants.x]\nusers = ["a", 7]\nprefix = "a"', "tenants.x.users: must be text or a list of texts"),
        ('[tenants.x]\nusers = ["a"]\nprefix = "__a"', "tenants.x.prefix: "),
        (TENANT + '[tenants.b]\nusers = ["ann"]\nprefix = "b"', "ann belongs to tenant acme already"),
        (TENANT + '[tenants.b]\nusers = ["b"]\nprefix = "acme_b"', "acme_b overlaps with acme. of tenant"),
        ("[users.ann]\npasword_env = 'A'", "pasword_env: there is no such key (did you mean password_env?)"),
        ("[users.ann]\npassword = 7", "users.ann.password: must be text, not a number"),
        ("[users.ann]\npassword = 'a'\npassword_env = 'A'", "only one of password_env and password"),
        ("[users.ann]\nmechanisms = 'PLAIN'", "users.ann.mechanisms: there is no PLAIN (use SCRAM-SHA-256"),
        ("[users.ann]\niterations = 1", "users.ann.iterations: must be a whole number from 4096 to 16384"),
        ("[users.ann]\niterations = true", "users.ann.iterations: must be a whole number"),
        ("[users.'*']", "users.*: must be the name with which the user logs in"),
        ("[users.ANONYMOUS]", "users.ANONYMOUS: must be the name"),
        ("[users.'']", "users: a name is empty"),
        ("[rules]", "rules: must be tables [[rules]]"),
        ("rules = [1]", "rules: must be tables [[rules]]"),
        (RULE + "hosts = '*'", "rules[1].hosts: there is no such key (did you mean host?)"),
        ("[[rules]]\ntopic = 'x'\noperation = 'Read'", "rules[1]: takes one of allow and deny"),
        (RULE + "deny = 'User:x'", "rules[1]: takes one of allow and deny"),
        (RULE.replace("User:ann", "ann"), "rules[1].allow: ann is no principal"),
        (RULE.replace("User:ann", "user:ann"), "rules[1].allow: user:ann is no principal"),
        (RULE.replace("User:ann", "User:"), "rules[1].allow: User: is no principal"),
        (RULE.replace("User:ann", "User:a*"), "rules[1].allow: User:a* looks like a wildcard"),
        (RULE.replace("topic", "cluster"), "rules[1].cluster: must be true or false, not text"),
        (RULE.replace('topic = "orders"', ""), "rules[1]: names no resource"),
        (RULE.replace("Read", "Alter") + "group = 'g'", "rules[1].operation: there is no Alter on a group"),
        (RULE.replace("Read", "Reed"), "rules[1].operation: there is no operation Reed"),
        (RULE + "role = 'consumer'", "rules[1]: takes one of role and operation"),
        (RULE + "idempotent = true", "rules[1].idempotent: goes with role"),
        (RULE + "pattern = 'match'", "rules[1].pattern: match is no pattern of a rule"),
        (RULE.replace("orders", "*") + "pattern = 'prefixed'", "rules[1].pattern: a prefixed * covers only"),
        (
            RULE.replace('operation = "Read"', 'role = "consumer"'),
            "rules[1]: a consumer needs a group",
        ),
        (
            RULE.replace('operation = "Read"', 'role = "producer"\ngroup = "g"'),
            "rules[1]: a producer needs nothing on a group",
        ),
        (RULE.replace('operation = "Read"', 'role = "owner"'), "rules[1].role: owner is no role"),
        (RULE + RULE, "rules[2]: is contained in rules[1], remove it"),
        ("quotas = {}", "quotas: must be tables [[quotas]]"),
        ("[[quotas]]\nproduce = 1", "quotas[1]: has no client"),
        (QUOTA, "quotas[1]: has no limit"),
        (QUOTA + "produce = 0", "quotas[1].produce: Quota producer_byte_rate must be greater than 0"),
        (QUOTA + "produce = -1", "quotas[1].produce: Quota producer_byte_rate must be greater than 0"),
        (QUOTA + "requests = nan", "quotas[1].requests: Quota request_percentage must be greater than 0"),
        (QUOTA + "requests = inf", "quotas[1].requests: Quota request_percentage must be finite"),
        (QUOTA + f"produce = {2**63}", "producer_byte_rate is too large for a LONG"),
        (QUOTA + f"produce = {10**400}", "quotas[1].produce: is too large"),
        (QUOTA + "produce = 1.5", "producer_byte_rate cannot be a fractional value"),
        (QUOTA + "produce = 'fast'", "quotas[1].produce: 'fast' is no rate"),
        (QUOTA + "requests = '5'", "quotas[1].requests: must be a number, not text"),
        (QUOTA + "requests = true", "quotas[1].requests: must be a number, not true or false"),
        (QUOTA + "connections = 1", "Invalid configuration key connection_creation_rate"),
        (QUOTA + "ip = '::1'\nproduce = 1", "an IP has no user and no client id"),
        ("[[quotas]]\nip = 'nowhere'\nconnections = 1", "nowhere is not an IP address"),
        (2 * (QUOTA + "produce = 1\n"), "quotas[2]: is about the same as quotas[1]"),
    ],
)
def test_a_mistake_is_reported_with_its_key(text: str, message: str) -> None:
    with pytest.raises(DeclarationError) as found:
        parse(text)
    error = found.value
    assert message in (f"{error} ({error.hint})" if error.hint else str(error))


@pytest.mark.parametrize(
    "text",
    [
        "[users.ann]\npassword = ['hunter2hunter2']",
        "[users.ann]\nmechanism = 'x'\npassword = 'hunter2hunter2'",
        "[users.ann]\npassword_env = 'X'\npassword = 'hunter2hunter2'",
        "[users]\nann = 'hunter2hunter2'",
    ],
)
def test_no_error_quotes_a_password(text: str) -> None:
    with pytest.raises(DeclarationError) as found:
        parse(text)
    assert "hunter2" not in f"{found.value!r} {found.value} {found.value.hint}"


def test_a_declaration_prints_no_password() -> None:
    assert "hunter2" not in repr(parse("[users.ann]\npassword = 'hunter2hunter2'"))
