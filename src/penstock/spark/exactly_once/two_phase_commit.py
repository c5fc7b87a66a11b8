"""The driver's end of an exactly-once write: decide, commit what was decided, abort everything else.

Every step may be the last one that a driver takes, and every step may be taken again:

1. Take the turn (`decisions.Ledger`): an older driver cannot decide any more.
2. Look up the last decision. If it is about this batch, it stands, whoever made it.
3. Otherwise decide: these transactions, and no others, are the batch.
4. Commit them.
5. Abort all other transactions that were begun for the batch: attempts that lost, and what dead drivers left behind.

Until there is a decision nobody aborts what others have prepared, because they might decide for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import Refused
from penstock.client.prepared import Prepared, end_prepared
from penstock.client.sequencing import Producer
from penstock.client.transactions import (
    describe_transaction,
    end_transaction,
    fence,
    holder,
    list_transactions,
)
from penstock.spark.decisions import (
    NOT_IN_NAMES,
    Decision,
    Ledger,
    MicroBatch,
    SinkError,
    driver_name,
    last_mark,
    overtaken,
    own,
    owner,
)

_LOG: Final = logging.getLogger("penstock.spark")
_ONGOING: Final = "Ongoing"
_EMPTY: Final = "Empty"
_SLOTS: Final = 2
#: No query has it in its name, so that no name of one is the beginning of what belongs to another.
_BETWEEN: Final = NOT_IN_NAMES


def attempts_prefix(batch: MicroBatch) -> str:
    """How the transactional ids of all attempts at a batch begin.

    They are used again two batches later, lest brokers gather ids without end: then the batch in between is decided,
    so all that was done for this one has ended.
    """
    return f"{_attempts(batch.query)}{batch.number % _SLOTS}{_BETWEEN}"


def _attempts(query: str) -> str:
    return driver_name(query) + _BETWEEN


def query_of(transactional_id: str) -> str | None:
    """Whose batches an id is for; None where it is no id of a sink."""
    name, _, _ = transactional_id.partition(_BETWEEN)
    query = name.removeprefix(driver_name(""))
    return query if query != name else None


def conclude(
    ledger: Ledger,
    batch: MicroBatch,
    prepared: Sequence[Prepared],
    *,
    fails_on_loss: bool = True,
    skips_older: bool = False,
) -> bool:
    """Returns whether these were written, rather than what somebody had decided for before.

    Raises SinkError where another driver has gone on (unless what is older than that is skipped), or transactions are
    gone; Unavailable where this is to be asked again.
    """
    last = _take(ledger, batch)
    if last is not None and last > batch.number:
        _abort(ledger.cluster, prepared)
        if skips_older:
            _LOG.info("%s is older than what was written last, and nothing of it is written", batch)
            return False
        raise overtaken(batch)
    is_ours = last != batch.number
    if is_ours:
        decision = Decision(batch=batch, transactions=tuple(each for each in prepared if not each.is_empty))
        _check_open(ledger.cluster, decision)
        ledger.decide(decision)
    else:
        found = ledger.last()
        assert found is not None
        assert found.batch == batch, f"{found} is not about {batch}"
        decision = found
        _LOG.info("%s was decided before, and is finished now", batch)
    _commit(ledger, decision, fails_on_loss=fails_on_loss)
    _abort(ledger.cluster, [each for each in prepared if each.transactional_id not in decision.names])
    sweep(ledger, decision)
    return is_ours


def withdraw(ledger: Ledger, batch: MicroBatch, prepared: Sequence[Prepared]) -> None:
    """A batch has failed: abort its transactions, unless they were decided for. Raises Unavailable, Refused."""
    last = _take(ledger, batch)
    if last == batch.number:
        found = ledger.last()
        assert found is not None
        prepared = [each for each in prepared if each.transactional_id not in found.names]
    _abort(ledger.cluster, prepared)


def _take(ledger: Ledger, batch: MicroBatch) -> int | None:
    """The last batch that is decided. Whoever is late by then does not take the turn from those who have gone on."""
    mark = last_mark(ledger.cluster, batch.query, stable=False)
    return mark.number if mark is not None and mark.number > batch.number else ledger.take()


def finish_before(cluster: Cluster, batch: MicroBatch, checkpoint: str | None = None) -> None:
    """Commit what was decided before this batch, for those who need not repeat a batch before they go on to the next.

    Raises Unavailable, Refused, SinkError.
    """
    mark = last_mark(cluster, batch.query, stable=True)
    if mark is None and checkpoint is not None:
        succeed(cluster, checkpoint, batch.query)
    if mark is None or mark.number >= batch.number:
        return
    with Ledger(cluster, batch.query) as ledger:
        last = ledger.last()
        if last is not None and last.batch.number < batch.number:
            _commit(ledger, last, fails_on_loss=True)


def succeed(cluster: Cluster, checkpoint: str, query: str) -> None:
    """Before its first batch: settle what the query has left that had this checkpoint before.

    That one will not run again, for Spark finds another query in its checkpoint. Nobody else would end what it has
    prepared, and those who read what is committed would wait for ever. Raises Unavailable, Refused, SinkError.
    """
    last = owner(cluster, checkpoint)
    if last == query:
        return
    if last is not None:
        _LOG.warning(
            "query %s takes the place of %s, whose checkpoint was deleted (%s)", query, last, checkpoint
        )
        settle(cluster, last)
    own(cluster, checkpoint, query)


def settle(cluster: Cluster, query: str) -> None:
    """For a query that does not run: finish its last batch if that is decided, and abort all else.

    Should it run again, it finds the decision, or writes the batch anew.

    Raises Unavailable, Refused, SinkError.
    """
    with Ledger(cluster, query) as ledger:
        ledger.take()
        last = ledger.last()
        if last is not None:
            _commit(ledger, last, fails_on_loss=True)
        kept = last.names if last is not None else frozenset()
        for name in _begun(cluster, _attempts(query), kept):
            fence(cluster, name)


# Before the decision


def _check_open(cluster: Cluster, decision: Decision) -> None:
    """What has timed out is better found now, when the batch can still be written again."""
    if not decision.transactions:
        return
    listed = list_transactions(cluster, attempts_prefix(decision.batch), (_ONGOING,))
    gone = [
        each
        for each in decision.transactions
        if each.transactional_id not in listed and not _is_open(cluster, each)
    ]
    if gone:
        raise SinkError(
            f"{decision.batch}: {len(gone)} of {len(decision.transactions)} transactions were aborted before they "
            "could be committed, as they were open for longer than brokers allow (transaction.max.timeout.ms; no limit "
            "with transaction.two.phase.commit.enable=true); nothing of the batch is written"
        )


def _is_open(cluster: Cluster, prepared: Prepared) -> bool:
    """As its own coordinator says, should it have moved while all were listed."""
    info = describe_transaction(cluster, prepared.transactional_id)
    expected = Producer(prepared.producer_id, prepared.epoch)
    return info is not None and info.state == _ONGOING and info.producer == expected


# After it


def _commit(ledger: Ledger, decision: Decision, *, fails_on_loss: bool) -> None:
    lost: list[str] = []
    for each in decision.transactions:
        try:
            end_prepared(ledger.cluster, each, commit=True)
        except Refused as error:
            if ledger.last_batch() != decision.batch.number:
                # It was committed by whoever went on, and the id has been used again since.
                raise overtaken(decision.batch) from None
            _LOG.error("%s: what was decided to be written was aborted: %s", decision.batch, error)
            lost += [f"{topic}[{partition}]" for topic, partition in each.partitions]
    if lost and fails_on_loss:
        raise SinkError(
            f"{decision.batch} was decided, but a part of it was aborted before it could be committed: rows for "
            f"{', '.join(sorted(set(lost)))} are lost. The driver was away for longer than brokers keep transactions "
            "open (transaction.max.timeout.ms; no limit with transaction.two.phase.commit.enable=true). "
            "With failOnDataLoss=false the query goes on without them"
        )


def _abort(cluster: Cluster, prepared: Sequence[Prepared]) -> None:
    for each in prepared:
        # It may have ended already, in the same way or because its time was up.
        with suppress(Refused):
            end_prepared(cluster, each, commit=False)


def sweep(ledger: Ledger, decision: Decision) -> None:
    """Abort all that was begun for the batch and not decided for, so that readers need not wait for it.

    An attempt takes its id first and looks for a decision next. So one that is not in this list will find the decision,
    which is there before the list is made; and one that is in it cannot write once it has been found here. Ids are
    ended by the epoch that they had when it was certain that no later batch used them.
    """
    batch = decision.batch
    if ledger.last_batch() != batch.number:
        return
    names = _begun(ledger.cluster, attempts_prefix(batch), decision.names)
    holders = {name: found for name in names if (found := holder(ledger.cluster, name)) is not None}
    if not holders or ledger.last_batch() != batch.number:
        return
    for name, producer in holders.items():
        with suppress(Refused):
            end_transaction(ledger.cluster, name, producer, commit=False, version=ledger.transaction_version)


def _begun(cluster: Cluster, prefix: str, kept: frozenset[str]) -> list[str]:
    return sorted(list_transactions(cluster, prefix, (_ONGOING, _EMPTY)).keys() - kept)
