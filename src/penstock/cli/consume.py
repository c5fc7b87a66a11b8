"""`penstock consume`: print records, one per line."""

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.librdkafka import explain_librdkafka_error, librdkafka_settings
from penstock.cli.connection.offsets import PartitionName, existing_topics, partition_names, resolve_offsets
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import OffsetSpec, OffsetSpecKind, expand_options, parse_offset_spec
from penstock.cli.record_formats import FORMATS, TEMPLATE_FIELDS, ConsumerRecord, line_writer
from penstock.client.wire.metadata import TopicPartition

BATCH_RECORDS = 500
POLL_S = 0.1
#: confluent-kafka requires a group id; nothing is ever committed under this one.
READER_GROUP = "penstock-cli-reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Which records to print, and how."""

    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="beginning, end, an offset, -N for the last N of each partition, or a time: "
            "2025-01-31T12:00, @MILLISECONDS, or an age such as 15m.",
        ),
    ] = "beginning"
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Read as a member of this group: start at its committed offsets, and commit what is printed.",
        ),
    ] = None
    partitions: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="N", min=0, help="Only this partition. Repeatable."),
    ] = None
    max_messages: Annotated[
        int | None, typer.Option("--max-messages", "-n", metavar="N", min=1, help="Stop after N records.")
    ] = None
    exit_at_end: Annotated[
        bool, typer.Option("--exit-at-end", "-e", help="Stop at the end of the topics.")
    ] = False
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Stop after this long without a record."),
    ] = None
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help=f"{', '.join(FORMATS)}, or a template of {{{'}, {'.join(TEMPLATE_FIELDS)}}}.",
        ),
    ] = "text"
    keys: Annotated[bool, typer.Option("--keys", help="Print the key and a tab before the value.")] = False
    headers: Annotated[
        bool, typer.Option("--headers", help="Print the headers and a tab before the key and value.")
    ] = False
    uncommitted: Annotated[
        bool, typer.Option("--uncommitted", help="Also print records of open and aborted transactions.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Same as --format json: one JSON object per line.")
    ] = False

    def line_writer(self) -> Callable[[ConsumerRecord], bytes]:
        """Raises CommandError."""
        try:
            name = "json" if self.as_json else self.format_name
            return line_writer(name, keys=self.keys, headers=self.headers)
        except ValueError as error:
            raise CommandError(f"--format: {error}", exit_code=EXIT_USAGE) from None

    def start_offset(self) -> OffsetSpec:
        """Raises CommandError."""
        try:
            return parse_offset_spec(self.start, now_ms=int(time.time() * 1000))
        except ValueError as error:
            raise CommandError(f"--from: {error}", exit_code=EXIT_USAGE) from None


@expand_options
def consume(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", show_default=False)],
    options: ReadOptions,
    connection: ConnectionOptions,
) -> None:
    """Print records, one per line, until interrupted."""
    from confluent_kafka import Consumer  # a third of the time that a command takes to start

    write, spec, group = options.line_writer(), options.start_offset(), options.group
    if group and options.partitions:
        raise CommandError(
            "--partition cannot be combined with --group",
            hint="the group assigns the partitions to its members",
            exit_code=EXIT_USAGE,
        )
    reset = _auto_offset_reset(spec, group)
    with open_cluster(connection) as cluster:
        known = partition_names(existing_topics(cluster, topics))
        chosen = _select_partitions(known, topics, options.partitions)
        offsets = {} if group else resolve_offsets(cluster, chosen, spec)
    consumer = Consumer(
        librdkafka_settings(
            connection,
            group_id=group or READER_GROUP,
            enable_auto_commit=group is not None,
            enable_auto_offset_store=False,
            auto_offset_reset=reset,
            enable_partition_eof=True,
            isolation_level="read_uncommitted" if options.uncommitted else "read_committed",
            fetch_wait_max_ms=100,
        )
    )
    limits = StopConditions(
        max_messages=options.max_messages, idle_s=options.timeout_s, stop_at_end=options.exit_at_end
    )
    # Closing leaves the group and commits, also when the reader of stdout is gone.
    with closing(consumer), _end_on_signals():
        if group:
            _subscribe(consumer, topics, limits)
        else:
            _assign(consumer, offsets, limits)
        _print_records(consumer, write, limits, connection.addresses, commit=group is not None)


class StopConditions:
    """When to stop: after a number of records, at the end of the partitions, or after a time without records."""

    def __init__(self, *, max_messages: int | None, idle_s: float | None, stop_at_end: bool) -> None:
        self.remaining = max_messages
        self.idle_s = idle_s
        self.stop_at_end = stop_at_end
        self.unfinished: set[TopicPartition] | None = None  # unknown until partitions are assigned
        self.last_seen = time.monotonic()

    def wanted(self) -> int:
        return BATCH_RECORDS if self.remaining is None else min(BATCH_RECORDS, self.remaining)

    def reading(self, partitions: set[TopicPartition]) -> None:
        self.unfinished = partitions

    def saw_record(self) -> None:
        self.last_seen = time.monotonic()
        if self.remaining is not None:
            self.remaining -= 1

    def saw_end(self, partition: TopicPartition) -> None:
        if self.unfinished is not None:
            self.unfinished.discard(partition)

    def reached(self) -> bool:
        if self.remaining == 0 or (self.stop_at_end and self.unfinished is not None and not self.unfinished):
            return True
        return self.idle_s is not None and time.monotonic() - self.last_seen >= self.idle_s


def _auto_offset_reset(position: OffsetSpec, group: str | None) -> str:
    """For a group, --from only says where to start without a committed offset."""
    match position.kind:
        case OffsetSpecKind.BEGINNING:
            return "earliest"
        case OffsetSpecKind.END:
            return "latest"
        case _ if group:
            raise CommandError(
                "--group takes only --from beginning or --from end",
                hint="a group starts at its committed offsets; `penstock group reset` moves them",
                exit_code=EXIT_USAGE,
            )
        case _:
            return "earliest"


def _select_partitions(
    known: list[PartitionName], topics: list[str], partitions: list[int] | None
) -> list[PartitionName]:
    if not partitions:
        return known
    for topic in topics:
        for index in partitions:
            if PartitionName(topic, index) not in known:
                raise CommandError(
                    f"topic {topic} has no partition {index}",
                    hint=f"`penstock topic describe {topic}` shows its partitions",
                )
    return [each for each in known if each.partition in partitions]


def _assign(consumer: Any, offsets: Mapping[TopicPartition, int], limits: StopConditions) -> None:
    from confluent_kafka import TopicPartition as AssignedPartition

    consumer.assign([AssignedPartition(*partition, offset) for partition, offset in offsets.items()])
    limits.reading(set(offsets))


def _subscribe(consumer: Any, topics: list[str], limits: StopConditions) -> None:
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
        subject = f"topic {message.topic()}" if message.topic() else "consumer"
        raise explain_librdkafka_error(error, bootstrap, subject)


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
