"""Runs a script of transaction operations and writes down everything that comes of each.

A line that starts with `>` is an operation; the lines below it are what is stored, the replies given and the markers
handed out. `at` moves the clock, and timeouts happen on the way. `restart` loads a new shard from the records. Names
in capitals are producers of the transactional id `x`: each remembers the producer id and epoch it was last given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from penstock.protocol.errors import ErrorCode
from penstock.transactions.messages import (
    AddPartitionsReply,
    AddPartitionsRequest,
    EndTxnReply,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    ListTransactionsFilters,
    MarkersPosition,
    MarkersReply,
    NeedsProducerId,
    TopicPartition,
    TransactionConfig,
    TransactionMarkers,
    TransactionResult,
)
from penstock.transactions.transaction import NO_PRODUCER, ProducerIdAndEpoch, TransactionMetadata
from penstock.transactions.transaction_log import decode_key, decode_transaction, encode_transaction
from penstock.transactions.transaction_shard import TransactionCoordinatorShard

Plain = list[str]
Named = dict[str, str]


class Script:
    def __init__(self) -> None:
        self.settings = TransactionConfig(two_phase_enabled=True)
        self.version = 2
        self.now_ms = 0
        self.log: list[tuple[bytes, bytes | None]] = []
        self.producers: dict[str, ProducerIdAndEpoch] = {}
        self.markers: dict[str, TransactionMarkers] = {}
        self.position: MarkersPosition | None = None
        self.fresh_producer_id = 1000
        self._verbs: dict[str, Callable[[Plain, Named], Iterator[str]]] = {
            "set": self._set,
            "init": self._init,
            "add": self._add,
            "verify": self._verify,
            "end": self._end,
            "markers": self._markers,
            "written": self._written,
            "epoch": self._epoch,
            "at": self._at,
            "clock": self._clock,
            "restart": self._restart,
            "describe": self._describe,
            "list": self._list,
        }
        self._load()

    def run(self, line: str) -> list[str]:
        verb, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        return list(self._verbs[verb](plain, named))

    # Operations

    def _set(self, _: Plain, named: Named) -> Iterator[str]:
        """`set version=1` is the cluster's level; the rest are settings."""
        self.version = int(named.pop("version", self.version))
        assert set(named) <= {field.name for field in fields(TransactionConfig)}, named
        self.settings = replace(self.settings, **{name: int(value) for name, value in named.items()})
        self.shard.settings = self.settings
        yield from ()

    def _init(self, plain: Plain, named: Named) -> Iterator[str]:
        """`init A`; `again` says who it was before, `keep` and `two-phase` are KIP-939's."""
        name, *flags = plain
        claim = self._as(name, named) if "again" in flags else NO_PRODUCER
        request = InitProducerIdRequest(
            transactional_id=named.get("id", "x"),
            timeout_ms=int(named.get("timeout", "60000")),
            producer_id=claim.id,
            epoch=claim.epoch,
            enable_two_phase="two-phase" in flags,
            keep_prepared="keep" in flags,
        )
        yield from self._with_id(
            lambda fresh: self.shard.init_producer_id(
                request, name, now_ms=self.now_ms, fresh_producer_id=fresh
            )
        )

    def _add(self, plain: Plain, named: Named) -> Iterator[str]:
        work = self.shard.add_partitions(self._add_request(plain, named), plain[0], now_ms=self.now_ms)
        yield from self._apply(work)

    def _verify(self, plain: Plain, named: Named) -> Iterator[str]:
        yield from self._apply(self.shard.verify_partitions(self._add_request(plain, named), plain[0]))

    def _add_request(self, plain: Plain, named: Named) -> AddPartitionsRequest:
        name, *places = plain
        return AddPartitionsRequest(
            named.get("id", "x"),
            *self._as(name, named),
            partitions=tuple(_place(word) for word in places),
            transaction_version=int(named.get("v", "2")),
        )

    def _end(self, plain: Plain, named: Named) -> Iterator[str]:
        name, verdict = plain
        assert verdict in ("commit", "abort")
        request = EndTxnRequest(
            named.get("id", "x"),
            *self._as(name, named),
            commit=verdict == "commit",
            transaction_version=int(named.get("v", "2")),
        )
        yield from self._with_id(
            lambda fresh: self.shard.end(request, name, now_ms=self.now_ms, fresh_producer_id=fresh)
        )

    def _markers(self, plain: Plain, _: Named) -> Iterator[str]:
        """`markers lost` forgets the answer, as one that never arrives."""
        before = self.position
        yield from self._apply(self.shard.next_markers(self.position, "writer"))
        if "lost" in plain:
            self.position = before

    def _written(self, plain: Plain, named: Named) -> Iterator[str]:
        """All markers of the id that were handed out last, or those for some partitions."""
        markers = self.markers[named.get("id", "x")]
        partitions = tuple(_place(word) for word in plain) or markers.partitions
        yield from self._apply(self.shard.markers_written(markers, partitions, "writer", now_ms=self.now_ms))

    def _epoch(self, plain: Plain, _: Named) -> Iterator[str]:
        """Pretend that many epochs were used."""
        name, epoch = plain
        current = self.shard.transactions["x"]
        self.producers[name] = ProducerIdAndEpoch(current.producer.id, int(epoch))
        yield from self._apply(
            TransactionResult(records=(encode_transaction(current._replace(producer=self.producers[name])),))
        )

    def _at(self, plain: Plain, _: Named) -> Iterator[str]:
        until_ms = int(plain[0])
        while (deadline_ms := self.shard.next_deadline_ms()) is not None and deadline_ms <= until_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            for line in self._apply(self.shard.tick(self.now_ms)):
                yield f"at {self.now_ms}: {line}"
        self.now_ms = until_ms

    def _clock(self, plain: Plain, _: Named) -> Iterator[str]:
        self.now_ms += int(plain[0])
        self.shard.clock_moved(int(plain[0]))
        yield from ()

    def _restart(self, _: Plain, __: Named) -> Iterator[str]:
        before = self.shard.transactions
        self._load()
        assert self.shard.transactions == before
        yield from ()

    def _describe(self, plain: Plain, _: Named) -> Iterator[str]:
        found = self.shard.describe(plain[0])
        if found.error is not ErrorCode.none:
            yield found.error.name.upper()
            return
        yield (
            f"{found.state} {found.producer_id}:{found.epoch} timeout {found.timeout_ms} "
            f"since {found.start_timestamp_ms} in {_places(found.partitions)}"
        )

    def _list(self, _: Plain, named: Named) -> Iterator[str]:
        filters = ListTransactionsFilters(
            states=frozenset(named["states"].split(",")) if "states" in named else frozenset(),
            producer_ids=frozenset(map(int, named["ids"].split(","))) if "ids" in named else frozenset(),
            duration_ms=int(named.get("duration", "-1")),
            matches_id=re.compile(named["pattern"]).fullmatch if "pattern" in named else None,
        )
        reply = self.shard.list_transactions(filters, now_ms=self.now_ms)
        for found in reply.transactions:
            yield f"{found.transactional_id} {found.producer_id} {found.state}"
        if reply.unknown_states:
            yield f"unknown states {', '.join(reply.unknown_states)}"

    # Inside

    def _load(self) -> None:
        self.shard = TransactionCoordinatorShard(self.settings, transaction_version=lambda: self.version)
        for key, value in self.log:
            self.shard.replay(key, value)
        assert not list(self._apply(self.shard.loaded(self.now_ms)))

    def _as(self, name: str, named: Named) -> ProducerIdAndEpoch:
        """`as=1000:3` speaks as somebody else."""
        if "as" in named:
            producer_id, epoch = named["as"].split(":")
            return ProducerIdAndEpoch(int(producer_id), int(epoch))
        return self.producers[name]

    def _with_id(self, operation: Callable[[int | None], TransactionResult]) -> Iterator[str]:
        work = operation(None)
        if any(isinstance(reply, NeedsProducerId) for _, reply in work.replies):
            assert not work.records
            work = operation(self.fresh_producer_id)
            self.fresh_producer_id += 1
        yield from self._apply(work)

    def _apply(self, work: TransactionResult) -> Iterator[str]:
        for key, value in work.records:
            self.log.append((key, value))
            self.shard.replay(key, value)
            yield f"store {_stored(key, value)}"
        for token, reply in work.replies:
            yield from self._reply(str(token), reply)

    def _reply(self, name: str, reply: object) -> Iterable[str]:
        match reply:
            case InitProducerIdReply(error=ErrorCode.none) | EndTxnReply(error=ErrorCode.none):
                self.producers[name] = ProducerIdAndEpoch(reply.producer_id, reply.epoch)
                kept = (
                    f", keeps {reply[3]}:{reply[4]}"
                    if isinstance(reply, InitProducerIdReply) and reply[3] >= 0
                    else ""
                )
                yield f"{name} is {reply.producer_id}:{reply.epoch}{kept}"
            case InitProducerIdReply() | EndTxnReply():
                yield f"{name}: {reply.error.name.upper()}"
            case AddPartitionsReply():
                errors = {place: error.name.upper() for place, error in reply.partitions}
                one = set(errors.values()) | {reply.error.name.upper()}
                each = ", ".join(f"{_place_name(place)} {error}" for place, error in errors.items())
                yield f"{name}: {one.pop() if len(one) == 1 else each}"
            case MarkersReply():
                self.position = reply.position
                for markers in reply.markers:
                    self.markers[markers.transactional_id] = markers
                    yield f"{name}: {_marker(markers)}"
                if not reply.markers:
                    yield f"{name}: no markers"
            case None:
                pass


