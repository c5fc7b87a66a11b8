"""How every verb reaches a cluster, with one set of options: address, settings file and single settings.

`open_cluster` opens the client of `penstock.client`, which all verbs use to look at a cluster and to change it.
`produce`, `consume` and `outbox relay` also need confluent-kafka, for batches, rebalances and transactions that
overlap with the program's own work; `librdkafka_settings` gives it the same settings, so that a security setting
reaches both.

A setting is taken from `--property`, else from the file, and has the name that Java clients and librdkafka use. A
setting that `penstock.client` does not know is an error, because an ignored security setting does harm.
"""

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from penstock.broker.config.listeners import parse_addresses
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import OffsetSpec, OffsetSpecKind, parse_pairs, resolve_offset
from penstock.client.errors import AuthenticationFailed, ClientError, Refused, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.errors import ErrorCode

CLIENT_ID = "penstock-cli"
#: Shorter than the defaults of applications, because a person waits.
_DEFAULT_SETTINGS = {
    "client.id": CLIENT_ID,
    "default.api.timeout.ms": "10000",
    "request.timeout.ms": "15000",
    "socket.connection.setup.timeout.ms": "3000",
}
#: Settings of `penstock.client` that librdkafka has too. It gets them only if the user gave them.
_LIBRDKAFKA_NAMES = {
    "request.timeout.ms": "socket.timeout.ms",
    "socket.timeout.ms": "socket.timeout.ms",
    "socket.connection.setup.timeout.ms": "socket.connection.setup.timeout.ms",
    "metadata.max.age.ms": "metadata.max.age.ms",
    "topic.metadata.propagation.max.ms": "topic.metadata.propagation.max.ms",
}
_SECURITY_PREFIXES = ("security.", "ssl.", "sasl.", "enable.ssl.")
_HINTS = {
    ErrorCode.unknown_topic_or_partition: "`penstock topic list` shows all topics",
    ErrorCode.group_id_not_found: "`penstock group list` shows all groups",
    ErrorCode.non_empty_group: "stop the members of the group first",
    ErrorCode.unknown_member_id: "stop the members of the group first",
    ErrorCode.cluster_authorization_failed: "this principal may not do that",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of every verb that connects to a cluster."""

    bootstrap: Annotated[
        str,
        typer.Option(
            "--bootstrap",
            "-b",
            metavar="HOST:PORT,...",
            envvar="PENSTOCK_BOOTSTRAP",
            help="Addresses of brokers of the cluster.",
        ),
    ] = "localhost:9092"
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property",
            "-X",
            metavar="NAME=VALUE",
            help="A client setting, such as sasl.username. Repeatable.",
        ),
    ] = None
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--command-config",
            metavar="FILE",
            envvar="PENSTOCK_COMMAND_CONFIG",
            help="A file with client settings, one NAME=VALUE per line.",
        ),
    ] = None

    def given_settings(self) -> dict[str, str]:
        """The settings of the file and of --property, without the addresses. Raises CommandError."""
        given = {} if self.config_file is None else _read_properties(self.config_file)
        return given | parse_pairs(self.properties or (), "--property")

    def connection_settings(self, *, allow_unknown: bool = False) -> ConnectionSettings:
        """The settings of the client of `penstock.client`. Raises CommandError, also for unknown settings."""
        try:
            parse_addresses(self.bootstrap)  # a missing port is an error here; clients take 9092
            settings = ConnectionSettings.parse(
                {**_DEFAULT_SETTINGS, **self.given_settings(), "bootstrap.servers": self.bootstrap}
            )
        except ValueError as error:
            raise CommandError(f"--bootstrap: {error}", exit_code=EXIT_USAGE) from None
        except ClientError as error:
            raise CommandError(str(error), exit_code=EXIT_USAGE) from None
        if settings.unknown and not allow_unknown:
            raise CommandError(
                f"penstock has no client setting {', '.join(settings.unknown)}",
                hint="check the spelling in --property and in the file of --command-config",
                exit_code=EXIT_USAGE,
            )
        return settings


def _read_properties(path: Path) -> dict[str, str]:
    """NAME=VALUE lines; empty lines and lines that begin with # or ! are comments."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandError(f"--command-config: cannot read {path}: {reason}", exit_code=EXIT_USAGE) from None
    written = [line.strip() for line in lines if line.strip() and line.strip()[0] not in "#!"]
    return {name: value.strip() for name, value in parse_pairs(written, f"{path}: a line").items()}


@contextmanager
def open_cluster(options: ConnectionOptions) -> Iterator[Cluster]:
    """Connects, and raises every client error as a CommandError. Fails at once if no broker answers."""
    with errors_explained(), Cluster(options.connection_settings()) as cluster:
        _check_reachable(cluster)
        yield cluster


@contextmanager
def errors_explained() -> Iterator[None]:
    """Raises every client error as a CommandError."""
    try:
        yield
    except ClientError as error:
        raise explain_client_error(error) from None


def check_reachable(options: ConnectionOptions) -> None:
    """Raises CommandError with the reason, where confluent-kafka would retry for minutes."""
    with open_cluster(options):
        pass


def _check_reachable(cluster: Cluster) -> None:
    try:
        _ = cluster.cluster_id  # asks each address once
    except Unavailable as error:
        # The client's sentence ends with the reason for each address, which is all that is new here.
        raise CommandError(
            f"no broker at {str(error).partition(': ')[2] or error}",
            hint="start one with `penstock serve`, or name another with --bootstrap or PENSTOCK_BOOTSTRAP",
        ) from None


def explain_client_error(error: ClientError) -> CommandError:
    match error:
        case Refused():
            return CommandError(str(error), hint=_HINTS.get(error.code))
        case AuthenticationFailed():
            return CommandError(
                str(error), hint="check security.protocol, sasl.* and ssl.* in --property or --command-config"
            )
        case _:
            return CommandError(str(error))


# Topics and offsets


class PartitionName(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


def existing_topics(cluster: Cluster, names: Iterable[str]) -> dict[str, TopicInfo]:
    """Raises CommandError for a topic that does not exist."""
    wanted = tuple(names)
    found = cluster.topics(wanted)
    for name in wanted:
        if name not in found:
            known = list(cluster.topics())
            raise CommandError(
                f"topic {name} does not exist",
                hint=did_you_mean(name, known, "`penstock topic list` shows all topics"),
            )
    return {name: found[name] for name in wanted}


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def partition_names(topics: Mapping[str, TopicInfo]) -> list[PartitionName]:
    return [PartitionName(name, part.index) for name, topic in topics.items() for part in topic.partitions]


def log_ends(
    cluster: Cluster, partitions: Iterable[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """The first offset of each partition, and the offset after its last record."""
    wanted = list(partitions)
    return _list(cluster, dict.fromkeys(wanted, EARLIEST)), _list(cluster, dict.fromkeys(wanted, LATEST))


def _list(cluster: Cluster, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """-1 where a timestamp lies after the last record."""
    found = list_offsets(cluster, wanted) if wanted else {}
    return {partition: -1 if at is None else at.offset for partition, at in found.items()}


def resolve_offsets(
    cluster: Cluster, partitions: Iterable[TopicPartition], spec: OffsetSpec
) -> dict[TopicPartition, int]:
    wanted = list(partitions)
    first, end = log_ends(cluster, wanted)
    at_timestamp: dict[TopicPartition, int] = {}
    if spec.kind is OffsetSpecKind.TIMESTAMP:
        at_timestamp = _list(cluster, dict.fromkeys(wanted, spec.value))
    return {
        each: resolve_offset(spec, first=first[each], end=end[each], at_timestamp=at_timestamp.get(each))
        for each in wanted
    }


# confluent-kafka


def librdkafka_settings(options: ConnectionOptions, **settings: object) -> dict[str, object]:
    """The connection settings in the names of librdkafka, and the settings of a verb (`_` stands for `.`)."""
    parsed, given = options.connection_settings(), options.given_settings()
    silent = logging.getLogger("penstock.cli.librdkafka")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    return {
        **_security_settings(parsed),
        **{theirs: given[ours] for ours, theirs in _LIBRDKAFKA_NAMES.items() if ours in given},
        "bootstrap.servers": options.bootstrap,
        "client.id": parsed.client_id,
        "logger": silent,
        **{name.replace("_", "."): value for name, value in settings.items()},
    }


def librdkafka_connection(options: ConnectionOptions) -> dict[str, str]:
    """The connection settings for a client that takes all settings of librdkafka. Fails if no broker answers."""
    parsed = options.connection_settings(allow_unknown=True)
    with errors_explained(), Cluster(parsed) as cluster:
        _check_reachable(cluster)
    others = {
        name: value
        for name, value in options.given_settings().items()
        if name in parsed.unknown or not name.startswith((*_SECURITY_PREFIXES, "default.api.timeout.ms"))
    }
    return others | _security_settings(parsed)


def _security_settings(parsed: ConnectionSettings) -> dict[str, str]:
    return {name: value for name, value in parsed.to_mapping().items() if name.startswith(_SECURITY_PREFIXES)}


def explain_librdkafka_error(error: Any, bootstrap: str, subject: str) -> CommandError:
    """Converts a KafkaException or KafkaError into a sentence about `subject`."""
    from confluent_kafka import KafkaError  # a third of the time that a command takes to start

    cause = error if isinstance(error, KafkaError) else error.args[0]
    match cause.code():
        case (
            KafkaError._ALL_BROKERS_DOWN | KafkaError._TRANSPORT | KafkaError._TIMED_OUT | KafkaError._RESOLVE
        ):
            return CommandError(
                f"no broker at {bootstrap} answered in time",
                hint="`penstock cluster info` shows the addresses that brokers advertise: can you reach them?",
            )
        case KafkaError._MSG_TIMED_OUT:
            return CommandError(
                f"{subject}: no broker acknowledged the record in time",
                hint="--timeout waits longer; `penstock cluster status` shows what is wrong",
            )
        case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC:
            return CommandError(
                f"{subject} does not exist", hint=_HINTS[ErrorCode.unknown_topic_or_partition]
            )
        case KafkaError._UNKNOWN_PARTITION:
            return CommandError(
                f"{subject} has no such partition", hint="`penstock topic describe` shows its partitions"
            )
        case KafkaError.INVALID_RECORD:
            return CommandError(
                f"{subject}: the broker refused the record",
                hint="a compacted topic needs a key in each record",
            )
        case _:
            return CommandError(f"{subject}: {cause.str()}")
