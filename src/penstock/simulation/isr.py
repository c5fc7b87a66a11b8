"""A leader asks the controller for another in-sync set, one change at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.replication.leader import IsrProposal, LeaderRules

if TYPE_CHECKING:
    from penstock.simulation.node import Node
    from penstock.simulation.replica import Key, Replica

#: Nobody knows whether it was done: it is asked again.
_UNKNOWN: Final = frozenset(
    {ErrorCode.not_controller, ErrorCode.request_timed_out, ErrorCode.unknown_server_error}
)


class IsrAsk(NamedTuple):
    broker_id: int
    broker_epoch: int
    key: Key
    proposal: IsrProposal


def propose_isr(node: Node, replica: Replica) -> None:
    rules, proposal = replica.leading, replica.wanted_isr()
    if rules is None or proposal is None:
        return
    rules.proposed_isr(proposal)
    node.world.note("asks for in-sync set", node.id, replica.key, proposal)
    ask = IsrAsk(node.id, node.lifecycle.broker_epoch, replica.key, proposal)
    node.call_controller("alter_partition", ask, lambda reply: _answered(replica, rules, reply))


def _answered(replica: Replica, rules: LeaderRules, reply: Any) -> None:
    """`reply`: an error code, or the in-sync set and partition epoch that it is now."""
    if replica.leading is not rules:
        return
    if reply is None or reply in _UNKNOWN:
        rules.isr_refused(final=False)
    elif reply is ErrorCode.ineligible_replica:
        rules.isr_declined()
    elif isinstance(reply, ErrorCode):
        rules.isr_refused(final=True)
    elif rules.isr_committed(*reply):
        replica.moved()
