"""What a decision is: records to append and replay, and the reply that is due once that is done."""

from typing import Generic, NamedTuple, TypeVar

from penstock.cluster.wire import MetadataRecord

Reply = TypeVar("Reply", covariant=True)


class UncleanElection(NamedTuple):
    """A leader that may lack what was acknowledged: never decided in silence."""

    topic: str
    partition: int
    old_leader: int  # -1 when there was none
    leader: int
    leader_epoch: int  # the one that begins


class Decision(NamedTuple, Generic[Reply]):
    """Takes effect as a whole or not at all; without records there is nothing to append."""

    records: tuple[MetadataRecord, ...]
    reply: Reply
    unclean: tuple[UncleanElection, ...] = ()
