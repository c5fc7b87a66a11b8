"""From where to where a batch goes, as Spark wrote it into the checkpoint before it began.

Rows alone do not tell: where the last records of a batch are dead letters, or there are none but the marks that
transactions leave, the batch ends behind its last row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from uuid import UUID

from penstock.spark.archive.errors import ArchiveError
from penstock.spark.offsets import Position, begin_of

#: A pipeline's checkpoint has that of its query in a folder.
_FOLDERS: Final = ("query/offsets", "offsets")
#: A version and what Spark says of the batch come first, then a line for each source.
_LINES_BEFORE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Of one topic: start <= offset < end for every partition."""

    topic_id: UUID | None
    starts: Mapping[int, int]
    ends: Mapping[int, int]


def span_of(spark: Any, checkpoint: str, number: int, topic: str) -> Span | None:
    """None where the batch has nothing of the topic. Raises ArchiveError where the checkpoint tells nothing."""
    end = position_at(_read(spark, checkpoint, number))
    if topic not in end.topics:
        return None
    start = Position(end.since) if end.since is not None else _start(spark, checkpoint, number)
    topic_id = end.topics[topic].id
    offsets = end.topics[topic].offsets
    return Span(
        topic_id=topic_id,
        starts={each: begin_of(start, topic, topic_id, each) for each in offsets},
        ends=dict(offsets),
    )


def _start(spark: Any, checkpoint: str, number: int) -> Position:
    return Position({}) if number == 0 else position_at(_read(spark, checkpoint, number - 1))


def position_at(text: str) -> Position:
    """Of the one source that the query has. Raises ArchiveError."""
    lines = text.splitlines()[_LINES_BEFORE:]
    try:
        (told,) = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        raise ArchiveError(f"the checkpoint is none of a query with one source: {text!r}") from None
    return Position.from_json(told)


def _read(spark: Any, checkpoint: str, number: int) -> str:
    for folder in _FOLDERS:
        text = _text(spark, f"{checkpoint}/{folder}/{number}")
        if text is not None:
            return text
    raise ArchiveError(f"the checkpoint {checkpoint} does not tell what batch {number} is")


def _text(spark: Any, path: str) -> str | None:
    local = local_path(path)
    if local is None:
        return _text_by_spark(spark, path)
    try:
        return local.read_text()
    except FileNotFoundError:
        return None


def local_path(path: str) -> Path | None:
    if "://" not in path and not path.startswith("file:"):
        return Path(path)
    return Path(unquote(urlsplit(path).path)) if path.startswith("file:") else None


def _text_by_spark(spark: Any, path: str) -> str | None:
    from pyspark.errors import AnalysisException

    try:
        return "\n".join(row["value"] for row in spark.read.text(path).collect())
    except AnalysisException:
        return None
