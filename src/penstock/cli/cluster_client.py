"""How most verbs reach a cluster: through confluent-kafka, and with single requests for what confluent-kafka has no
call for.

`LibrdkafkaCluster` makes the clients of confluent-kafka, and `explain_kafka_error` turns their errors into
sentences. `send_request` sends one request to one broker, in the newest version that both sides know;
`request_from_coordinator` and `request_from_all_brokers` find the brokers to send it to.
"""

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

from penstock.broker.config.listeners import parse_address
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import OffsetSpec, OffsetSpecKind, resolve_offset
from penstock.protocol.schemas import schema_class

CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 10.0

Key = TypeVar("Key")


class PartitionName(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


class LibrdkafkaCluster:
    """A cluster by its bootstrap address. Connects on first use; raises CommandError when nothing answers."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._is_reachable = False

    @cached_property
    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient(self._settings({}))

    def producer(self, **settings: object) -> Any:
        from confluent_kafka import Producer

        return Producer(self._settings(settings))

    def consumer(self, **settings: object) -> Any:
        from confluent_kafka import Consumer

        return Consumer(self._settings(settings))

    def metadata(self) -> Any:
        """Brokers, and every topic with its partitions."""
        from confluent_kafka import KafkaException

        try:
            return self.admin.list_topics(timeout=REQUEST_TIMEOUT_S / 2)
        except KafkaException as error:
            raise explain_kafka_error(error, self.bootstrap) from None

    def topics(self, names: Iterable[str]) -> dict[str, Any]:
        """The metadata of these topics, each of which must exist."""
        known = self.metadata().topics
        for name in names:
            if name not in known:
                raise unknown_topic_error(name, list(known))
        return {name: known[name] for name in names}

    def places(self, names: Iterable[str]) -> list[PartitionName]:
        """Every partition of these topics."""
        return [
            PartitionName(name, index)
            for name, topic in self.topics(names).items()
            for index in sorted(topic.partitions)
        ]

    def wait(self, futures: Mapping[Key, Any]) -> dict[Key, Any]:
        """The results. Raises the first failure as a CommandError."""
        outcomes = self.wait_each(futures)
        for outcome in outcomes.values():
            if isinstance(outcome, CommandError):
                raise outcome
        return outcomes

    def wait_each(self, futures: Mapping[Key, Any]) -> dict[Key, Any]:
        """The result of each future, or a CommandError."""
        from concurrent.futures import TimeoutError as FutureTimeout

        from confluent_kafka import KafkaException

        outcomes: dict[Key, Any] = {}
        deadline = time.monotonic() + 2 * REQUEST_TIMEOUT_S
        for key, future in futures.items():
            try:
                outcomes[key] = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaException as error:
                outcomes[key] = explain_kafka_error(error, self.bootstrap, subject=str(key))
            except FutureTimeout:
                outcomes[key] = _timeout_error(self.bootstrap)
        return outcomes

    def offsets(self, places: Iterable[PartitionName], spec: Any) -> dict[PartitionName, int]:
        """The offset of each partition for an OffsetSpec; -1 where a timestamp lies beyond its end."""
        from confluent_kafka import TopicPartition

        asked = {TopicPartition(*place): spec for place in places}
        if not asked:
            return {}
        futures = self.admin.list_offsets(asked, request_timeout=REQUEST_TIMEOUT_S)
        found = self.wait(
            {PartitionName(key.topic, key.partition): future for key, future in futures.items()}
        )
        return {place: info.offset for place, info in found.items()}

    def ends(
        self, places: Iterable[PartitionName]
    ) -> tuple[dict[PartitionName, int], dict[PartitionName, int]]:
        """The earliest and the latest offset of each partition."""
        from confluent_kafka.admin import OffsetSpec

        places = list(places)
        return self.offsets(places, OffsetSpec.earliest()), self.offsets(places, OffsetSpec.latest())

    def alter_settings(
        self, kind: str, name: str, settings: Mapping[str, str], removed: Iterable[str]
    ) -> None:
        """Sets some settings of a topic or a group, and resets others to their defaults."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        changes = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in settings.items()
        ]
        changes += [
            ConfigEntry(setting, None, incremental_operation=AlterConfigOpType.DELETE) for setting in removed
        ]
        resource = ConfigResource(ConfigResource.Type[kind], name, incremental_configs=changes)
        answer = self.admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
        self.wait({name: answer[resource]})

    def _settings(self, settings: Mapping[str, object]) -> dict[str, object]:
        if not self._is_reachable:
            check_reachable(self.bootstrap)
            self._is_reachable = True
        quiet = logging.getLogger("penstock.cli.librdkafka")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
        common = {"bootstrap.servers": self.bootstrap, "client.id": "penstock-cli", "logger": quiet}
        return {**common, **{name.replace("_", "."): value for name, value in settings.items()}}


