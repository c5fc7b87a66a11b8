"""`penstock produce`: publish values, or the lines of a file or of standard input, as records."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Annotated, Any, Final

import typer

from penstock.cli.connection import ConnectionOptions
from penstock.cli.connection.cluster import check_reachable
from penstock.cli.connection.librdkafka import explain_librdkafka_error, librdkafka_settings
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import expand_options, parse_pairs
from penstock.cli.output import note, plural
from penstock.cli.record_formats import FORMATS, ProducerRecord, line_reader

UNKNOWN_TOPIC_TIMEOUT_MS = 5000
RECORD_BYTES_MAX = 100_000_000  # the library's own maximum; the topic decides which records are too large
PROGRESS_EVERY_LINES = 1000


_INT32_MAX: Final = 2**31 - 1


class Acks(StrEnum):
    ALL = "all"
    ONE = "1"
    NONE = "0"


class Codec(StrEnum):
    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How to make records of lines, and how to send them."""

    key: Annotated[str | None, typer.Option("--key", "-k", metavar="TEXT", help="Key of every record.")] = (
        None
    )
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", "-K", metavar="TEXT", help="Separates key and value in each line."),
    ] = None
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header of every record. Repeatable."),
    ] = None
    format_name: Annotated[
        str,
        typer.Option("--format", "-f", metavar="FORMAT", help=f"Format of the lines: {', '.join(FORMATS)}."),
    ] = "text"
    file: Annotated[
        str | None,
        typer.Option("--file", "-F", metavar="PATH", help="Read lines from this file; - is standard input."),
    ] = None
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            metavar="N",
            min=0,
            max=_INT32_MAX,
            help="Send to this partition. Default: the key decides.",
        ),
    ] = None
    acks: Annotated[
        Acks,
        typer.Option("--acks", help="Which replicas must have a record before it counts as sent."),
    ] = Acks.ALL
    compression: Annotated[Codec, typer.Option("--compression", "-z", help="Codec of the batches.")] = (
        Codec.NONE
    )
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.1,
            max=_INT32_MAX // 1000,
            help="Fail if a record is not sent within this time.",
        ),
    ] = 30.0
    as_json: Annotated[
        bool, typer.Option("--json", help="Print partition and offset of each record, as JSON lines.")
    ] = False

    def record_of_line(self) -> Callable[[bytes], ProducerRecord]:
        """Return a function that makes a record of a line and raises ValueError. Raises CommandError."""
        separator = self.key_separator.replace("\\t", "\t").encode() if self.key_separator else None
        try:
            read = line_reader(self.format_name, key_separator=separator)
        except ValueError as error:
            raise CommandError(f"--format: {error}", exit_code=EXIT_USAGE) from None
        pairs = parse_pairs(self.headers or (), "--header")
        headers = tuple((name, text.encode()) for name, text in pairs.items())
        key = None if self.key is None else self.key.encode()

        def record_of(line: bytes) -> ProducerRecord:
            record = read(line)
            return record._replace(
                key=record.key if key is None else key,
                headers=(*record.headers, *headers),
                partition=record.partition if self.partition is None else self.partition,
            )

        return record_of


@expand_options
def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    options: RecordOptions,
    connection: ConnectionOptions,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="Values of records. Default: standard input.")
    ] = None,
) -> None:
    """Publish records: the values given, or each line of a file or of standard input.

    A line of --format json is {"key": ..., "value": ..., "headers": [["name", "value"]]}, as consume --json
    writes it; a value of null is a tombstone, and bytes that are not text are {"base64": "..."}.
    """
    from confluent_kafka import Producer  # a third of the time that a command takes to start

    record_of = options.record_of_line()
    check_reachable(connection)
    timeout_ms = int(options.timeout_s * 1000)
    producer = Producer(
        librdkafka_settings(
            connection,
            acks=options.acks.value,
            compression_type=options.compression.value,
            enable_idempotence=options.acks is Acks.ALL,
            message_timeout_ms=timeout_ms,
            topic_metadata_propagation_max_ms=min(UNKNOWN_TOPIC_TIMEOUT_MS, timeout_ms),
            linger_ms=5,
            message_max_bytes=RECORD_BYTES_MAX,
        )
    )
    report = DeliveryReport(
        topic, connection.addresses, as_json=options.as_json, is_acknowledged=options.acks is not Acks.NONE
    )
    with _input_lines(values, options.file) as lines:
        _send_all(producer, topic, lines, record_of, report)
    report.finish()