def _stored(key: bytes, value: bytes | None) -> str:
    transactional_id = decode_key(key)
    assert transactional_id is not None
    if value is None:
        return f"{transactional_id}: gone"
    found: TransactionMetadata = decode_transaction(transactional_id, value)
    words = [f"{found.state!r} {found.producer.id}:{found.producer.epoch}"]
    if found.successor:
        words.append(f"then {found.successor.id}:{found.successor.epoch}")
    if found.predecessor.epoch >= 0:
        words.append(f"after {found.predecessor.id}:{found.predecessor.epoch}")
    if found.partitions:
        words.append(f"in {_places(sorted(found.partitions))}")
    return f"{transactional_id}: {' '.join(words)}"


def _marker(markers: TransactionMarkers) -> str:
    verdict = "commit" if markers.committed else "abort"
    producer = f"{markers.producer_id}:{markers.epoch}"
    return f"{verdict} {markers.transactional_id} {producer} in {_places(markers.partitions)}"


def _place(word: str) -> TopicPartition:
    topic, _, partition = word.rpartition("-")
    return TopicPartition(topic, int(partition))


def _place_name(place: TopicPartition) -> str:
    return f"{place.topic}-{place.partition}"


def _places(places: Iterable[TopicPartition]) -> str:
    return " ".join(map(_place_name, places)) or "-"