def explain_kafka_error(error: Any, bootstrap: str, subject: str = "") -> CommandError:
    """Converts a KafkaException or KafkaError into a sentence."""
    from confluent_kafka import KafkaError

    cause = error if isinstance(error, KafkaError) else error.args[0]
    what = subject or "this"
    match cause.code():
        case (
            KafkaError._ALL_BROKERS_DOWN | KafkaError._TRANSPORT | KafkaError._TIMED_OUT | KafkaError._RESOLVE
        ):
            return _timeout_error(bootstrap)
        case KafkaError._MSG_TIMED_OUT:
            return CommandError(f"{what}: the broker did not take it in time")
        case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC:
            return CommandError(f"{what} does not exist", hint="penstock topic list shows what does")
        case KafkaError._UNKNOWN_PARTITION:
            return CommandError(
                f"{what} has no such partition", hint="penstock topic describe shows what it has"
            )
        case KafkaError.INVALID_RECORD:
            return CommandError(
                f"{what}: the broker refused the record", hint="a compacted topic wants a key in each"
            )
        case KafkaError.GROUP_ID_NOT_FOUND:
            return CommandError(f"group {what} does not exist", hint="penstock group list shows what does")
        case KafkaError.NON_EMPTY_GROUP:
            return CommandError(f"group {what} has members", hint="stop its consumers first")
        case _:
            text = f"{subject}: {cause.str()}" if subject else cause.str()
            return CommandError(text, kafka_code=cause.code())


def check_reachable(bootstrap: str) -> None:
    """Fails at once with the reason, where a client library would retry for minutes."""
    reasons = []
    for text in bootstrap.split(","):
        try:
            address = parse_address(text)
        except ValueError as error:
            raise CommandError(f"--bootstrap: {error}", exit_code=EXIT_USAGE) from None
        try:
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reasons.append(f"{text.strip()} ({error.strerror or error})")
        else:
            return
    raise CommandError(
        f"no broker at {', '.join(reasons)}",
        hint="start one with `penstock serve`, or name another with --bootstrap or PENSTOCK_BOOTSTRAP",
    )


def _timeout_error(bootstrap: str) -> CommandError:
    return CommandError(
        f"the broker at {bootstrap} did not answer in time",
        hint="is it a Kafka port, and can the address that it advertises be reached from here? "
        "`penstock cluster info` shows it",
    )


def unknown_topic_error(name: str, known: list[str]) -> CommandError:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "penstock topic list shows what does"
    return CommandError(f"topic {name} does not exist", hint=hint)


Address = tuple[str, int]

SINGLE_REQUEST_TIMEOUT_S = 5.0
RESPONSE_BYTES_MAX = 64 << 20


class UnsupportedRequest(OSError):
    """The broker does not support this request."""


class FeatureLevels(NamedTuple):
    """The level of a feature in this cluster (0: disabled), and the range of levels that the broker supports."""

    level: int
    level_min: int
    level_max: int


def describe_features(address: Address) -> dict[str, FeatureLevels]:
    """The features that this broker supports; empty if it reports none."""
    # Before version 4, the response omits features whose minimum level is 0.
    answer = send_request(
        address,
        schema_class("api_versions.v4.request:ApiVersionsRequest")(
            client_software_name="penstock-cli", client_software_version="1"
        ),
    )
    levels = {str(entry.name): int(entry.max_version_level) for entry in answer.finalized_features}
    return {
        str(entry.name): FeatureLevels(
            levels.get(str(entry.name), 0), int(entry.min_version), int(entry.max_version)
        )
        for entry in answer.supported_features
    }


def broker_bytes(address: Address) -> int:
    """The bytes on disk of all partitions on this broker."""
    return sum(replica_bytes(address).values())


