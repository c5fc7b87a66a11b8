"""`penstock dlq list` and `show`: find dead letters by topic, by group or by partition and offset, and print them
as tables, pages and JSON.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NamedTuple

from penstock.cli.errors import CommandError
from penstock.cli.output import Cell, note, plural, print_facts, print_json, print_table
from penstock.cli.record_formats import ConsumerRecord, record_document
from penstock.client.deadletters.dead_letter import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterId,
    Resolution,
    ResolutionState,
)
from penstock.client.deadletters.headers import Origin
from penstock.client.deadletters.reader import (
    DeadLetterSummary,
    failure_cause,
    offset_ranges,
    read_dead_letter,
    read_dead_letters,
    read_resolutions,
    summarise,
)
from penstock.client.deadletters.topics import NoDeadLetters, dead_letter_topics, find_dead_letter_topic
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.protocol.dead_letter_headers import HEADER_PREFIXES

TOP_MAX = 3
MESSAGE_CHARS_MAX = 60
HEX_LINE_BYTES = 16
_COLUMNS = ["partition:offset", "given up", "from", "group", "handler", "error", "message", "tries", "state"]


class DeadLetterStatus(NamedTuple):
    letter: DeadLetter
    mark: Resolution | None

    @property
    def state(self) -> str:
        return "waiting" if self.mark is None else self.mark.state.value


# All topics


def print_summaries(found: list[DeadLetterSummary]) -> None:
    columns = ["topic", "waiting", "replayed", "edited", "purged", "oldest", "age", "left", "newest"]
    now_ms = round(time.time() * 1000)
    print_table([*columns, "groups", "errors"], (_summary_row(each, now_ms) for each in found))


def _summary_row(found: DeadLetterSummary, now_ms: int) -> list[Cell]:
    return [
        found.topic,
        found.waiting,
        *(
            found.done[state]
            for state in (ResolutionState.REPLAYED, ResolutionState.EDITED, ResolutionState.PURGED)
        ),
        _time_text(found.oldest_ms),
        None if found.oldest_ms is None else _duration_text(now_ms - found.oldest_ms),
        None if (left_ms := found.oldest_left_ms(now_ms)) is None else _duration_text(left_ms),
        _time_text(found.newest_ms),
        _printable_or_none(", ".join(name or "?" for name, _ in found.groups.most_common(TOP_MAX))),
        _printable_or_none(
            ", ".join(f"{name or '?'} ({count})" for name, count in found.errors.most_common(TOP_MAX))
        ),
    ]


def summary_document(found: DeadLetterSummary) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "letters": found.total,
        "waiting": found.waiting,
        **{state.value: found.done[state] for state in ResolutionState},
        "oldest": found.oldest_ms,
        "oldest_left": found.oldest_left_ms(round(time.time() * 1000)),
        "retention": found.retention_ms,
        "newest": found.newest_ms,
        "groups": dict(found.groups.most_common()),
        "errors": dict(found.errors.most_common()),
    }


# Dead letters


def print_dead_letters(found: Iterable[DeadLetterStatus], *, limit: int, with_topic: bool) -> int:
    """Prints a table of the first `limit`; returns how many there are in all."""
    shown: list[DeadLetterStatus] = []
    count = 0
    for seen in found:
        count += 1
        if len(shown) < limit:
            shown.append(seen)
    if shown:
        columns = ["topic", *_COLUMNS] if with_topic else _COLUMNS
        rows = (
            [seen.letter.topic, *_dead_letter_row(seen)] if with_topic else _dead_letter_row(seen)
            for seen in shown
        )
        print_table(columns, rows)
    return count


def _dead_letter_row(seen: DeadLetterStatus) -> list[Cell]:
    letter, failure = seen.letter, seen.letter.failure
    return [
        str(letter.dead_letter_id),
        _time_text(letter.timestamp_ms),
        _origin_text(letter.origin),
        _printable_or_none(letter.group),
        _printable_or_none(letter.handler),
        _printable_or_none(failure_cause(letter)),
        _printable_or_none(_first_line(failure.message)),
        letter.attempts or None,
        seen.state,
    ]


def _first_line(text: str, *, chars_max: int | None = MESSAGE_CHARS_MAX) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return first if chars_max is None or len(first) <= chars_max else first[: chars_max - 3] + "..."


def _origin_text(origin: Origin | None) -> str | None:
    return None if origin is None else printable(f"{origin.topic} {origin.partition}:{origin.offset}")


def _printable_or_none(text: str | None) -> str | None:
    """None also for an empty text."""
    return printable(text) if text else None


def print_json_lines(found: Iterable[DeadLetterStatus]) -> None:
    for seen in found:
        sys.stdout.write(json.dumps(dead_letter_document(seen), ensure_ascii=False) + "\n")


def dead_letter_document(seen: DeadLetterStatus, *, whole: bool = False) -> dict[str, Any]:
    """A dead letter as `list` shows it; `whole` adds value, headers and stack trace for `show`."""
    letter, mark, origin = seen.letter, seen.mark, seen.letter.origin
    record = _record_document(letter)
    document = {
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.dead_letter_id.offset,
        "timestamp": letter.timestamp_ms,
        "state": seen.state,
        "done_at": None if mark is None else mark.at_ms,
        "done_by": None if mark is None else mark.replay,
        "done_to": None if mark is None else mark.to,
        "origin": None if origin is None else _origin_document(origin),
        "group": letter.group,
        "handler": letter.handler,
        "error": letter.failure.error_class or None,
        "message": letter.failure.message or None,
        "reason": letter.failure.reason or None,
        "attempts": letter.attempts,
        "edited_from": None if letter.edited_from is None else str(letter.edited_from),
        "has_record": letter.has_record,
        "key": record["key"],
    }
    if whole:
        document |= {
            "value": record["value"],
            "headers": record["headers"],
            "stack": letter.failure.stack or None,
        }
    return document


def _origin_document(origin: Origin) -> dict[str, Any]:
    return {
        "topic": origin.topic,
        "partition": origin.partition,
        "offset": origin.offset,
        "timestamp": origin.timestamp_ms,
    }


def _record_document(letter: DeadLetter) -> dict[str, Any]:
    record = letter.record
    return record_document(
        ConsumerRecord(
            letter.topic,
            letter.partition,
            record.offset,
            record.timestamp,
            record.key,
            record.value,
            [(name.encode(errors="replace").decode(), value) for name, value in letter.own_headers],
        )
    )


# One dead letter


def print_dead_letter(seen: DeadLetterStatus) -> None:
    letter = seen.letter
    print_facts(_dead_letter_facts(seen))
    headers = [(name, value) for name, value in letter.record.headers if not name.startswith(HEADER_PREFIXES)]
    if headers:
        print()
        print_table(["header", "value"], ([printable(name), short_text(value)] for name, value in headers))
    print()
    print("\n".join(value_lines(letter.record.value)))
    # A message of several lines is printed in full here, unless the stack trace contains it, as it usually does.
    message, stack = letter.failure.message.strip(), letter.failure.stack.rstrip()
    for text in ("" if message in stack or "\n" not in message else message, stack):
        if text:
            print(f"\n{printable(text)}")


def _dead_letter_facts(seen: DeadLetterStatus) -> Iterator[tuple[str, Cell]]:
    letter, failure, origin, mark = seen.letter, seen.letter.failure, seen.letter.origin, seen.mark
    yield "dead letter", f"{letter.topic} {letter.dead_letter_id}"
    yield "given up", _time_text(letter.timestamp_ms)
    yield "from", _origin_text(origin)
    yield "published", None if origin is None else _time_text(origin.timestamp_ms)
    yield "group", _printable_or_none(letter.group)
    if letter.handler is not None:
        yield "handler", _printable_or_none(letter.handler)
    yield "tries", letter.attempts
    yield "reason", _printable_or_none(failure.reason)
    yield "error", _printable_or_none(failure.error_class)
    yield "message", _printable_or_none(_first_line(failure.message, chars_max=None))
    if letter.edited_from is not None:
        yield "edited from", str(letter.edited_from)
    yield "state", _state_text(seen.state, mark)
    yield "key", short_text(letter.record.key)
    if not letter.has_record:
        yield "record", "not included"


def _state_text(state: str, mark: Resolution | None) -> str:
    if mark is None:
        return state
    at = f" {_time_text(mark.at_ms)}" if mark.at_ms else ""
    to = f" to {mark.to}" if mark.to and mark.state is ResolutionState.REPLAYED else ""
    by = f" by {mark.replay}" if mark.replay else ""
    return f"{state}{at}{to}{by}"


def short_text(data: bytes | None) -> str | None:
    """Printable text of one line as it is, other bytes in hexadecimal."""
    if data is None:
        return None
    text = _printable_text(data)
    return text if text is not None and "\n" not in text else f"0x{data.hex()}"


def value_lines(value: bytes | None) -> list[str]:
    """JSON indented, text as it is, anything else in hexadecimal."""
    if value is None:
        return ["(no value)"]
    text = _printable_text(value)
    if text is None:
        return list(_hex_lines(value))
    try:
        document = json.loads(text)
    except ValueError:
        return text.splitlines() or ["(empty)"]
    return json.dumps(document, indent=2, ensure_ascii=False).splitlines()


def printable(text: str) -> str:
    """Replaces control characters that could disturb the terminal: the text may come from any producer."""
    encodable = text.encode(errors="replace").decode()
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in encodable)


def _printable_text(data: bytes) -> str | None:
    """None for bytes that are not UTF-8 or contain control characters, which could disturb the terminal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None


