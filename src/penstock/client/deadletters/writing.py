"""Records and what the list says of their letters, in one transaction: both are there, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, NamedTuple

from penstock.client.deadletters import marks
from penstock.client.deadletters.letter import Letter
from penstock.client.deadletters.marks import Mark
from penstock.client.deadletters.placing import partition_of
from penstock.client.deadletters.routing import Outgoing
from penstock.client.errors import ClientError, RecordsRefused
from penstock.client.letters import replayed_topic
from penstock.client.metadata import Place, TopicInfo
from penstock.client.producing import RawProducer
from penstock.client.sequencing import Delivery
from penstock.protocol.compression import Codec
from penstock.protocol.records import Record, encode_batch

#: Topics take batches of a megabyte unless they are set otherwise.
_BATCH_BYTES_MAX: Final = 256 << 10
_RECORD_OVERHEAD_BYTES: Final = 40
#: What one transaction holds at most.
ENTRIES_MAX: Final = 500
BYTES_MAX: Final = 8 << 20


class Entry(NamedTuple):
    """A letter, what becomes of it, and what is published for it, if anything."""

    letter: Letter
    mark: Mark
    out: Outgoing | None = None

    @property
    def size_bytes(self) -> int:
        return size_of(self.letter.record)


class Refusal(NamedTuple):
    entry: Entry
    reason: str


class Desk:
    """Writes for whoever has the turn."""

    def __init__(self, producer: RawProducer, letters: TopicInfo, done: TopicInfo) -> None:
        assert done.name == replayed_topic(letters.name)
        self._producer = producer
        self._topic_id = letters.id
        self._done = done

    def write(self, entries: Sequence[Entry]) -> list[Refusal]:
        """All of them, but for those that a topic does not take; these stay as they were.

        Raises Fenced, Unavailable (then the next who takes the turn will know what became of them), Refused.
        """
        try:
            self.write_all(entries)
            return []
        except RecordsRefused as error:
            if len(entries) == 1:
                return [Refusal(entries[0], str(error))]
        # One of them is too large, or a topic wants keys: each for itself, so that the others get through.
        return [refusal for entry in entries for refusal in self.write([entry])]

    def write_all(self, entries: Sequence[Entry]) -> list[Delivery]:
        """Returns where what was published is. Raises RecordsRefused too, and nothing is written then."""
        try:
            sent = self._send(_by_place(entry.out for entry in entries if entry.out is not None))
            self._send(_by_place(self._noted(entry) for entry in entries))
            self._producer.end(commit=True)
            return sent
        except RecordsRefused:
            self._producer.end(commit=False)
            raise
        except ClientError:
            # Readers need not wait until its time is up; whoever has the turn next settles it in any case.
            with suppress(ClientError):
                self._producer.end(commit=False)
            raise

    def _noted(self, entry: Entry) -> Outgoing:
        key = marks.key_of(entry.letter.spot)
        at_ms = entry.mark.at_ms or 0
        record = Record(0, at_ms, key=key, value=marks.value_of(entry.mark, self._topic_id))
        return Outgoing(self._done.name, partition_of(key, len(self._done.partitions)), record)

    def _send(self, wanted: dict[Place, list[Record]]) -> list[Delivery]:
        cut = ((place, batch) for place, found in wanted.items() for batch in _batches(found))
        sent = [self._producer.send(*place, _encoded(batch)) for place, batch in cut]
        self._producer.flush()
        return sent


def chunks(entries: Iterable[Entry], entries_max: int) -> Iterator[list[Entry]]:
    """What goes into one transaction each, in order."""
    assert entries_max > 0
    chunk: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        if chunk and (len(chunk) >= entries_max or size_bytes + entry.size_bytes > BYTES_MAX):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(entry)
        size_bytes += entry.size_bytes
    if chunk:
        yield chunk


def size_of(record: Record) -> int:
    """About as many bytes as it takes in a batch."""
    parts = chain((record.key, record.value), *((name, value) for name, value in record.headers))
    return _RECORD_OVERHEAD_BYTES + sum(len(part) for part in parts if part is not None)


def _by_place(wanted: Iterable[Outgoing]) -> dict[Place, list[Record]]:
    found: dict[Place, list[Record]] = {}
    for each in wanted:
        found.setdefault((each.topic, each.partition), []).append(each.record)
    return found


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size_bytes = 0
    for record in records:
        if batch and size_bytes + size_of(record) > _BATCH_BYTES_MAX:
            yield batch
            batch, size_bytes = [], 0
        batch.append(record)
        size_bytes += size_of(record)
    if batch:
        yield batch


def _encoded(batch: Sequence[Record]) -> bytearray:
    """What is large may have come compressed, and be too large otherwise."""
    is_large = sum(map(size_of, batch)) > _BATCH_BYTES_MAX
    numbered = [record._replace(offset=number) for number, record in enumerate(batch)]
    return encode_batch(numbered, codec=Codec.GZIP if is_large else Codec.NONE)
