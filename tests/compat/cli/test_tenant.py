"""`penstock tenant`: created, shown, altered and deleted; what is wrong is said in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.brokers import BrokerProcess

from penstock.client.admin.tenants import Tenant, alter_tenant, tenant_changes
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    # The client of this test is not authenticated, and is the admin.
    settings = {"authorizer.class.name": "StandardAuthorizer", "super.users": "User:ANONYMOUS"}
    return broker_with(settings)


def test_a_tenant_is_created_shown_altered_and_deleted(penstock: Any, answer: Any) -> None:
    penstock(
        *("tenant", "create", "acme", "--users", "ann,app", "--users", "CN=svc,O=acme", "--prefix", "acme."),
        *("--in", "20MB/s", "--out", "60MB/s", "--requests", "2000/s", "--storage", "500GB"),
        *("--partitions", "300", "--connections", "200", "--groups", "100"),
    )
    penstock("topic", "create", "acme.orders", "--partitions", "3")
    shown = answer("tenant", "show", "acme")
    assert shown["users"] == ["ann", "app", "CN=svc,O=acme"]
    assert shown["prefix"] == "acme."
    assert shown["limits"] == {
        "producer_byte_rate": 20_000_000,
        "consumer_byte_rate": 60_000_000,
        "request_rate": 2000,
        "storage_bytes_max": 500_000_000_000,
        "partitions_max": 300,
        "connections_max": 200,
        "groups_max": 100,
    }
    assert shown["usage"]["partitions"] == 3
    assert answer("tenant", "list") == [shown]
    table = penstock("tenant", "show", "acme")[0]
    assert "19.1 MiB/s" in table
    assert "1 %" in table
    header, row, *_ = penstock("tenant", "list")[0].splitlines()
    assert header.endswith("stored  in/s  out/s  requests/s")
    assert "acme." in row
    assert len(header) < 100, "headings are not folded on a terminal"
    rules = answer("acl", "list", "--principal", "User:ann")
    assert {(rule["resource"], rule["name"], rule["pattern"]) for rule in rules} == {
        (kind, "acme.", "prefixed") for kind in ("Topic", "Group", "TransactionalId")
    }
    penstock(
        *("tenant", "alter", "acme", "--add-users", "new", "--remove-users", "app", "--partitions", "none"),
        *("--groups", "7"),
    )
    altered = answer("tenant", "show", "acme")
    assert altered["users"] == ["ann", "CN=svc,O=acme", "new"]
    assert "partitions_max" not in altered["limits"]
    assert altered["limits"]["groups_max"] == 7
    assert "nothing to change" in penstock("tenant", "alter", "acme", "--groups", "7")[1]
    penstock("tenant", "create", "other", "--users", "bob", "--prefix", "other-")
    for name in ("acme", "other"):
        penstock("tenant", "delete", name, "--yes")
    assert answer("tenant", "list") == []
    assert answer("acl", "list") == []


@pytest.fixture(scope="module")
def globex(broker: BrokerProcess) -> None:
    tenant = Tenant("globex", ("gus",), "globex-", {"partitions_max": 2})
    with Cluster(ConnectionSettings.parse({"bootstrap.servers": broker.bootstrap_servers})) as cluster:
        alter_tenant(cluster, tenant.name, tenant_changes(tenant, None))


@pytest.mark.usefixtures("globex")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("create", "globex", "--users", "x", "--prefix", "x"), 1, "tenant globex exists"),
        (("create", "new", "--users", "gus", "--prefix", "x"), 1, "User gus belongs to tenant globex"),
        (("create", "new", "--users", "x", "--prefix", "globex-eu"), 1, "overlaps with globex-"),
        (("create", "new", "--users", "x", "--prefix", "__x"), 1, "those of internal topics"),
        (("create", "new", "--users", "*", "--prefix", "x"), 1, "not a wildcard"),
        (("create", "*", "--users", "x", "--prefix", "x"), 1, "The name of a tenant has"),
        (("create", "new", "--users", "ANONYMOUS", "--prefix", "x"), 1, "everybody who has not logged in"),
        (("create", "new", "--users", "x", "--prefix", "x", "--in", "fast"), 2, "--in: 'fast' is no rate"),
        (("create", "new", "--users", "x", "--prefix", "x", "--groups", "7MB"), 2, "'7MB' is no number"),
        (("create", "new", "--users", "x", "--prefix", "x", "--groups", "0"), 1, "must be at least 1"),
        (
            ("create", "new", "--users", "x", "--prefix", "x", "--storage", str(2**63)),
            1,
            "must fit in 64 bits",
        ),
        (("alter", "globex", "--remove-users", "ann"), 1, "ann is no user of tenant globex"),
        (("alter", "globex", "--remove-users", "gus"), 1, "must name a user"),
        (("alter", "nothing", "--groups", "1"), 1, "tenant nothing does not exist"),
        (("show", "nothing"), 1, "tenant nothing does not exist"),
        (("delete", "nothing", "--yes"), 1, "tenant nothing does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    penstock: Any, words: tuple[str, ...], code: int, message: str
) -> None:
    assert message in penstock("tenant", *words, code=code)[1]


@pytest.mark.usefixtures("globex")
def test_a_topic_beyond_the_limit_is_refused_with_the_reason(penstock: Any) -> None:
    refused = penstock("topic", "create", "globex-t", "--partitions", "3", code=1)[1]
    assert "Tenant globex has 0 of at most 2 partitions; 3 more are too many." in refused
