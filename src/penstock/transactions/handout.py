"""Which markers have to be written, and who was told.

Each transaction that is prepared gets a serial number. Whoever writes markers asks for what came after the last
number that it has seen, so nothing is lost with an answer that does not arrive, and nothing is told twice else.
"""

from collections.abc import Iterable

from penstock.transactions.messages import Markers, MarkersPosition, MarkersReply, TopicPartition
from penstock.transactions.transaction import Transaction
from penstock.transactions.work import Token


class _Prepared:
    __slots__ = ("remaining", "serial", "transaction")

    def __init__(self, transaction: Transaction, serial: int) -> None:
        self.transaction = transaction
        self.serial = serial
        self.remaining = set(transaction.partitions)


class Handout:
    __slots__ = ("_life", "_prepared", "_serial", "_waiting")

    def __init__(self) -> None:
        self._prepared: dict[str, _Prepared] = {}
        self._serial = 0
        self._life = object()
        self._waiting: Token | None = None

    def __len__(self) -> int:
        return len(self._prepared)

    @property
    def markers_waiting(self) -> int:
        return sum(len(prepared.remaining) for prepared in self._prepared.values())

    def replayed(self, transaction: Transaction) -> None:
        """Called for every state that an id takes."""
        self._prepared.pop(transaction.transactional_id, None)
        if transaction.state.is_prepared:
            self._serial += 1
            self._prepared[transaction.transactional_id] = _Prepared(transaction, self._serial)

    def forget(self, transactional_id: str) -> None:
        self._prepared.pop(transactional_id, None)

    def ask(self, after: MarkersPosition | None, token: Token) -> Iterable[tuple[Token, MarkersReply]]:
        """The replies that can be given now."""
        serial = after.serial if after is not None and after.life is self._life else 0
        if self._waiting is not None:
            yield self._waiting, MarkersReply((), self._position(serial))
            self._waiting = None
        newer = self._newer_than(serial)
        if newer:
            yield token, MarkersReply(newer, self._position(self._serial))
        else:
            self._waiting = token

    def announce(self, decided: Iterable[Transaction]) -> Iterable[tuple[Token, MarkersReply]]:
        """These will be replayed next, in this order."""
        prepared = (transaction for transaction in decided if transaction.state.is_prepared)
        markers = tuple(_markers(each, serial) for serial, each in enumerate(prepared, self._serial + 1))
        if markers and self._waiting is not None:
            yield self._waiting, MarkersReply(markers, self._position(self._serial + len(markers)))
            self._waiting = None

    def is_written(self, markers: Markers, partitions: Iterable[TopicPartition]) -> bool:
        """Whether the last marker of this transaction is there now; a report of an earlier one says nothing of it."""
        prepared = self._prepared.get(markers.transactional_id)
        if prepared is None or prepared.serial != markers.serial:
            return False
        prepared.remaining.difference_update(partitions)
        return not prepared.remaining

    def _position(self, serial: int) -> MarkersPosition:
        return MarkersPosition(self._life, serial)

    def _newer_than(self, serial: int) -> tuple[Markers, ...]:
        newer = []
        # Numbers rise in the order of the dictionary.
        for prepared in reversed(self._prepared.values()):
            if prepared.serial <= serial:
                break
            newer.append(_markers(prepared.transaction, prepared.serial))
        return tuple(reversed(newer))


def _markers(transaction: Transaction, serial: int) -> Markers:
    return Markers(
        serial=serial,
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer.id,
        epoch=transaction.producer.epoch,
        committed=transaction.state.is_committed,
        partitions=tuple(sorted(transaction.partitions)),
        transaction_version=transaction.transaction_version,
    )
