"""All transactional ids of one `__transaction_state` partition.

An operation decides: it returns the records to append and the replies to give. What is stored changes only in
`replay`, live and on loading alike.
"""

from collections.abc import Callable

from penstock.transactions.messages import (
    AddRequest,
    DescribedTransaction,
    EndRequest,
    InitRequest,
    ListFilters,
    ListReply,
    Markers,
    MarkersPosition,
    TopicPartition,
)
from penstock.transactions.settings import TransactionSettings
from penstock.transactions.work import Token, Work


class TransactionShard:
    def __init__(self, settings: TransactionSettings, *, transaction_version: Callable[[], int]) -> None:
        """`transaction_version` tells the cluster's level of the feature of that name, now."""
        raise NotImplementedError

    def replay(self, key: bytes, value: bytes | None) -> None:
        raise NotImplementedError

    def loaded(self, now_ms: int) -> Work:
        raise NotImplementedError

    def tick(self, now_ms: int) -> Work:
        raise NotImplementedError

    def next_deadline_ms(self) -> int | None:
        raise NotImplementedError

    def clock_moved(self, by_ms: int) -> None:
        raise NotImplementedError

    def init_producer_id(
        self, request: InitRequest, token: Token, *, now_ms: int, fresh_producer_id: int | None = None
    ) -> Work:
        """Answers InitReply or NeedsProducerId."""
        raise NotImplementedError

    def add_partitions(self, request: AddRequest, token: Token, *, now_ms: int) -> Work:
        """Answers AddReply. Offsets of a group are added as its partition of `__consumer_offsets`."""
        raise NotImplementedError

    def verify_partitions(self, request: AddRequest, token: Token) -> Work:
        """Answers AddReply; changes nothing."""
        raise NotImplementedError

    def end(
        self, request: EndRequest, token: Token, *, now_ms: int, fresh_producer_id: int | None = None
    ) -> Work:
        """Answers EndReply or NeedsProducerId."""
        raise NotImplementedError

    def next_markers(self, after: MarkersPosition | None, token: Token) -> Work:
        """Answers MarkersReply with what was prepared after that position, as soon as there is something.

        A later question takes the place of one that still waits, which is then answered without markers.
        """
        raise NotImplementedError

    def markers_written(
        self, markers: Markers, partitions: tuple[TopicPartition, ...], token: Token, *, now_ms: int
    ) -> Work:
        """These partitions have the marker, or are gone for good. Answers None; repeats are harmless."""
        raise NotImplementedError

    def describe(self, transactional_id: str) -> DescribedTransaction:
        raise NotImplementedError

    def list_transactions(self, filters: ListFilters, *, now_ms: int) -> ListReply:
        raise NotImplementedError
