"""`penstock consume`: records become lines."""

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from penstock.cli.client import Cluster, Place, explain
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, Bootstrap
from penstock.cli.positions import Anchor, Position, parse_position
from penstock.cli.records import FIELDS, FORMATS, Incoming, line_writer
from penstock.cli.starting import starting_offsets

BATCH_RECORDS = 500
POLL_S = 0.1
READER = (
    "penstock-cli-reader"  # the client library wants a group id; nothing is ever committed under this one
)


Topics = Annotated[list[str], typer.Argument(metavar="TOPIC", show_default=False)]
Start = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="WHERE",
        help="beginning, end, an offset, -N for the last N of each partition, or a time: "
        "2025-01-31T12:00, @MILLISECONDS, or an age such as 15m.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        metavar="GROUP",
        help="Read as a member of this group: go on where it is, commit what is printed.",
    ),
]
Partitions = Annotated[
    list[int] | None, typer.Option("--partition", "-p", metavar="N", min=0, help="Only this one; repeatable.")
]
MaxMessages = Annotated[
    int | None, typer.Option("--max-messages", "-n", metavar="N", min=1, help="Stop after so many.")
]
ExitAtEnd = Annotated[bool, typer.Option("--exit-at-end", "-e", help="Stop at the end of the topics.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Stop when nothing came for so long."),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}, or a template of {{{'}, {'.join(FIELDS)}}}.",
    ),
]
Keys = Annotated[bool, typer.Option("--keys", help="Print the key and a tab before the value.")]
WithHeaders = Annotated[bool, typer.Option("--headers", help="Print the headers and a tab before that.")]
Uncommitted = Annotated[
    bool, typer.Option("--uncommitted", help="Print what open or aborted transactions wrote too.")
]
JsonLines = Annotated[bool, typer.Option("--json", help="Same as --format json: one JSON object per line.")]


