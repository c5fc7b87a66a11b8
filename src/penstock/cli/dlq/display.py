"""Dead letters as tables, pages and JSON."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from penstock.cli.output import Cell, print_facts, print_json, print_table
from penstock.cli.records import Incoming, as_document
from penstock.client.deadletters.letter import Letter
from penstock.client.deadletters.marks import Mark, State
from penstock.client.deadletters.surveys import Summary, cause_of
from penstock.client.letters import Origin
from penstock.protocol.letters import PREFIXES

TOP = 3
MESSAGE_CHARS_MAX = 60
HEX_COLUMNS = 16
_COLUMNS = ["place", "given up", "from", "group", "handler", "error", "message", "tries", "state"]


class Seen(NamedTuple):
    letter: Letter
    mark: Mark | None

    @property
    def state(self) -> str:
        return "waiting" if self.mark is None else self.mark.state.value


# All topics


def print_summaries(found: list[Summary]) -> None:
    columns = ["topic", "waiting", "replayed", "edited", "purged", "oldest", "age", "left", "newest"]
    now_ms = round(time.time() * 1000)
    print_table([*columns, "groups", "errors"], (_summary_row(each, now_ms) for each in found))


def _summary_row(found: Summary, now_ms: int) -> list[Cell]:
    return [
        found.topic,
        found.waiting,
        *(found.done[state] for state in (State.REPLAYED, State.EDITED, State.PURGED)),
        _when(found.oldest_ms),
        None if found.oldest_ms is None else _length(now_ms - found.oldest_ms),
        None if (left_ms := found.oldest_left_ms(now_ms)) is None else _length(left_ms),
        _when(found.newest_ms),
        _plain(", ".join(name or "?" for name, _ in found.groups.most_common(TOP))),
        _plain(", ".join(f"{name or '?'} ({count})" for name, count in found.errors.most_common(TOP))),
    ]


def summary_document(found: Summary) -> dict[str, Any]:
    return {
        "topic": found.topic,
        "letters": found.total,
        "waiting": found.waiting,
        **{state.value: found.done[state] for state in State},
        "oldest": found.oldest_ms,
        "oldest_left": found.oldest_left_ms(round(time.time() * 1000)),
        "retention": found.retention_ms,
        "newest": found.newest_ms,
        "groups": dict(found.groups.most_common()),
        "errors": dict(found.errors.most_common()),
    }


# Letters


def print_letters(found: Iterable[Seen], *, limit: int, with_topic: bool) -> int:
    """A table of the first `limit`; returns how many there are."""
    shown: list[Seen] = []
    count = 0
    for seen in found:
        count += 1
        if len(shown) < limit:
            shown.append(seen)
    if shown:
        columns = ["topic", *_COLUMNS] if with_topic else _COLUMNS
        rows = ([seen.letter.topic, *_row(seen)] if with_topic else _row(seen) for seen in shown)
        print_table(columns, rows)
    return count


def _row(seen: Seen) -> list[Cell]:
    letter, failure = seen.letter, seen.letter.failure
    return [
        str(letter.spot),
        _when(letter.timestamp_ms),
        _origin(letter.origin),
        _plain(letter.group),
        _plain(letter.handler),
        _plain(cause_of(letter)),
        _plain(_first_line(failure.message)),
        letter.attempts or None,
        seen.state,
    ]


def _first_line(text: str, *, chars_max: int | None = MESSAGE_CHARS_MAX) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return first if chars_max is None or len(first) <= chars_max else first[: chars_max - 3] + "..."


def _origin(origin: Origin | None) -> str | None:
    return None if origin is None else plain(f"{origin.topic} {origin.partition}:{origin.offset}")


def _plain(text: str | None) -> str | None:
    """None for nothing at all."""
    return plain(text) if text else None


def print_json_lines(found: Iterable[Seen]) -> None:
    for seen in found:
        sys.stdout.write(json.dumps(document(seen), ensure_ascii=False) + "\n")


def document(seen: Seen, *, whole: bool = False) -> dict[str, Any]:
    """What `list` tells of a letter, and `show` beside the record."""
    letter, mark, origin = seen.letter, seen.mark, seen.letter.origin
    record = _record_document(letter)
    told = {
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.spot.offset,
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
        told |= {
            "value": record["value"],
            "headers": record["headers"],
            "stack": letter.failure.stack or None,
        }
    return told


def _origin_document(origin: Origin) -> dict[str, Any]:
    return {
        "topic": origin.topic,
        "partition": origin.partition,
        "offset": origin.offset,
        "timestamp": origin.timestamp_ms,
    }


def _record_document(letter: Letter) -> dict[str, Any]:
    record = letter.record
    return as_document(
        Incoming(
            letter.topic,
            letter.partition,
            record.offset,
            record.timestamp,
            record.key,
            record.value,
            [(name.encode(errors="replace").decode(), value) for name, value in letter.own_headers],
        )
    )


# One letter


def print_letter(seen: Seen) -> None:
    letter = seen.letter
    print_facts(_facts(seen))
    headers = [(name, value) for name, value in letter.record.headers if not name.startswith(PREFIXES)]
    if headers:
        print()
        print_table(["header", "value"], ([plain(name), short_text(value)] for name, value in headers))
    print()
    print("\n".join(value_lines(letter.record.value)))
    # What did not fit into a line is told in full here; a stack trace ends with the message as a rule.
    message, stack = letter.failure.message.strip(), letter.failure.stack.rstrip()
    for text in ("" if message in stack or "\n" not in message else message, stack):
        if text:
            print(f"\n{plain(text)}")


def _facts(seen: Seen) -> Iterator[tuple[str, Cell]]:
    letter, failure, origin, mark = seen.letter, seen.letter.failure, seen.letter.origin, seen.mark
    yield "letter", f"{letter.topic} {letter.spot}"
    yield "given up", _when(letter.timestamp_ms)
    yield "from", _origin(origin)
    yield "published", None if origin is None else _when(origin.timestamp_ms)
    yield "group", _plain(letter.group)
    if letter.handler is not None:
        yield "handler", _plain(letter.handler)
    yield "tries", letter.attempts
    yield "reason", _plain(failure.reason)
    yield "error", _plain(failure.error_class)
    yield "message", _plain(_first_line(failure.message, chars_max=None))
    if letter.edited_from is not None:
        yield "edited from", str(letter.edited_from)
    yield "state", _told_state(seen.state, mark)
    yield "key", short_text(letter.record.key)
    if not letter.has_record:
        yield "record", "was not brought along"


def _told_state(state: str, mark: Mark | None) -> str:
    if mark is None:
        return state
    at = f" {_when(mark.at_ms)}" if mark.at_ms else ""
    to = f" to {mark.to}" if mark.to and mark.state is State.REPLAYED else ""
    by = f" by {mark.replay}" if mark.replay else ""
    return f"{state}{at}{to}{by}"


def short_text(data: bytes | None) -> str | None:
    """As text where it is some, else in hexadecimal."""
    if data is None:
        return None
    text = _text(data)
    return text if text is not None and "\n" not in text else f"0x{data.hex()}"


def value_lines(value: bytes | None) -> list[str]:
    """JSON indented, text as it is, all else in hexadecimal."""
    if value is None:
        return ["(no value)"]
    text = _text(value)
    if text is None:
        return list(_hex_lines(value))
    try:
        document = json.loads(text)
    except ValueError:
        return text.splitlines() or ["(empty)"]
    return json.dumps(document, indent=2, ensure_ascii=False).splitlines()


def plain(text: str) -> str:
    """Without what would do strange things to a terminal: anybody may have written it."""
    encodable = text.encode(errors="replace").decode()
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in encodable)


def _text(data: bytes) -> str | None:
    """None for what would do strange things to a terminal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None


def _hex_lines(data: bytes) -> Iterator[str]:
    for at in range(0, len(data), HEX_COLUMNS):
        part = data[at : at + HEX_COLUMNS]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{at:08x}  {part.hex(' '):<{3 * HEX_COLUMNS}} {shown}"


def _length(length_ms: int) -> str:
    """The largest unit that is full, for a glance: 29d, 5h, 12m."""
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if length_ms >= unit_ms:
            return f"{length_ms // unit_ms}{unit}"
    return f"{max(length_ms, 0) // 1000}s"


def _when(moment_ms: int | None) -> str | None:
    if moment_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(moment_ms)  # whoever published it wrote what they liked
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def print_document(seen: Seen) -> None:
    print_json(document(seen, whole=True))
