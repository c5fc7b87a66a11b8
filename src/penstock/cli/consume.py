"""`penstock consume`: print records, one per line."""

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from penstock.cli.cluster_client import LibrdkafkaCluster, PartitionName, explain_kafka_error, resolve_offsets
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, OffsetSpec, OffsetSpecKind, parse_offset_spec
from penstock.cli.record_formats import FORMATS, TEMPLATE_FIELDS, ConsumerRecord, line_writer

BATCH_RECORDS = 500
POLL_S = 0.1
READER_GROUP = (
    "penstock-cli-reader"  # the client library requires a group id; nothing is ever committed under this one
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
        help=f"{', '.join(FORMATS)}, or a template of {{{'}, {'.join(TEMPLATE_FIELDS)}}}.",
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
    write = _make_line_writer("json" if as_json else format_name, keys, headers)
    position = _parse_from(start)
    cluster = LibrdkafkaCluster(bootstrap)
    places = _select_partitions(cluster, topics, partitions)
    consumer = cluster.consumer(
        group_id=group or READER_GROUP,
        enable_auto_commit=group is not None,
        enable_auto_offset_store=False,
        auto_offset_reset=_auto_offset_reset(position, group),
        enable_partition_eof=True,
        isolation_level="read_uncommitted" if uncommitted else "read_committed",
        fetch_wait_max_ms=100,
    )
    limits = StopConditions(max_messages=max_messages, idle_s=timeout_s, stop_at_end=exit_at_end)
    with _closing(consumer), _end_on_signals():
        if group:
            _subscribe(consumer, topics, partitions, limits)
        else:
            _assign(consumer, resolve_offsets(cluster, places, position), limits)
        _print_records(consumer, write, limits, bootstrap, commit=group is not None)


class StopConditions:
    """When to stop: after a number of records, at the end of the partitions, or after a time without records."""

    def __init__(self, *, max_messages: int | None, idle_s: float | None, stop_at_end: bool) -> None:
        self.remaining = max_messages
        self.idle_s = idle_s
        self.stop_at_end = stop_at_end
        self.unfinished: set[PartitionName] | None = None  # unknown until partitions are assigned
        self.last_seen = time.monotonic()

    def wanted(self) -> int:
        return BATCH_RECORDS if self.remaining is None else min(BATCH_RECORDS, self.remaining)

    def reading(self, places: set[PartitionName]) -> None:
        self.unfinished = places

    def saw_record(self) -> None:
        self.last_seen = time.monotonic()
        if self.remaining is not None:
            self.remaining -= 1

    def saw_end(self, place: PartitionName) -> None:
        if self.unfinished is not None:
            self.unfinished.discard(place)

    def reached(self) -> bool:
        if self.remaining == 0 or (self.stop_at_end and self.unfinished is not None and not self.unfinished):
            return True
        return self.idle_s is not None and time.monotonic() - self.last_seen >= self.idle_s


def _make_line_writer(format_name: str, keys: bool, headers: bool) -> Callable[[ConsumerRecord], bytes]:
    try:
        return line_writer(format_name, keys=keys, headers=headers)
    except ValueError as error:
        raise CommandError(f"--format: {error}", exit_code=EXIT_USAGE) from None


def _parse_from(text: str) -> OffsetSpec:
    try:
        return parse_offset_spec(text, now_ms=int(time.time() * 1000))
    except ValueError as error:
        raise CommandError(f"--from: {error}", exit_code=EXIT_USAGE) from None


def _auto_offset_reset(position: OffsetSpec, group: str | None) -> str:
    """For a group, --from only says where to start without a committed offset."""
    match position.kind:
        case OffsetSpecKind.BEGINNING:
            return "earliest"
        case OffsetSpecKind.END:
            return "latest"
        case _ if group:
            raise CommandError(
                "a group starts where it is: --from may only be beginning or end, for where it has not been",
                hint="penstock group reset moves a group",
                exit_code=EXIT_USAGE,
            )
        case _:
            return "earliest"


def _select_partitions(
    cluster: LibrdkafkaCluster, topics: list[str], partitions: list[int] | None
) -> list[PartitionName]:
    places = cluster.places(topics)
    if not partitions:
        return places
    for topic in topics:
        for index in partitions:
            if PartitionName(topic, index) not in places:
                raise CommandError(f"topic {topic} has no partition {index}")
    return [place for place in places if place.partition in partitions]


def _assign(consumer: Any, offsets: dict[PartitionName, int], limits: StopConditions) -> None:
    from confluent_kafka import TopicPartition

    consumer.assign(
        [TopicPartition(place.topic, place.partition, offset) for place, offset in offsets.items()]
    )
    limits.reading(set(offsets))


def _subscribe(
    consumer: Any, topics: list[str], partitions: list[int] | None, limits: StopConditions
) -> None:
    if partitions:
        raise CommandError(
            "a group shares out the partitions itself: --partition does not go with --group",
            exit_code=EXIT_USAGE,
        )

    def on_assign(_consumer: Any, assigned: list[Any]) -> None:
        limits.reading({PartitionName(entry.topic, entry.partition) for entry in assigned})

    consumer.subscribe(topics, on_assign=on_assign)


def _print_records(
    consumer: Any,
    write: Callable[[ConsumerRecord], bytes],
    limits: StopConditions,
    bootstrap: str,
    *,
    commit: bool,
) -> None:
    out = sys.stdout.buffer
    while not limits.reached():
        _check_stdout_is_read()
        for message in consumer.consume(limits.wanted(), timeout=POLL_S):
            if message.error() is not None:
                _handle_error(message, limits, bootstrap)
                continue
            out.write(write(_consumer_record(message)))
            if commit:
                consumer.store_offsets(message)
            limits.saw_record()
        out.flush()


def _check_stdout_is_read() -> None:
    """Raises BrokenPipeError when the reader of stdout is gone; on a quiet topic no write would notice it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0)):
        raise BrokenPipeError


def _handle_error(message: Any, limits: StopConditions, bootstrap: str) -> None:
    from confluent_kafka import KafkaError

    error = message.error()
    if error.code() == KafkaError._PARTITION_EOF:
        limits.saw_end(PartitionName(message.topic(), message.partition()))
    elif error.fatal() or not error.retriable():
        raise explain_kafka_error(
            error, bootstrap, subject=f"topic {message.topic()}" if message.topic() else ""
        )


def _consumer_record(message: Any) -> ConsumerRecord:
    return ConsumerRecord(
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
    """Leaves the group and commits, also when the reader of stdout is gone."""
    try:
        yield
    finally:
        consumer.close()


@contextmanager
def _end_on_signals() -> Iterator[None]:
    """Ends normally on Ctrl-C and SIGTERM: they are the usual way to stop reading."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