def consume(
    topics: Topics,
    start: Start = "beginning",
    group: Group = None,
    partitions: Partitions = None,
    max_messages: MaxMessages = None,
    exit_at_end: ExitAtEnd = False,
    timeout_s: Timeout = None,
    format_name: Format = "text",
    keys: Keys = False,
    headers: WithHeaders = False,
    uncommitted: Uncommitted = False,
    as_json: JsonLines = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Print records, one per line, until interrupted."""
    write = _writer("json" if as_json else format_name, keys, headers)
    position = _position(start)
    cluster = Cluster(bootstrap)
    places = _chosen(cluster, topics, partitions)
    consumer = cluster.consumer(
        group_id=group or READER,
        enable_auto_commit=group is not None,
        enable_auto_offset_store=False,
        auto_offset_reset=_reset(position, group),
        enable_partition_eof=True,
        isolation_level="read_uncommitted" if uncommitted else "read_committed",
        fetch_wait_max_ms=100,
    )
    limits = Limits(max_messages=max_messages, idle_s=timeout_s, stop_at_end=exit_at_end)
    with _closing(consumer), _ended_by_signals():
        if group:
            _join(consumer, topics, partitions, limits)
        else:
            _assign(consumer, starting_offsets(cluster, places, position), limits)
        _copy(consumer, write, limits, bootstrap, commit=group is not None)


class Limits:
    """When to stop."""

    def __init__(self, *, max_messages: int | None, idle_s: float | None, stop_at_end: bool) -> None:
        self.remaining = max_messages
        self.idle_s = idle_s
        self.stop_at_end = stop_at_end
        self.unfinished: set[Place] | None = None  # not known before partitions are assigned
        self.last_seen = time.monotonic()

    def wanted(self) -> int:
        return BATCH_RECORDS if self.remaining is None else min(BATCH_RECORDS, self.remaining)

    def reading(self, places: set[Place]) -> None:
        self.unfinished = places

    def saw_record(self) -> None:
        self.last_seen = time.monotonic()
        if self.remaining is not None:
            self.remaining -= 1

    def saw_end(self, place: Place) -> None:
        if self.unfinished is not None:
            self.unfinished.discard(place)

    def reached(self) -> bool:
        if self.remaining == 0 or (self.stop_at_end and self.unfinished is not None and not self.unfinished):
            return True
        return self.idle_s is not None and time.monotonic() - self.last_seen >= self.idle_s


def _writer(format_name: str, keys: bool, headers: bool) -> Callable[[Incoming], bytes]:
    try:
        return line_writer(format_name, keys=keys, headers=headers)
    except ValueError as error:
        raise Failure(f"--format: {error}", exit_code=WRONG_USAGE) from None


def _position(text: str) -> Position:
    try:
        return parse_position(text, now_ms=int(time.time() * 1000))
    except ValueError as error:
        raise Failure(f"--from: {error}", exit_code=WRONG_USAGE) from None


def _reset(position: Position, group: str | None) -> str:
    """For a group, --from only says what happens where it has no committed offset."""
    match position.anchor:
        case Anchor.BEGINNING:
            return "earliest"
        case Anchor.END:
            return "latest"
        case _ if group:
            raise Failure(
                "a group starts where it is: --from may only be beginning or end, for where it has not been",
                hint="penstock group reset moves a group",
                exit_code=WRONG_USAGE,
            )
        case _:
            return "earliest"


def _chosen(cluster: Cluster, topics: list[str], partitions: list[int] | None) -> list[Place]:
    places = cluster.places(topics)
    if not partitions:
        return places
    for topic in topics:
        for index in partitions:
            if Place(topic, index) not in places:
                raise Failure(f"topic {topic} has no partition {index}")
    return [place for place in places if place.partition in partitions]


def _assign(consumer: Any, offsets: dict[Place, int], limits: Limits) -> None:
    from confluent_kafka import TopicPartition

    consumer.assign(
        [TopicPartition(place.topic, place.partition, offset) for place, offset in offsets.items()]
    )
    limits.reading(set(offsets))


def _join(consumer: Any, topics: list[str], partitions: list[int] | None, limits: Limits) -> None:
    if partitions:
        raise Failure(
            "a group shares out the partitions itself: --partition does not go with --group",
            exit_code=WRONG_USAGE,
        )

    def on_assign(_consumer: Any, assigned: list[Any]) -> None:
        limits.reading({Place(entry.topic, entry.partition) for entry in assigned})

    consumer.subscribe(topics, on_assign=on_assign)


def _copy(
    consumer: Any, write: Callable[[Incoming], bytes], limits: Limits, bootstrap: str, *, commit: bool
) -> None:
    out = sys.stdout.buffer
    while not limits.reached():
        _stop_if_nobody_reads()
        for message in consumer.consume(limits.wanted(), timeout=POLL_S):
            if message.error() is not None:
                _note_end(message, limits, bootstrap)
                continue
            out.write(write(_incoming(message)))
            if commit:
                consumer.store_offsets(message)
            limits.saw_record()
        out.flush()


def _stop_if_nobody_reads() -> None:
    """A pipe whose reader has gone only complains when written to, which on a quiet topic may be never."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0)):
        raise BrokenPipeError


def _note_end(message: Any, limits: Limits, bootstrap: str) -> None:
    from confluent_kafka import KafkaError

    error = message.error()
    if error.code() == KafkaError._PARTITION_EOF:
        limits.saw_end(Place(message.topic(), message.partition()))
    elif error.fatal() or not error.retriable():
        raise explain(error, bootstrap, subject=f"topic {message.topic()}" if message.topic() else "")


def _incoming(message: Any) -> Incoming:
    return Incoming(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        message.headers() or (),
    )


@contextmanager
def _closing(consumer: Any) -> Iterator[None]:
    """Leave the group and commit, also when the reader of our output has gone away."""
    try:
        yield
    finally:
        consumer.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM are how one stops reading, not failures."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
