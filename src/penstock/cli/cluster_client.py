"""The one place that makes Kafka clients, and that turns their errors into sentences."""

import logging
import socket
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from penstock.broker.listeners import parse_address
from penstock.cli.failure import WRONG_USAGE, Failure

CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 10.0

Key = TypeVar("Key")


class Place(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


class Cluster:
    """A cluster by its bootstrap address. Connects on first use; raises Failure when nothing answers."""

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
            raise explain(error, self.bootstrap) from None

    def topics(self, names: Iterable[str]) -> dict[str, Any]:
        """The metadata of these topics, each of which must exist."""
        known = self.metadata().topics
        for name in names:
            if name not in known:
                raise no_such_topic(name, list(known))
        return {name: known[name] for name in names}

    def places(self, names: Iterable[str]) -> list[Place]:
        """Every partition of these topics."""
        return [
            Place(name, index)
            for name, topic in self.topics(names).items()
            for index in sorted(topic.partitions)
        ]

    def wait(self, futures: Mapping[Key, Any]) -> dict[Key, Any]:
        """The results, or the first failure as a sentence."""
        outcomes = self.wait_each(futures)
        for outcome in outcomes.values():
            if isinstance(outcome, Failure):
                raise outcome
        return outcomes

    def wait_each(self, futures: Mapping[Key, Any]) -> dict[Key, Any]:
        """For each, its result or a Failure."""
        from concurrent.futures import TimeoutError as FutureTimeout

        from confluent_kafka import KafkaException

        outcomes: dict[Key, Any] = {}
        deadline = time.monotonic() + 2 * REQUEST_TIMEOUT_S
        for key, future in futures.items():
            try:
                outcomes[key] = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaException as error:
                outcomes[key] = explain(error, self.bootstrap, subject=str(key))
            except FutureTimeout:
                outcomes[key] = _no_answer(self.bootstrap)
        return outcomes

    def offsets(self, places: Iterable[Place], spec: Any) -> dict[Place, int]:
        """The offset of each partition for an OffsetSpec; -1 where a timestamp lies beyond its end."""
        from confluent_kafka import TopicPartition

        asked = {TopicPartition(*place): spec for place in places}
        if not asked:
            return {}
        futures = self.admin.list_offsets(asked, request_timeout=REQUEST_TIMEOUT_S)
        found = self.wait({Place(key.topic, key.partition): future for key, future in futures.items()})
        return {place: info.offset for place, info in found.items()}

    def ends(self, places: Iterable[Place]) -> tuple[dict[Place, int], dict[Place, int]]:
        """First and next offset of each partition."""
        from confluent_kafka.admin import OffsetSpec

        places = list(places)
        return self.offsets(places, OffsetSpec.earliest()), self.offsets(places, OffsetSpec.latest())

    def alter_settings(
        self, kind: str, name: str, settings: Mapping[str, str], removed: Iterable[str]
    ) -> None:
        """Of a topic or a group: set some, and return others to their defaults."""
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
            reach(self.bootstrap)
            self._is_reachable = True
        quiet = logging.getLogger("penstock.cli.librdkafka")
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
        common = {"bootstrap.servers": self.bootstrap, "client.id": "penstock-cli", "logger": quiet}
        return {**common, **{name.replace("_", "."): value for name, value in settings.items()}}


def explain(error: Any, bootstrap: str, subject: str = "") -> Failure:
    """A KafkaException or KafkaError as a sentence."""
    from confluent_kafka import KafkaError

    cause = error if isinstance(error, KafkaError) else error.args[0]
    what = subject or "this"
    match cause.code():
        case (
            KafkaError._ALL_BROKERS_DOWN | KafkaError._TRANSPORT | KafkaError._TIMED_OUT | KafkaError._RESOLVE
        ):
            return _no_answer(bootstrap)
        case KafkaError._MSG_TIMED_OUT:
            return Failure(f"{what}: the broker did not take it in time")
        case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC:
            return Failure(f"{what} does not exist", hint="penstock topic list shows what does")
        case KafkaError._UNKNOWN_PARTITION:
            return Failure(f"{what} has no such partition", hint="penstock topic describe shows what it has")
        case KafkaError.INVALID_RECORD:
            return Failure(
                f"{what}: the broker refused the record", hint="a compacted topic wants a key in each"
            )
        case KafkaError.GROUP_ID_NOT_FOUND:
            return Failure(f"group {what} does not exist", hint="penstock group list shows what does")
        case KafkaError.NON_EMPTY_GROUP:
            return Failure(f"group {what} has members", hint="stop its consumers first")
        case _:
            text = f"{subject}: {cause.str()}" if subject else cause.str()
            return Failure(text, kafka_code=cause.code())


def reach(bootstrap: str) -> None:
    """Fail at once, with the reason, where a client library would go on trying for minutes."""
    reasons = []
    for text in bootstrap.split(","):
        try:
            address = parse_address(text)
        except ValueError as error:
            raise Failure(f"--bootstrap: {error}", exit_code=WRONG_USAGE) from None
        try:
            socket.create_connection(address, timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reasons.append(f"{text.strip()} ({error.strerror or error})")
        else:
            return
    raise Failure(
        f"no broker at {', '.join(reasons)}",
        hint="start one with `penstock serve`, or name another with --bootstrap or PENSTOCK_BOOTSTRAP",
    )


def _no_answer(bootstrap: str) -> Failure:
    return Failure(
        f"the broker at {bootstrap} did not answer in time",
        hint="is it a Kafka port, and can the address that it advertises be reached from here? "
        "`penstock cluster info` shows it",
    )


def no_such_topic(name: str, known: list[str]) -> Failure:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "penstock topic list shows what does"
    return Failure(f"topic {name} does not exist", hint=hint)
