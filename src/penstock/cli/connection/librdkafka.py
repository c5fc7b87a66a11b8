"""The settings and errors of confluent-kafka for the verbs that need it."""

import logging
from typing import Any

from penstock.cli.connection.cluster import HINTS, errors_explained, require_broker
from penstock.cli.connection.contexts import BOOTSTRAP_SETTING
from penstock.cli.connection.options import ConnectionOptions
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import SECURITY_PREFIXES, ConnectionSettings
from penstock.protocol.errors import ErrorCode

#: Settings of `penstock.client` that librdkafka has too. It gets them only if the user gave them.
_LIBRDKAFKA_NAMES = {
    "request.timeout.ms": "socket.timeout.ms",
    "socket.timeout.ms": "socket.timeout.ms",
    "socket.connection.setup.timeout.ms": "socket.connection.setup.timeout.ms",
    "metadata.max.age.ms": "metadata.max.age.ms",
    "topic.metadata.propagation.max.ms": "topic.metadata.propagation.max.ms",
}


def librdkafka_settings(options: ConnectionOptions, **settings: object) -> dict[str, object]:
    """The connection settings in the names of librdkafka, and the settings of a verb (`_` stands for `.`)."""
    parsed, given = options.connection_settings(), options.given_settings()
    silent = logging.getLogger("penstock.cli.librdkafka")
    silent.addHandler(logging.NullHandler())
    silent.propagate = False
    return {
        **_librdkafka_security(parsed),
        **{theirs: given[ours] for ours, theirs in _LIBRDKAFKA_NAMES.items() if ours in given},
        BOOTSTRAP_SETTING: options.addresses,
        "client.id": parsed.client_id,
        "logger": silent,
        **{name.replace("_", "."): value for name, value in settings.items()},
    }


def librdkafka_connection(options: ConnectionOptions) -> dict[str, Any]:
    """The connection settings for a client that takes all settings of librdkafka. Fails if no broker answers."""
    parsed = options.connection_settings(allow_unknown=True)
    with errors_explained(), Cluster(parsed) as cluster:
        require_broker(cluster)
    others = {
        name: value
        for name, value in options.given_settings().items()
        if name in parsed.unknown or not name.startswith((*SECURITY_PREFIXES, "default.api.timeout.ms"))
    }
    return others | _librdkafka_security(parsed)


def _librdkafka_security(parsed: ConnectionSettings) -> dict[str, Any]:
    try:
        return parsed.librdkafka_security()
    except ClientError as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None


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
            return CommandError(f"{subject} does not exist", hint=HINTS[ErrorCode.unknown_topic_or_partition])
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
