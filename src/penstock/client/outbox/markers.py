"""Markers: what a shard has published last, told in the same Kafka transaction as the messages themselves. Pure.

They are in a compacted topic, one key for each shard of each sharding. A row is named by its id and by a fingerprint
of its message id, so that a database that gives an id a second time (one that was restored, or made anew) does not
lose the row that has it then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.outbox.errors import OutboxError
from penstock.client.outbox.rows import Row, fingerprint

__all__ = ["MARKER_SETTINGS", "Marker", "check_name", "marker_topic", "transactional_id"]

MARKER_SETTINGS: Final = {"cleanup.policy": "compact"}
SHARDS_MAX: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise OutboxError(
            f"{name!r} is no name of an outbox: 1 to 100 letters, digits, full stops, hyphens and underscores"
        )
    return name


def marker_topic(name: str) -> str:
    return f"penstock.outbox.{name}"


def transactional_id(name: str, shards: int, shard: int) -> str:
    return f"penstock-outbox-{name}-{shards}-{shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The rows of one batch, and whose they are."""

    #: Of the database.
    identity: str
    shards: int
    shard: int
    #: Fingerprints by id.
    rows: Mapping[int, str]

    @classmethod
    def of(cls, rows: Iterable[Row], *, identity: str, shards: int, shard: int) -> Marker:
        told = {row.id: fingerprint(row.message_id) for row in rows}
        return cls(identity=identity, shards=shards, shard=shard, rows=told)

    @property
    def key(self) -> bytes:
        return b"%d/%d" % (self.shards, self.shard)

    def to_bytes(self) -> bytes:
        document = {
            "version": 1,
            "identity": self.identity,
            "shards": self.shards,
            "shard": self.shard,
            "rows": {str(number): told for number, told in self.rows.items()},
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Marker:
        """Raises ValueError."""
        document: Any = json.loads(data)
        try:
            if document["version"] != 1:
                raise ValueError(f"version {document['version']!r} of markers is newer than this program")
            rows = {int(number): str(told) for number, told in document["rows"].items()}
            shards, shard = int(document["shards"]), int(document["shard"])
            return cls(identity=str(document["identity"]), shards=shards, shard=shard, rows=rows)
        except (TypeError, KeyError, AttributeError) as flaw:
            raise ValueError(f"no marker: {flaw!r}") from None