def _hex_lines(data: bytes) -> Iterator[str]:
    for at in range(0, len(data), HEX_LINE_BYTES):
        part = data[at : at + HEX_LINE_BYTES]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{at:08x}  {part.hex(' '):<{3 * HEX_LINE_BYTES}} {shown}"


def _duration_text(length_ms: int) -> str:
    """The length in its largest full unit: 29d, 5h, 12m."""
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if length_ms >= unit_ms:
            return f"{length_ms // unit_ms}{unit}"
    return f"{max(length_ms, 0) // 1000}s"


def _time_text(moment_ms: int | None) -> str | None:
    if moment_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(moment_ms)  # producers can write any timestamp
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def print_topics(cluster: Cluster, wanted: DeadLetterFilter, *, only_waiting: bool, as_json: bool) -> None:
    found = [summarise(cluster, topic, wanted) for topic in dead_letter_topics(cluster).values()]
    if not wanted.is_empty:
        found = [each for each in found if each.total]
    if only_waiting:
        found = [each for each in found if each.waiting]
    if as_json:
        print_json([summary_document(each) for each in found])
    elif found:
        print_summaries(found)
    else:
        note("no dead letters match" if only_waiting or not wanted.is_empty else "no dead letters yet")


def print_matching(
    cluster: Cluster,
    names: Sequence[str],
    wanted: DeadLetterFilter,
    *,
    only_waiting: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    chosen = _select_topics(cluster, names, wanted)
    found = _read_statuses(cluster, chosen, only_waiting=only_waiting)
    if as_json:
        print_json_lines(islice(found, limit))
        return
    assert limit is not None
    count = print_dead_letters(found, limit=limit, with_topic=len({topic.name for topic, _ in chosen}) > 1)
    if not count:
        note("no dead letters match" if only_waiting or not wanted.is_empty else "no dead letters")
    elif count > limit:
        note(f"{plural(count - limit, 'dead letter')} more; --limit {count} shows all")


def _select_topics(
    cluster: Cluster, names: Sequence[str], wanted: DeadLetterFilter
) -> list[tuple[TopicInfo, DeadLetterFilter]]:
    """A name that is not a topic may be a group, whose dead letters can be in any topic."""
    chosen: list[tuple[TopicInfo, DeadLetterFilter]] = []
    for name in names:
        try:
            chosen.append((find_dead_letter_topic(cluster, name), wanted))
        except NoDeadLetters:
            of_group = _topics_of_group(cluster, name, wanted)
            if not of_group:
                raise
            chosen += of_group
    return chosen


def _topics_of_group(
    cluster: Cluster, group: str, wanted: DeadLetterFilter
) -> list[tuple[TopicInfo, DeadLetterFilter]]:
    narrowed = replace(wanted, groups=(group,))
    return [
        (topic, narrowed)
        for topic in dead_letter_topics(cluster).values()
        if summarise(cluster, topic, DeadLetterFilter(groups=(group,))).total
    ]


def _read_statuses(
    cluster: Cluster, chosen: Sequence[tuple[TopicInfo, DeadLetterFilter]], *, only_waiting: bool
) -> Iterator[DeadLetterStatus]:
    for topic, wanted in chosen:
        there = offset_ranges(cluster, topic)
        done = read_resolutions(cluster, topic, there, is_settled=False)
        for letter in read_dead_letters(cluster, topic, there):
            mark = done.get(letter.dead_letter_id)
            if wanted.matches(letter) and not (only_waiting and mark is not None):
                yield DeadLetterStatus(letter, mark)


def find_dead_letter(cluster: Cluster, topic: TopicInfo, dead_letter_id: DeadLetterId) -> DeadLetterStatus:
    letter = read_dead_letter(cluster, topic, dead_letter_id)
    if letter is None:
        raise CommandError(
            f"{topic.name} has no dead letter at {dead_letter_id}",
            hint=f"`penstock dlq list {topic.name}` shows all",
        )
    done = read_resolutions(cluster, topic, offset_ranges(cluster, topic), is_settled=False)
    return DeadLetterStatus(letter, done.get(dead_letter_id))
