"""`python -m tests.fuzz --state`: valid requests with hostile values of every API, against one node and three.

After each burst a well-behaved client must be able to create a topic, produce, consume, commit and end a transaction;
now and then the nodes are restarted, and it must be able to again, with every record that was acknowledged. Settings
that limit clients by their meaning are undone at once (tests/fuzz/settings.py names them), or after a restart under
them; all others stay in force during the checks, and are undone later.
"""

import asyncio
import math
import random
import re
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import BrokerProcess, ClusterProcesses
from tests.fuzz.hostile import FIELD, HostileRequests, Knowledge
from tests.fuzz.operator import Operator
from tests.fuzz.settings import LIMITING, Settings
from tests.ports import free_address
from tests.waiting import eventually

from penstock.broker.config.definitions import NODE_SETTINGS

CALM, CALM_GROUP, CALM_TRANSACTION = "calm", "calm-readers", "calm-writer"
PREY = ("prey-a", "prey-b", "prey-compacted")
PARTITIONS = 3
RECORDS_PER_CHECK = 20
FRAMES_PER_CONNECTION = 25
CONNECTIONS = 16
#: How long a connection waits for replies that may never come: long polls, members that wait for others.
REPLY_WAIT_S = 2.0
#: A client gives up after this long; a hang, on however slow a machine.
PATIENCE_S = 90.0
_EXISTS, _IS_GONE = KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.UNKNOWN_TOPIC_OR_PART
#: Of the topics that the well-behaved client writes to, so that no default of the brokers deletes what is in them.
KEPT = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}
LIMITS_PER_RESTART = 3
INTERNAL_ERRORS, MALFORMED = "penstock_internal_errors_total", "penstock_malformed_frames_total"
_CONFIG_CHANGES = (33, 44)  # AlterConfigs and IncrementalAlterConfigs
SETTINGS = {
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "share.coordinator.state.topic.num.partitions": "2",
    "penstock.create.topics.partitions.max": "20",
    "penstock.flush": "never",
}


class Nodes:
    """One node alone, or three of a cluster, each with an endpoint for its metrics."""

    def __init__(self, folder: Path, count: int) -> None:
        if count == 1:
            self._nodes: list[BrokerProcess] = [BrokerProcess(folder, SETTINGS, log=folder / "log")]
            folder.mkdir(parents=True)
        else:
            self._cluster = ClusterProcesses(folder, count=count, settings=SETTINGS)
            self._nodes = list(self._cluster.nodes.values())
        self._http = {}
        for node in self._nodes:
            host, port = free_address("127.0.0.1")
            node.settings["penstock.http.listen"] = self._http[node] = f"{host}:{port}"

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self._nodes)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [node.address for node in self._nodes]

    def __len__(self) -> int:
        return len(self._nodes)

    def operator(self) -> Operator:
        addresses = dict(enumerate(self.addresses, start=1))
        return Operator(addresses, min_isr=str(min(2, len(self))), patience_s=PATIENCE_S)

    def start(self) -> None:
        for node in self._nodes:
            node.launch()
        for node in self._nodes:
            node.await_ready()

    def restart(self, *, kill: bool) -> None:
        for node in self._nodes:
            code = node.kill() if kill else node.stop()
            assert kill or code == 0, f"{node} ended with {code}:\n{''.join(node.output)}"
        self.start()

    def stop(self) -> None:
        for node in self._nodes:
            node.kill()

    def check_health(self) -> Counter[str]:
        """Raises AssertionError for a node that has ended, failed inside, or written a traceback."""
        counts: Counter[str] = Counter()
        for node in self._nodes:
            metrics = check_node(node, self._http[node])
            for name in (INTERNAL_ERRORS, MALFORMED):
                counts[name] += int(metrics[name])
        return counts


def check_node(node: BrokerProcess, http: str) -> dict[str, float]:
    """Return its metrics. Raises AssertionError if it has ended, failed inside, or written a traceback."""
    assert node.log is not None
    log = node.log.read_text(errors="replace")
    assert "Traceback" not in log, (
        f"{node} wrote a traceback:\n{log[max(log.index('Traceback') - 2000, 0) :][:6000]}"
    )
    metrics = eventually(lambda: _metrics(node, http), within_s=PATIENCE_S, what=f"metrics of {node}")
    assert metrics[INTERNAL_ERRORS] == 0, f"{node} counts {metrics[INTERNAL_ERRORS]:.0f} internal errors"
    return metrics