class DeliveryReport:
    """The outcome of the records, as the client library reports it."""

    def __init__(self, topic: str, bootstrap: str, *, as_json: bool, is_acknowledged: bool) -> None:
        self.topic = topic
        self.bootstrap = bootstrap
        self.as_json = as_json
        self.is_acknowledged = is_acknowledged
        #: Partitions that have dropped a batch. Its first record has no offset; librdkafka numbers the others from 0.
        self.dropped_by: set[int] = set()
        self.ranges: dict[int, tuple[int, int]] = {}
        self.delivered = 0
        self.failed = 0
        self.first_error: Any = None

    def on_delivery(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed += 1
            self.first_error = self.first_error or error
            return
        self.delivered += 1
        partition, offset = message.partition(), message.offset()
        if offset is not None:  # with acks=0 the broker does not answer, so there is no offset
            first, last = self.ranges.get(partition, (offset, offset))
            self.ranges[partition] = (min(first, offset), max(last, offset))
        elif self.is_acknowledged:
            self.dropped_by.add(partition)
        if self.as_json:
            document = {"topic": self.topic, "partition": partition, "offset": offset}
            print(json.dumps({**document, "timestamp": message.timestamp()[1]}))

    def finish(self) -> None:
        if self.failed:
            failure = explain_librdkafka_error(self.first_error, self.bootstrap, f"topic {self.topic}")
            total = self.failed + self.delivered
            raise CommandError(
                f"{self.failed} of {plural(total, 'record')} not sent: {failure.message}", hint=failure.hint
            )
        if not self.as_json:
            note(self.summary())

    def summary(self) -> str:
        offsets = ", ".join(
            f"partition {partition} offset {first}" + (f"-{last}" if last != first else "")
            for partition, (first, last) in sorted(self.ranges.items())
            if partition not in self.dropped_by
        )
        text = f"{plural(self.delivered, 'record')} to {self.topic}" + (f" ({offsets})" if offsets else "")
        if self.dropped_by:
            text += f"; the topic dropped some of them: `penstock topic describe {self.topic}` says how many"
        return text


def _send_all(
    producer: Any,
    topic: str,
    lines: Iterable[bytes],
    record_of: Callable[[bytes], ProducerRecord],
    report: DeliveryReport,
) -> None:
    """Delivers everything read so far even when a line is wrong or the user interrupts."""
    try:
        for number, line in enumerate(lines, 1):
            try:
                record = record_of(line)
            except ValueError as error:
                raise CommandError(f"line {number}: {error}") from None
            _send(producer, topic, record, report)
    finally:
        while producer.flush(1.0):
            pass


def _send(producer: Any, topic: str, record: ProducerRecord, report: DeliveryReport) -> None:
    from confluent_kafka import KafkaException

    while True:
        try:
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                partition=record.partition,
                timestamp=record.timestamp_ms,
                headers=list(record.headers),
                on_delivery=report.on_delivery,
            )
        except BufferError:
            producer.poll(0.1)  # the queue is full: wait for the broker
        except KafkaException as error:
            raise explain_librdkafka_error(error, report.bootstrap, f"topic {topic}") from None
        else:
            producer.poll(0)
            return


@contextlib.contextmanager
def _input_lines(values: list[str] | None, file: str | None) -> Iterator[Iterable[bytes]]:
    """The input as lines without line ends; with a progress bar if stderr is a terminal."""
    if values and file:
        raise CommandError(
            "VALUE and --file cannot be combined", hint="give one of them", exit_code=EXIT_USAGE
        )
    if values:
        yield (value.encode() for value in values)
        return
    if file and file != "-":
        try:
            source: IO[bytes] = open(file, "rb")  # noqa: SIM115 - closed below, by the with
        except OSError as error:
            raise CommandError(f"cannot read {file}: {error.strerror}") from None
        with source, _progress(source, os.fstat(source.fileno()).st_size) as counted:
            yield counted
        return
    if sys.stdin.isatty():
        note("write one record per line; Ctrl-D ends the input")
        yield _without_line_ends(sys.stdin.buffer)
        return
    with _progress(sys.stdin.buffer, None) as counted:
        yield counted


def _without_line_ends(source: Iterable[bytes]) -> Iterator[bytes]:
    for line in source:
        yield line.removesuffix(b"\n").removesuffix(b"\r")


@contextlib.contextmanager
def _progress(source: Iterable[bytes], total_bytes: int | None) -> Iterator[Iterable[bytes]]:
    if not sys.stderr.isatty():
        yield _without_line_ends(source)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("sending"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sending", total=total_bytes)

        def counted() -> Iterator[bytes]:
            seen_bytes = 0
            for number, line in enumerate(source, 1):
                seen_bytes += len(line)
                if number % PROGRESS_EVERY_LINES == 0:
                    progress.update(task, completed=seen_bytes)
                yield line.removesuffix(b"\n").removesuffix(b"\r")

        yield counted()
