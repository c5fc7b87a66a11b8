"""One dead letter: a record, where it lies, and what its headers tell. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from penstock.client.letters import Failure, Header, Origin, failure_in, origin_of, restored
from penstock.protocol.letters import EDITED_FROM, GROUP, HANDLER, WITHOUT_RECORD
from penstock.protocol.records import Record

_SPOT: Final = re.compile(r"(?P<partition>\d{1,9}):(?P<offset>\d{1,18})")


class Spot(NamedTuple):
    """Where a letter lies in its topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def parse_spot(text: str) -> Spot | None:
    """None for what is no PARTITION:OFFSET."""
    found = _SPOT.fullmatch(text)
    return None if found is None else Spot(int(found["partition"]), int(found["offset"]))


class Letter(NamedTuple):
    topic: str
    partition: int
    record: Record

    @property
    def spot(self) -> Spot:
        return Spot(self.partition, self.record.offset)

    @property
    def timestamp_ms(self) -> int:
        """When it became a dead letter."""
        return self.record.timestamp

    @property
    def origin(self) -> Origin | None:
        """None where it does not tell where it is from."""
        found = origin_of(
            self.record.headers, topic="", partition=0, offset=0, timestamp_ms=self.record.timestamp
        )
        return found if found.topic else None

    @property
    def attempts(self) -> int:
        origin = self.origin
        return 0 if origin is None else origin.attempts

    @property
    def failure(self) -> Failure:
        return failure_in(self.record.headers) or Failure(error_class="", message="", reason="")

    @property
    def group(self) -> str | None:
        return self.header(GROUP)

    @property
    def handler(self) -> str | None:
        return self.header(HANDLER)

    @property
    def edited_from(self) -> Spot | None:
        return parse_spot(self.header(EDITED_FROM) or "")

    @property
    def has_record(self) -> bool:
        """Some tell only that there was one: brokers may be set not to bring it along, or could not."""
        is_empty = self.record.key is None and self.record.value is None
        return self.header(WITHOUT_RECORD) is None and not (is_empty and self.origin is not None)

    @property
    def own_headers(self) -> list[Header]:
        """The record's, as they were before it failed."""
        return restored(self.record.headers)

    def header(self, name: str) -> str | None:
        """The last one of that name, as text."""
        for key, value in reversed(self.record.headers):
            if key == name and value is not None:
                return value.decode(errors="replace")
        return None