def _metrics(node: BrokerProcess, http: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=PATIENCE_S) as reply:
            text = reply.read().decode()
    except OSError as error:
        raise AssertionError(f"{node} does not answer: {error}\n{''.join(node.output)}") from None
    return {name: float(value) for name, value in re.findall(r"^(\w+) ([0-9.e+-]+)$", text, re.MULTILINE)}


@dataclass
class WellBehaved:
    """A client that does what every client does, and remembers what was acknowledged."""

    bootstrap_servers: str
    replicas: int
    #: How it logs in.
    security: dict[str, Any] = field(default_factory=dict)
    acknowledged: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    checks: int = 0

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, **self.security})

    def disconnect(self) -> None:
        """Leaves room for others where few may connect."""
        del self._admin

    def prepare(self) -> None:
        self.create((CALM, FIELD, *PREY))

    def create(self, topics: Iterable[str]) -> None:
        """Creates them and waits until they are led."""
        new = [
            NewTopic(
                topic,
                PARTITIONS,
                self.replicas,
                config={"cleanup.policy": "compact"} if topic == "prey-compacted" else KEPT,
            )
            for topic in topics
        ]
        self._change(lambda: self._admin.create_topics(new, operation_timeout=PATIENCE_S), _EXISTS)

    def _change(self, ask: Callable[[], dict[str, Future[None]]], done: int) -> None:
        """Asks again where the library dropped its connection to a broker that left the metadata for a moment.

        librdkafka repeats other requests after that by itself, but not those of its admin client. The first may have
        been carried out: then the broker answers `done`.
        """
        ignored: set[int] = set()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            errors = [error.args[0] for future in ask().values() if (error := future.exception())]
            left = [error for error in errors if error.code() not in ignored]
            if not left:
                return
            if {error.code() for error in left} != {
                KafkaError._DESTROY_BROKER
            } or time.monotonic() > deadline:
                raise KafkaException(left[0])
            ignored = {done}

    def check(self) -> None:
        """Raises AssertionError, naming what did not work."""
        self.checks += 1
        fresh = f"calm-{self.checks}"
        try:
            self.create([fresh])
            sent = self._produce((CALM, FIELD, fresh), {})
            self._produce((CALM,), {"transactional.id": CALM_TRANSACTION})
            self._consume_and_commit()
            self._read_back([key for key in sent if key[0] != CALM])
            self._change(lambda: self._admin.delete_topics([fresh], operation_timeout=PATIENCE_S), _IS_GONE)
            self.acknowledged = {key: value for key, value in self.acknowledged.items() if key[0] != fresh}
        except KafkaException as error:
            raise AssertionError(
                f"a well-behaved client was refused in check {self.checks}: {error}; {self._views()}"
            ) from error

    def _views(self) -> str:
        """What each node tells a new client, so that a fault of the nodes can be told from one of the old client."""
        found = []
        for address in self.bootstrap_servers.split(","):
            try:
                view = AdminClient({"bootstrap.servers": address, **self.security}).list_topics(timeout=10)
            except KafkaException as error:
                found.append(f"{address}: {error}")
            else:
                found.append(f"{address}: brokers {sorted(view.brokers)}, controller {view.controller_id}")
        return "; ".join(found)

    def read_everything(self) -> None:
        """Every record that was ever acknowledged is there, with its value."""
        self._read_back(list(self.acknowledged))

    def knowledge(self) -> Knowledge:
        metadata = self._admin.list_topics(timeout=PATIENCE_S)
        described = self._admin.describe_cluster(request_timeout=PATIENCE_S).result()
        ids = {topic: self._topic_id(topic) for topic in (FIELD, *PREY) if topic in metadata.topics}
        return Knowledge(
            cluster_id=described.cluster_id,
            node_ids=tuple(metadata.brokers),
            field_id=ids[FIELD],
            topic_ids=tuple(id for topic, id in ids.items() if topic != FIELD),
        )

    def _topic_id(self, topic: str) -> uuid.UUID:
        description = self._admin.describe_topics(TopicCollection([topic]), request_timeout=PATIENCE_S)
        try:
            id = description[topic].result().topic_id
        except KafkaException:
            return uuid.UUID(int=0)
        high, low = id.get_most_significant_bits(), id.get_least_significant_bits()
        return uuid.UUID(int=((high & (2**64 - 1)) << 64) | (low & (2**64 - 1)))

    def _produce(self, topics: Iterable[str], settings: dict[str, Any]) -> list[tuple[str, int, int]]:
        delivered: list[tuple[str, int, int]] = []
        failed: list[KafkaError] = []

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(error)
                return
            key = (message.topic(), message.partition(), message.offset())
            self.acknowledged[key] = message.value()
            delivered.append(key)

        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                **self.security,
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.timeout.ms": int(PATIENCE_S * 1000),
                "transaction.timeout.ms": int(PATIENCE_S * 1000),
                **settings,
            }
        )
        if settings:
            producer.init_transactions(PATIENCE_S)
            producer.begin_transaction()
        for topic in topics:
            for number in range(RECORDS_PER_CHECK):
                value = f"{self.checks}:{number}".encode()
                producer.produce(topic, value, partition=number % PARTITIONS, on_delivery=on_delivery)
        left = producer.flush(PATIENCE_S)
        assert (left, failed) == (0, []), f"{left} records have no answer, these were refused: {failed[:5]}"
        if settings:
            producer.commit_transaction(PATIENCE_S)
        return delivered

    def _consume_and_commit(self) -> None:
        """A group goes on where it was, up to the last record of the topic that was acknowledged."""
        wanted: dict[int, int] = {}
        for topic, partition, offset in self.acknowledged:
            if topic == CALM:
                wanted[partition] = max(offset, wanted.get(partition, -1))
        consumer = self._consumer(CALM_GROUP, "read_committed")
        try:
            consumer.subscribe([CALM])
            deadline = time.monotonic() + PATIENCE_S
            committed: dict[int, int] = {}
            while any(committed.get(partition, 0) <= offset for partition, offset in wanted.items()):
                assert time.monotonic() < deadline, f"{CALM_GROUP} is at {committed} of {wanted}"
                if consumer.consume(500, 0.2):
                    consumer.commit(asynchronous=False)
                places = [TopicPartition(CALM, partition) for partition in wanted]
                try:
                    committed = {at.partition: at.offset for at in consumer.committed(places, PATIENCE_S)}
                except KafkaException as error:
                    # The library tells this of a coordinator that has just moved, and asks the new one next time.
                    if error.args[0].code() != KafkaError.NOT_COORDINATOR:
                        raise
        finally:
            consumer.close()

    def _read_back(self, keys: list[tuple[str, int, int]]) -> None:
        missing = {key: self.acknowledged[key] for key in keys}
        consumer = self._consumer("calm-auditors", "read_uncommitted")
        try:
            starts: dict[tuple[str, int], int] = {}
            for topic, partition, offset in keys:
                starts[topic, partition] = min(offset, starts.get((topic, partition), offset))
            consumer.assign([TopicPartition(*place, offset) for place, offset in starts.items()])
            deadline = time.monotonic() + PATIENCE_S
            while missing:
                assert time.monotonic() < deadline, (
                    f"{len(missing)} acknowledged records cannot be read: {[*missing][:3]}"
                )
                for message in consumer.consume(500, 0.2):
                    if message.error() is None:
                        value = missing.pop((message.topic(), message.partition(), message.offset()), None)
                        assert value in (None, message.value()), (
                            f"another record is at the place of {value!r}"
                        )
        finally:
            consumer.close()

    def _consumer(self, group: str, isolation: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                **self.security,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": isolation,
            }
        )


