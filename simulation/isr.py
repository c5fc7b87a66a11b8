"""A leader asks the controller for another in-sync set, one change at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.replication.leader import IsrProposal, LeaderRules

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.replica import Key, Replica

#: Nobody knows whether it was done: it is asked again.
_UNKNOWN: Final = frozenset({ErrorCode.not_controller, ErrorCode.stale_broker_epoch})
#: The controller saw the state that the leader knows, and did nothing.
_DECLINED: Final = frozenset({ErrorCode.ineligible_replica, ErrorCode.invalid_request})


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
    node.call_controller(
        "alter_partition", ask, lambda reply: _answered(node, replica, rules, proposal, reply)
    )


def _answered(node: Node, replica: Replica, rules: LeaderRules, proposal: IsrProposal, reply: Any) -> None:
    """`reply`: an error code, or the partition epoch that it is now. What the set is, the image tells."""
    if replica.leading is not rules or rules.partition_epoch != proposal.partition_epoch:
        return
    is_refused = isinstance(reply, ErrorCode)
    if reply in _DECLINED if is_refused else reply == proposal.partition_epoch:
        rules.isr_declined(node.broker_epoch)
    else:
        rules.isr_refused(final=reply is not None and not (is_refused and reply in _UNKNOWN))
