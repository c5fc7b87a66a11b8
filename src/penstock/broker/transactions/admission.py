"""Transactional batches that a leader may not append at once, because their transaction is not open here yet.

They wait for the coordinator's word, each producer for itself: nobody else's batches wait with them, and a producer's
own batches stay in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.transactions.verification import Question
from penstock.log.transactions import VerificationGuard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition

#: From this version of Produce on, the partition is added by the leader (KIP-890).
ADDS_FROM: Final = 12
#: From this version on, producers know the error that asks them to abort.
_ABORTABLE_FROM: Final = 11
#: The coordinator could not be asked, or has no word yet; all clients send the batch again after NOT_ENOUGH_REPLICAS.
_LATER: Final = frozenset(
    {
        ErrorCode.network_exception,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.unknown_topic_or_partition,  # it leads here, so the coordinator will hear of it too
        ErrorCode.unknown_server_error,
    }
)
#: Of a producer only its last transaction can be ending, so a second time is the last.
_GUARDS_MAX: Final = 2


class Writer(NamedTuple):
    """Who sent a transactional batch, and how."""

    transactional_id: str
    producer_id: int
    epoch: int
    produce_version: int

    @property
    def adds(self) -> bool:
        return self.produce_version >= ADDS_FROM


_VERIFICATION: Final = "transaction.partition.verification.enable"
_Key = tuple[UUID, int, int]  # topic id, partition, producer id
#: What to append with; None where nothing needs to be said, an error where nothing may be appended.
Word = VerificationGuard | ApiError | None


class Admission:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._verifies = True
        node.dynamic.watch((_VERIFICATION,), self._configure)
        self._configure()
        self._last: dict[_Key, asyncio.Task[None]] = {}

    def _configure(self) -> None:
        self._verifies = self._node.dynamic.boolean(_VERIFICATION)

    def must_wait(self, partition: Partition, writer: Writer) -> bool:
        """Whether the writer's batch has to go through `line_up`."""
        if self._last and _key(partition, writer) in self._last:
            return True
        return self._needs_word(partition, writer)

    def _needs_word(self, partition: Partition, writer: Writer) -> bool:
        if not (self._verifies or writer.adds):
            return False
        return partition.log.producers.needs_verification(writer.producer_id, writer.epoch)

    def line_up(
        self,
        partitions: Iterable[Partition],
        writer: Writer,
        work: Callable[[set[asyncio.Task[None]]], Coroutine[Any, Any, None]],
    ) -> asyncio.Task[None]:
        """Run `work(previous)`, which waits for the writer's batches before these."""
        keys = [_key(partition, writer) for partition in partitions]
        task = self._node.spawn(work({self._last[key] for key in keys if key in self._last}))
        self._last.update(dict.fromkeys(keys, task))
        task.add_done_callback(partial(self._left, keys))
        return task

    def _left(self, keys: list[_Key], task: asyncio.Task[None]) -> None:
        for key in keys:
            if self._last.get(key) is task:
                del self._last[key]

    async def guard(self, partition: Partition, writer: Writer) -> VerificationGuard | None:
        """As below, for one partition. Raises ApiError."""
        word = (await self.words((partition,), writer))[partition]
        if isinstance(word, ApiError):
            raise word
        return word

    async def words(self, partitions: Sequence[Partition], writer: Writer) -> dict[Partition, Word]:
        """What to append with, once the coordinator has said whether each partition is in the transaction."""
        words: dict[Partition, Word] = {}
        left = partitions
        for _ in range(_GUARDS_MAX):
            left = await self._ask(left, writer, words)
            if not left:
                break
        return words

    async def _ask(
        self, partitions: Sequence[Partition], writer: Writer, words: dict[Partition, Word]
    ) -> list[Partition]:
        """Returns those that must be asked about again.

        A producer of the newer protocol may be ahead of its last transaction's marker, which voids the guard.
        """
        asked = []
        for partition in partitions:
            words[partition] = guard = self._begin(partition, writer)
            if isinstance(guard, VerificationGuard):
                place = TopicPartition(partition.topic, partition.index)
                asked.append((partition, place, partition.leader_epoch, guard))
        if not asked:
            return []
        question = Question(writer.transactional_id, writer.producer_id, writer.epoch, writer.adds)
        places = tuple(place for _, place, _, _ in asked)
        outcomes = await self._node.transactions.verification.ask(question, places)
        again = []
        for partition, place, leader_epoch, guard in asked:
            if outcomes[place] is not ErrorCode.none:
                words[partition] = _refusal(outcomes[place], writer)
            elif partition.leader_epoch != leader_epoch:
                words[partition] = ApiError(ErrorCode.not_leader_or_follower)
            elif writer.adds and not partition.log.producers.is_guarded(guard):
                again.append(partition)
        return again

    def _begin(self, partition: Partition, writer: Writer) -> Word:
        if not self._needs_word(partition, writer):
            return None
        try:
            return partition.log.producers.begin_verification(writer.producer_id, writer.epoch)
        except ApiError as error:
            return error

    def check_open(self, partition: Partition, writer: Writer) -> None:
        """For a batch without a guard that is appended later than it came. Raises ApiError."""
        if self._needs_word(partition, writer):
            raise ApiError(ErrorCode.invalid_txn_state, "the transaction has ended meanwhile")


def _key(partition: Partition, writer: Writer) -> _Key:
    return partition.topic_id, partition.index, writer.producer_id


def _refusal(code: ErrorCode, writer: Writer) -> ApiError:
    """As a producer of that version understands it."""
    if code in _LATER or (code is ErrorCode.concurrent_transactions and not writer.adds):
        return ApiError(
            ErrorCode.not_enough_replicas,
            f"unable to verify that the partition is in the transaction: {code.name}",
        )
    if code is ErrorCode.producer_fenced:
        return ApiError(ErrorCode.invalid_producer_epoch)
    if code is ErrorCode.transaction_abortable and writer.produce_version < _ABORTABLE_FROM:
        code = ErrorCode.invalid_txn_state
    return ApiError(code, "the partition is not in the transaction")