async def attack(cluster: Nodes, requests: HostileRequests, count: int) -> Counter[str]:
    """Sends `count` requests over several connections at once, and counts how each of them ended."""
    seen: Counter[str] = Counter()
    apis: dict[int, int] = {}  # how many requests of each were answered

    async def attacker(share: int, operator: Operator) -> None:
        sent = 0
        while sent < share:
            address = requests.chance.choice(cluster.addresses)
            sent += await _one_connection(requests, apis, seen, address, share - sent, operator)

    async with cluster.operator() as operator:
        await asyncio.gather(*(attacker(count // CONNECTIONS, operator) for _ in range(CONNECTIONS)))
        await operator.undo_limits()
    seen["apis"] = len(apis)
    seen["apis_answered"] = sum(map(bool, apis.values()))
    return seen


async def _one_connection(
    requests: HostileRequests,
    apis: dict[int, int],
    seen: Counter[str],
    address: tuple[str, int],
    most: int,
    operator: Operator,
) -> int:
    """Sends one request after another, until the node closes the connection or leaves one without an answer."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError) as error:
        raise AssertionError(f"{address} accepts no connections: {error}") from error
    sent = 0
    try:
        while sent < min(most, FRAMES_PER_CONNECTION):
            api, version, frame = requests.frame()
            apis.setdefault(api, 0)
            writer.write(frame)
            sent += 1
            # A change of settings that is decided after `undo_limits` would limit the well-behaved client.
            async with asyncio.timeout(PATIENCE_S if api in _CONFIG_CHANGES else REPLY_WAIT_S):
                reply = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            seen["answered"] += 1
            apis[api] += 1
            requests.learn(api, version, reply)
            await _undo_limits(requests, operator, seen)
    except TimeoutError:
        seen["without_answer"] += 1
    except (OSError, asyncio.IncompleteReadError):
        seen["cut_off"] += 1
    finally:
        writer.transport.abort()
    await _undo_limits(requests, operator, seen)
    seen["requests"] += sent
    return sent


async def _undo_limits(requests: HostileRequests, operator: Operator, seen: Counter[str]) -> None:
    if requests.limited:
        seen["limits"] += len(requests.limited)
        requests.limited.clear()
        await operator.undo_limits()


async def _limit(cluster: Nodes, chance: random.Random) -> None:
    """Set what limits clients, for a restart under it."""
    settings = Settings(chance)
    async with cluster.operator() as operator:
        for _ in range(LIMITS_PER_RESTART):
            name = chance.choice(sorted(LIMITING))
            resource = chance.choice(("", str(chance.randint(1, len(cluster)))))
            await operator.limit(resource, name, settings.value(NODE_SETTINGS[name]))


async def _undo(cluster: Nodes, *, everything: bool) -> None:
    async with cluster.operator() as operator:
        await (operator.undo_everything() if everything else operator.undo_limits())


def run(
    folder: Path, *, nodes: int, requests: int, seed: int, bursts: int, seconds_max: float = math.inf
) -> dict[str, Any]:
    """Raises AssertionError when the well-behaved client is harmed; returns the report.

    The burst that is under way after `seconds_max` is the last one.
    """
    chance = random.Random(seed)
    cluster = Nodes(folder, nodes)
    cluster.start()
    totals: Counter[str] = Counter()
    started = time.monotonic()
    try:
        client = WellBehaved(cluster.bootstrap_servers, replicas=nodes)
        client.prepare()
        client.check()
        for burst in range(bursts):
            hostile = HostileRequests(chance.getrandbits(32), client.knowledge())
            seen = asyncio.run(attack(cluster, hostile, requests // bursts))
            for name in ("apis", "apis_answered"):
                totals[name] = max(totals[name], seen.pop(name))
            totals.update(seen)
            is_last = burst == bursts - 1 or time.monotonic() - started >= seconds_max
            client.check()
            cluster.check_health()
            if is_last or chance.random() < 0.2:
                client.disconnect()
                asyncio.run(_limit(cluster, chance))
                cluster.restart(kill=chance.random() < 0.5)
                asyncio.run(_undo(cluster, everything=False))
                client.connect()
                totals["restarts"] += 1
                client.check()
            if is_last or chance.random() < 0.3:
                asyncio.run(_undo(cluster, everything=True))
                totals["undone"] += 1
                client.check()
            if is_last:
                break
        client.read_everything()
        counts = cluster.check_health()
    except AssertionError as error:
        raise AssertionError(f"after {totals['requests']} requests and a burst: {error}") from error
    finally:
        cluster.stop()
    return {
        "seed": seed,
        "nodes": nodes,
        **totals,
        "malformed": counts[MALFORMED],
        "checks": client.checks,
        "acknowledged_and_read": len(client.acknowledged),
        "seconds": round(time.monotonic() - started, 1),
    }
