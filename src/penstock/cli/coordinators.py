"""Questions about groups and transactions that the client library has no call for, put to whoever coordinates them."""

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

from penstock.cli.client import Cluster
from penstock.cli.failure import Failure
from penstock.cli.wire import Address, NotUnderstood, ask
from penstock.protocol.schemas import schema_class

GROUP: Final = 0
TRANSACTION: Final = 1
#: Answers may wait for replicas.
PATIENCE_S: Final = 15.0

Answer = TypeVar("Answer")


class Coordinator(NamedTuple):
    node: int
    address: Address


def broker_addresses(cluster: Cluster) -> list[Address]:
    found = sorted(cluster.metadata().brokers.values(), key=lambda broker: int(broker.id))
    return [(str(broker.host), int(broker.port)) for broker in found]


def ask_everyone(cluster: Cluster, question: Callable[[Address], Iterable[Answer]]) -> list[Answer]:
    """What all brokers have to say together. Raises Failure if one of them says nothing, for it may know of more."""
    answers: list[Answer] = []
    for address in broker_addresses(cluster):
        try:
            answers += question(address)
        except NotUnderstood:
            continue
        except OSError as error:
            raise Failure(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from None
    return answers


def coordinator_of(cluster: Cluster, key: str, kind: int) -> Coordinator:
    """Raises Failure."""
    request = schema_class("find_coordinator.v4.request:FindCoordinatorRequest")(
        key_type=kind, coordinator_keys=(key,)
    )
    for address in broker_addresses(cluster):
        try:
            (found,) = ask(address, request).coordinators
        except OSError:
            continue
        refuse_error(found, f"nobody coordinates {key} at present")
        return Coordinator(int(found.node_id), (str(found.host), int(found.port)))
    raise Failure("no broker of the cluster can be reached at the address that it advertises")


def ask_coordinator(cluster: Cluster, key: str, kind: int, request: Any) -> Any:
    """Raises Failure when it does not answer."""
    coordinator = coordinator_of(cluster, key, kind)
    try:
        return ask(coordinator.address, request, timeout_s=PATIENCE_S)
    except OSError as error:
        raise Failure(f"node {coordinator.node}, which coordinates {key}, does not answer: {error}") from None


def refuse_error(answer: Any, subject: str) -> None:
    """Raises Failure."""
    if answer.error_code.value != 0:
        reason = getattr(answer, "error_message", None) or answer.error_code.name.replace("_", " ")
        raise Failure(f"{subject}: {reason}")
