"""What is asked of transaction coordinators: one function for each request, each insisting until its deadline."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from penstock.client.cluster import Cluster, Coordinates
from penstock.client.connection import Connection
from penstock.client.errors import Unavailable, UnsupportedVersion, check, code_of
from penstock.client.grouping import by_topic
from penstock.client.metadata import Place
from penstock.client.positions import CommittedOffset, offset_topics
from penstock.client.sequencing import NO_PRODUCER, NO_PRODUCER_ID, Producer
from penstock.protocol.bounds import read_uvarint
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.produce import encode_uvarint
from penstock.protocol.schemas import schema_class

#: From this level of the feature on every transaction has an epoch of its own, and leaders add partitions (KIP-890).
EPOCH_PER_TRANSACTION: Final = 2
FEATURE: Final = "transaction.version"

_INIT_PRODUCER_ID: Final = 22
_TWO_PHASE_FROM: Final = 6
_PRODUCE: Final = 0
_PRODUCE_ADDS_FROM: Final = 12
_END_TXN: Final = 26
_END_BUMPS_FROM: Final = 5
#: For one who begins nothing; whoever uses the id next says how long it may take.
_BRIEFLY_MS: Final = 60_000
#: A transaction that has not begun has no time at which it did, and cannot be described.
_EMPTY: Final = "Empty"
_OPEN: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")

_DESCRIBE_TRANSACTIONS: Final = 65
#: After how long it was throttled, and how many are described.
_FIRST_AT: Final = 5
_ERROR: Final = struct.Struct(">h")
#: Timeout and start.
_TIMES_BYTES: Final = 12
_HOLDER: Final = struct.Struct(">qh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    producer: Producer
    #: Whose open transaction was kept for this producer to end; None where there is none.
    ongoing: Producer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionInfo:
    transactional_id: str
    state: str
    producer: Producer
    timeout_ms: int
    start_ms: int
    partitions: tuple[Place, ...]


def transaction_version(connection: Connection, at_most: int = EPOCH_PER_TRANSACTION) -> int:
    """The newest protocol that the cluster, this broker and we speak."""
    knows = connection.knows(_END_TXN, _END_BUMPS_FROM) and connection.knows(_PRODUCE, _PRODUCE_ADDS_FROM)
    level = connection.features().get(FEATURE, 0) if knows else 0
    return min(level, at_most) if level >= EPOCH_PER_TRANSACTION else 0


def init_producer(cluster: Cluster) -> Begun:
    """An id for a producer without transactions. Raises Unavailable, Refused."""
    request = _init_request(None, 1, NO_PRODUCER)
    return cluster.call_any(lambda connection: _begun(connection.call(request), "a producer"))


def init_transactional(
    cluster: Cluster,
    transactional_id: str,
    *,
    timeout_ms: int,
    current: Producer = NO_PRODUCER,
    two_phase: bool = False,
    keep_prepared: bool = False,
) -> Begun:
    """Take the id over: whoever had it is fenced, and its transaction aborted unless that is to be kept.

    `current` is for a producer that goes on after a failure of its own. Raises Fenced, Refused, Unavailable, and
    UnsupportedVersion where the broker knows nothing of two phases.
    """
    request = _init_request(transactional_id, timeout_ms, current, two_phase, keep_prepared)

    def ask(connection: Connection) -> Begun:
        if (two_phase or keep_prepared) and not connection.knows(_INIT_PRODUCER_ID, _TWO_PHASE_FROM):
            raise UnsupportedVersion(f"{connection.peer} knows nothing of two-phase transactions")
        return _begun(connection.call(request), f"transactional id {transactional_id}")

    return cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def _init_request(
    transactional_id: str | None,
    timeout_ms: int,
    current: Producer,
    two_phase: bool = False,
    keep_prepared: bool = False,
) -> Any:
    return schema_class("init_producer_id.v6.request:InitProducerIdRequest")(
        transactional_id=transactional_id,
        transaction_timeout=timedelta(milliseconds=timeout_ms),
        producer_id=current.id,
        producer_epoch=current.epoch,
        enable2_pc=two_phase,
        keep_prepared_txn=keep_prepared,
    )


def _begun(answer: Any, subject: str) -> Begun:
    check(answer.error_code, subject)
    ongoing = Producer(
        int(getattr(answer, "ongoing_txn_producer_id", NO_PRODUCER.id)),
        int(getattr(answer, "ongoing_txn_producer_epoch", NO_PRODUCER.epoch)),
    )
    return Begun(
        producer=Producer(int(answer.producer_id), int(answer.producer_epoch)),
        ongoing=None if ongoing.id == NO_PRODUCER_ID else ongoing,
    )


def add_partitions(
    cluster: Cluster, transactional_id: str, producer: Producer, places: Iterable[Place]
) -> None:
    """Of the older protocol: before the first batch to each. Raises Fenced, Refused, Unavailable."""
    module = "add_partitions_to_txn.v3.request"
    topic = schema_class(f"{module}:AddPartitionsToTxnTopic")
    request = schema_class(f"{module}:AddPartitionsToTxnRequest")(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=tuple(
            topic(name=name, partitions=tuple(index for index, _ in parts))
            for name, parts in by_topic((place, None) for place in places).items()
        ),
    )

    def ask(connection: Connection) -> None:
        for told in connection.call(request).results_by_topic_v3_and_below:
            for each in told.results_by_partition:
                if each.partition_error_code is not ErrorCode.operation_not_attempted:
                    check(each.partition_error_code, f"{told.name}[{each.partition_index}]")

    cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def commit_offsets(
    cluster: Cluster,
    transactional_id: str,
    producer: Producer,
    group: str,
    offsets: Mapping[Place, int | CommittedOffset],
    *,
    version: int,
    generation: int = -1,
    member: str = "",
) -> None:
    """They count once the transaction is committed. Raises Fenced, Refused, Unavailable."""
    number = 5 if version >= EPOCH_PER_TRANSACTION else 4
    module = f"txn_offset_commit.v{number}.request"
    request = schema_class(f"{module}:TxnOffsetCommitRequest")(
        transactional_id=transactional_id,
        group_id=group,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        generation_id=generation,
        member_id=member,
        group_instance_id=None,
        topics=offset_topics(module, "TxnOffsetCommitRequest", offsets, ""),
    )

    def ask(connection: Connection) -> None:
        for topic in connection.call(request).topics:
            for each in topic.partitions:
                check(each.error_code, f"position of group {group} in {topic.name}[{each.partition_index}]")

    cluster.call_coordinator(Coordinates.GROUP, group, ask)


def add_offsets(cluster: Cluster, transactional_id: str, producer: Producer, group: str) -> None:
    """Of the older protocol: before the first offsets of each group. Raises Fenced, Refused, Unavailable."""
    request = schema_class("add_offsets_to_txn.v3.request:AddOffsetsToTxnRequest")(
        transactional_id=transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        group_id=group,
    )

    def ask(connection: Connection) -> None:
        check(connection.call(request).error_code, f"group {group}")

    cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def end_transaction(
    cluster: Cluster, transactional_id: str, producer: Producer, *, commit: bool, version: int
) -> Producer:
    """Who has the next transaction; to ask again for the same end is no error.

    Raises Fenced, Unavailable (its fate is not known then), Refused: INVALID_TXN_STATE where it ended the other way.
    """
    number = _END_BUMPS_FROM if version >= EPOCH_PER_TRANSACTION else _END_BUMPS_FROM - 1
    request = schema_class(f"end_txn.v{number}.request:EndTxnRequest")(
        transactional_id=transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        committed=commit,
    )

    def ask(connection: Connection) -> Producer:
        answer = connection.call(request)
        check(answer.error_code, f"the {'commit' if commit else 'abort'} of {transactional_id}")
        following = Producer(
            int(getattr(answer, "producer_id", NO_PRODUCER.id)),
            int(getattr(answer, "producer_epoch", NO_PRODUCER.epoch)),
        )
        return producer if following.id == NO_PRODUCER_ID else following

    return cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def fence(cluster: Cluster, transactional_id: str) -> None:
    """Abort what is open under this id, prepared or not, and keep whoever had it from going on.

    Raises Refused, Unavailable.
    """
    init_transactional(cluster, transactional_id, timeout_ms=_BRIEFLY_MS)


# Looking


def describe_transaction(cluster: Cluster, transactional_id: str) -> TransactionInfo | None:
    """None where the id is not known, or nothing was done with it yet. Raises Refused, Unavailable."""
    request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
        transactional_ids=(transactional_id,)
    )

    def ask(connection: Connection) -> TransactionInfo | None:
        listed = {each.transactional_id: each for each in _listed(connection)}
        if transactional_id not in listed or listed[transactional_id].transaction_state == _EMPTY:
            return None
        (told,) = connection.call(request).transaction_states
        if told.error_code is ErrorCode.transactional_id_not_found:
            return None
        check(told.error_code, f"transactional id {transactional_id}")
        return _info(told)

    return cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def list_transactions(cluster: Cluster, prefix: str = "", states: tuple[str, ...] = ()) -> dict[str, str]:
    """The states of all transactional ids that begin so, by id, as all coordinators know them together.

    Only those in one of `states` where any are given. One whose coordinator changes while this is asked may be left
    out. Raises Refused, Unavailable.
    """
    return {
        str(each.transactional_id): str(each.transaction_state)
        for told in cluster.call_every_node(lambda connection: _listed(connection, states))
        for each in told
        if str(each.transactional_id).startswith(prefix)
    }


def open_transactions(cluster: Cluster) -> list[TransactionInfo]:
    """All that have begun and not ended, oldest first. Raises Refused, Unavailable."""

    def ask(connection: Connection) -> list[TransactionInfo]:
        names = tuple(each.transactional_id for each in _listed(connection, _OPEN))
        if not names:
            return []
        request = schema_class("describe_transactions.v0.request:DescribeTransactionsRequest")(
            transactional_ids=names
        )
        told = connection.call(request).transaction_states
        return [_info(each) for each in told if each.transaction_state in _OPEN]

    found = (each for some in cluster.call_every_node(ask) for each in some)
    return sorted(found, key=lambda each: (each.start_ms, each.transactional_id))


def holder(cluster: Cluster, transactional_id: str) -> Producer | None:
    """Who has the id now, whether a transaction is open or not; None where it is not known.

    Raises Refused, Unavailable.
    """
    name = transactional_id.encode()
    body = b"\x02" + encode_uvarint(len(name) + 1) + name + b"\x00"

    def ask(connection: Connection) -> Producer | None:
        answer = connection.call_raw(_DESCRIBE_TRANSACTIONS, 0, [body])
        try:
            code, producer = _described(answer)
        except (MalformedFrame, struct.error):
            connection.close()
            raise Unavailable(f"{connection.peer} does not describe {transactional_id}") from None
        if code is ErrorCode.transactional_id_not_found:
            return None
        check(code, f"transactional id {transactional_id}")
        return producer

    return cluster.call_coordinator(Coordinates.TRANSACTION, transactional_id, ask)


def _described(answer: memoryview) -> tuple[ErrorCode, Producer]:
    """By hand: an id without a transaction has no time at which it began, which the schema's reader does not take."""
    (code,) = _ERROR.unpack_from(answer, _FIRST_AT)
    position = _FIRST_AT + _ERROR.size
    for _ in ("id", "state"):
        length, position = read_uvarint(answer, position, len(answer))
        position += length - 1
    producer_id, epoch = _HOLDER.unpack_from(answer, position + _TIMES_BYTES)
    return code_of(code), Producer(producer_id, epoch)


def _listed(connection: Connection, states: tuple[str, ...] = ()) -> tuple[Any, ...]:
    request = schema_class("list_transactions.v1.request:ListTransactionsRequest")(
        state_filters=states, producer_id_filters=(), duration_filter=-1
    )
    answer = connection.call(request)
    check(answer.error_code, f"the transactions that {connection.peer} coordinates")
    return tuple(answer.transaction_states)


def _info(told: Any) -> TransactionInfo:
    return TransactionInfo(
        transactional_id=str(told.transactional_id),
        state=str(told.transaction_state),
        producer=Producer(int(told.producer_id), int(told.producer_epoch)),
        timeout_ms=int(told.transaction_timeout / timedelta(milliseconds=1)),
        start_ms=int(told.transaction_start_time.timestamp() * 1000),
        partitions=tuple(
            sorted((str(topic.topic), int(index)) for topic in told.topics for index in topic.partitions)
        ),
    )