def replica_bytes(address: Address) -> dict[tuple[str, int], int]:
    """The bytes on disk of each partition on this broker."""
    request = schema_class("describe_log_dirs.v4.request:DescribeLogDirsRequest")(topics=None)
    return {
        (str(topic.name), int(partition.partition_index)): int(partition.partition_size)
        for folder in send_request(address, request).results
        for topic in folder.topics
        for partition in topic.partitions
    }


def send_request(address: Address, request: Any, *, timeout_s: float = SINGLE_REQUEST_TIMEOUT_S) -> Any:
    """Returns the response in the class of the version that was used. `request` has the newest wanted version.

    Raises OSError when the broker does not answer or the answer cannot be read; UnsupportedRequest when the broker
    does not support the request.
    """
    from penstock.client.errors import ClientError, UnsupportedVersion
    from penstock.client.wire.connection import Connection
    from penstock.client.wire.settings import ConnectionSettings

    settings = ConnectionSettings(
        bootstrap=(address,),
        client_id="penstock-cli",
        connect_timeout_ms=int(timeout_s * 1000),
        request_timeout_ms=int(timeout_s * 1000),
        answer_bytes_max=RESPONSE_BYTES_MAX,
    )
    try:
        with Connection(address, settings) as connection:
            return connection.call(request)
    except UnsupportedVersion as error:
        raise UnsupportedRequest(str(error)) from None
    except ClientError as error:
        raise OSError(str(error)) from None


GROUP_COORDINATOR: Final = 0
TRANSACTION_COORDINATOR: Final = 1
#: Coordinators may wait for replicas before they answer.
COORDINATOR_TIMEOUT_S: Final = 15.0

Reply = TypeVar("Reply")


class Coordinator(NamedTuple):
    node: int
    address: Address


def broker_addresses(cluster: LibrdkafkaCluster) -> list[Address]:
    found = sorted(cluster.metadata().brokers.values(), key=lambda broker: int(broker.id))
    return [(str(broker.host), int(broker.port)) for broker in found]


def request_from_all_brokers(
    cluster: LibrdkafkaCluster, question: Callable[[Address], Iterable[Reply]]
) -> list[Reply]:
    """The replies of all brokers together. Raises CommandError if a broker does not reply, as it may know more."""
    answers: list[Reply] = []
    for address in broker_addresses(cluster):
        try:
            answers += question(address)
        except UnsupportedRequest:
            continue
        except OSError as error:
            raise CommandError(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from None
    return answers


def find_coordinator(cluster: LibrdkafkaCluster, key: str, kind: int) -> Coordinator:
    """Raises CommandError."""
    request = schema_class("find_coordinator.v4.request:FindCoordinatorRequest")(
        key_type=kind, coordinator_keys=(key,)
    )
    for address in broker_addresses(cluster):
        try:
            (found,) = send_request(address, request).coordinators
        except OSError:
            continue
        raise_for_error(found, f"nobody coordinates {key} at present")
        return Coordinator(int(found.node_id), (str(found.host), int(found.port)))
    raise CommandError("no broker of the cluster can be reached at the address that it advertises")


def request_from_coordinator(cluster: LibrdkafkaCluster, key: str, kind: int, request: Any) -> Any:
    """Raises CommandError when the coordinator does not answer."""
    coordinator = find_coordinator(cluster, key, kind)
    try:
        return send_request(coordinator.address, request, timeout_s=COORDINATOR_TIMEOUT_S)
    except OSError as error:
        raise CommandError(
            f"node {coordinator.node}, which coordinates {key}, does not answer: {error}"
        ) from None


def raise_for_error(answer: Any, subject: str) -> None:
    """Raises CommandError."""
    if answer.error_code.value != 0:
        reason = getattr(answer, "error_message", None) or answer.error_code.name.replace("_", " ")
        raise CommandError(f"{subject}: {reason}")


def resolve_offsets(
    cluster: LibrdkafkaCluster, places: Sequence[PartitionName], position: OffsetSpec
) -> dict[PartitionName, int]:
    from confluent_kafka.admin import OffsetSpec

    first, end = cluster.ends(places)
    by_time: dict[PartitionName, int] = {}
    if position.kind is OffsetSpecKind.TIMESTAMP:
        by_time = cluster.offsets(places, OffsetSpec.for_timestamp(position.value))
    return {
        place: resolve_offset(position, first=first[place], end=end[place], at_timestamp=by_time.get(place))
        for place in places
    }
