"""`penstock produce`: publish values, or the lines of a file or of standard input, as records."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import IO, Annotated, Any

import typer

from penstock.cli.connection import (
    ConnectionOptions,
    check_reachable,
    explain_librdkafka_error,
    librdkafka_settings,
)
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import expand_options, parse_pairs
from penstock.cli.output import note, plural
from penstock.cli.record_formats import FORMATS, ProducerRecord, line_reader

UNKNOWN_TOPIC_TIMEOUT_MS = 5000
RECORD_BYTES_MAX = 100_000_000  # the library's own maximum; the topic decides which records are too large
PROGRESS_EVERY_LINES = 1000


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


@expand_options
def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    connection: ConnectionOptions,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="Values of records. Default: standard input.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="TEXT", help="Key of every record.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", "-K", metavar="TEXT", help="Separates key and value in each line."),
    ] = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header of every record. Repeatable."),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option("--format", "-f", metavar="FORMAT", help=f"Format of the lines: {', '.join(FORMATS)}."),
    ] = "text",
    file: Annotated[
        str | None,
        typer.Option("--file", "-F", metavar="PATH", help="Read lines from this file; - is standard input."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", "-p", metavar="N", min=0, help="Send to this partition. Default: the key decides."
        ),
    ] = None,
    acks: Annotated[
        Acks,
        typer.Option("--acks", help="Which replicas must have a record before it counts as sent."),
    ] = Acks.ALL,
    compression: Annotated[
        Codec, typer.Option("--compression", "-z", help="Codec of the batches.")
    ] = Codec.NONE,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0.1, help="Fail if a record is not sent within this time."
        ),
    ] = 30.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print partition and offset of each record, as JSON lines.")
    ] = False,
) -> None:
    """Publish records: the values given, or each line of a file or of standard input.

    A line of --format json is {"key": ..., "value": ..., "headers": [["name", "value"]]}, as consume --json
    writes it; a value of null is a tombstone, and bytes that are not text are {"base64": "..."}.
    """
    from confluent_kafka import Producer  # a third of the time that a command takes to start

    separator = key_separator.replace("\\t", "\t").encode() if key_separator else None
    try:
        read = line_reader(format_name, key_separator=separator)
    except ValueError as error:
        raise CommandError(f"--format: {error}", exit_code=EXIT_USAGE) from None
    extra = tuple((name, text.encode()) for name, text in parse_pairs(headers or (), "--header").items())
    fixed_key = None if key is None else key.encode()

    def outgoing(line: bytes) -> ProducerRecord:
        record = read(line)
        return record._replace(
            key=record.key if fixed_key is None else fixed_key,
            headers=(*record.headers, *extra),
            partition=record.partition if partition is None else partition,
        )

    check_reachable(connection)
    producer = Producer(
        librdkafka_settings(
            connection,
            acks=acks.value,
            compression_type=compression.value,
            enable_idempotence=acks is Acks.ALL,
            message_timeout_ms=int(timeout_s * 1000),
            topic_metadata_propagation_max_ms=min(UNKNOWN_TOPIC_TIMEOUT_MS, int(timeout_s * 1000)),
            linger_ms=5,
            message_max_bytes=RECORD_BYTES_MAX,
        )
    )
    report = DeliveryReport(topic, connection.bootstrap, as_json)
    with _input_lines(values, file) as lines:
        _send_all(producer, topic, lines, outgoing, report)
    report.finish()


class DeliveryReport:
    """The outcome of the records, as the client library reports it."""

    def __init__(self, topic: str, bootstrap: str, as_json: bool) -> None:
        self.topic = topic
        self.bootstrap = bootstrap
        self.as_json = as_json
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
        )
        return f"{plural(self.delivered, 'record')} to {self.topic}" + (f" ({offsets})" if offsets else "")


def _send_all(
    producer: Any,
    topic: str,
    lines: Iterable[bytes],
    outgoing: Callable[[bytes], ProducerRecord],
    report: DeliveryReport,
) -> None:
    """Delivers everything read so far even when a line is wrong or the user interrupts."""
    try:
        for number, line in enumerate(lines, 1):
            try:
                record = outgoing(line)
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
