"""The table of access: no API is served without an entry, and its entries say what is needed."""

import pytest

from penstock.broker.network.access import ACCESS, REFUSED, InHandler, Whole
from penstock.broker.network.apis import APIS, PRIVATE_APIS
from penstock.protocol.acls import SUPPORTED_OPERATIONS, Operation, ResourceType

HAND_PACKED = {0, 1, 78, 79, *PRIVATE_APIS}


def test_every_api_has_an_entry() -> None:
    assert APIS.keys() | PRIVATE_APIS.keys() <= ACCESS.keys()


@pytest.mark.parametrize("key", sorted(ACCESS))
def test_an_entry_needs_something_or_says_why_not(key: int) -> None:
    access = ACCESS[key]
    assert bool(access.checks) != bool(access.open_because)
    for check in access.checks:
        for need in check.needs:
            # Apache Kafka asks for DELETE on the cluster too, which only a rule for ALL operations grants.
            if need != (Operation.DELETE, ResourceType.CLUSTER):
                assert need.operation in SUPPORTED_OPERATIONS[need.resource_type]
            assert need.resource_type in REFUSED


def test_hand_packed_requests_are_checked_in_their_handlers() -> None:
    """They do not pass the gate."""
    for key in HAND_PACKED:
        assert all(isinstance(check, InHandler) for check in ACCESS[key].checks), key


def test_what_only_nodes_send_needs_cluster_action() -> None:
    for key, api in {**APIS, **PRIVATE_APIS}.items():
        # Nodes and operators add voters and write markers.
        if api.inter_broker_from == 0 and key not in (27, 80):
            (check,) = ACCESS[key].checks
            assert [need.operation for need in check.needs] == [Operation.CLUSTER_ACTION], api.name
            assert isinstance(check, Whole) or key in PRIVATE_APIS
