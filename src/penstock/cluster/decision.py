"""What a decision is: records to append and replay, and the reply that is due once that is done."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.cluster.wire import MetadataRecord

Reply = TypeVar("Reply", covariant=True)


@dataclass(frozen=True, slots=True)
class Decision(Generic[Reply]):
    """Takes effect as a whole or not at all; without records there is nothing to append."""

    records: tuple[MetadataRecord, ...]
    reply: Reply
