"""A client that uses a running node as fast as it can gets what its quota says, on a clock that the test moves.

As in Apache Kafka, what is limited is the average over all windows, eleven of a second: a client may use eleven
seconds' worth at once and then has to wait, and one request passes after each wait. What is used within ten seconds
counts as a whole until the eleventh is over. So what is checked is that ten seconds in a row never have more than
eleven seconds' worth by more than 5 %, with requests that are small for the quota, and that a minute has what the quota
says.
"""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.alter_client_quotas.v1 import request as alter
from tests.unit.broker.raw_client import API_VERSIONS, Client, create_topic, fetch_v7, frame, running, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.network.connection import Connection
from penstock.broker.network.quotas import ClientQuotaManager
from penstock.broker.node import Node
from penstock.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, Meter

WINDOWS_S, ALL_BUT_ONE_S = 11.0, 10.0
SECONDS = 60.0
TOLERANCE = 1.05
BYTES_PER_SECOND = 50_000.0
PERCENT = 20.0


class Time:
    """Time passes only in requests, by `request_s` each, and where a client is made to wait."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.request_s = 0.001
        self.used: list[tuple[float, float]] = []  # when, and how much, by the quota of the test
        self.waits = 0
        monkeypatch.setattr(node.quotas, "_now_ms", lambda: math.floor(self.now_s * 1000))
        monkeypatch.setattr("penstock.broker.network.dispatch.perf_counter", self._perf_counter)
        monkeypatch.setattr(Connection, "throttle", lambda _, milliseconds: self._wait(milliseconds))
        record, throttle = Meter.record, ClientQuotaManager.throttle

        def note(meter: Meter, amount: float, now_ms: int) -> int:
            if meter.limit is not None:  # there is only the quota of the test
                self.used.append((self.now_s, meter.pending + amount))
            return record(meter, amount, now_ms)

        def throttle_now(quotas: ClientQuotaManager, kind: str, *asked: Any) -> int:
            connection, client_id, amount, *_ = asked
            return throttle(quotas, kind, connection, client_id, amount)  # at the time of this clock

        monkeypatch.setattr(Meter, "record", note)
        monkeypatch.setattr(ClientQuotaManager, "throttle", throttle_now)

    def _perf_counter(self) -> float:
        self.now_s += self.request_s
        return self.now_s

    def _wait(self, milliseconds: int) -> None:
        """The client's connection is not read meanwhile."""
        self.now_s += milliseconds / 1000
        self.waits += 1

    def most_in_a_row(self) -> float:
        """Return the most that was used within all windows but one, wherever they begin."""
        most = total = 0.0
        first = 0
        for when, amount in self.used:
            total += amount
            while self.used[first][0] <= when - ALL_BUT_ONE_S:
                total -= self.used[first][1]
                first += 1
            most = max(most, total)
        return most


def check(time: Time, per_second: float) -> None:
    total = sum(amount for _, amount in time.used)
    assert time.most_in_a_row() <= TOLERANCE * WINDOWS_S * per_second
    assert total <= TOLERANCE * (SECONDS + WINDOWS_S) * per_second
    # A client that always asks for more also gets it.
    assert total >= 0.8 * SECONDS * per_second


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        yield node


async def set_quota(node: Node, kind: str, limit: float) -> None:
    client = await WireClient.connect(node)
    entity = (alter.EntityData(entity_type="client-id", entity_name="test"),)
    entry = alter.EntryData(entity=entity, ops=(alter.OpData(key=kind, value=limit, remove=False),))
    answer = await client.ask(alter.AlterClientQuotasRequest(entries=(entry,), validate_only=False))
    assert not answer.entries[0].error_code
    await client.close()
    await until(lambda: kind in node.quotas._quotas.kinds)


async def use(time: Time, ask: Any) -> None:
    """Use the node for a minute of its time, as fast as it answers."""
    end = time.now_s + SECONDS
    while time.now_s < end:
        await ask()
    assert time.waits, "the client never reached its quota"


@pytest.mark.parametrize("record_bytes", [500, 2_000])
async def test_a_producer_gets_its_bytes_per_second(
    node: Node, monkeypatch: pytest.MonkeyPatch, record_bytes: int
) -> None:
    await set_quota(node, PRODUCER_BYTE_RATE, BYTES_PER_SECOND)
    time = Time(node, monkeypatch)
    time.kind = PRODUCER_BYTE_RATE
    client = await Client.connect(node)
    await use(time, lambda: client.produce("t", bytes(record_bytes)))
    log = node.partitions.get("t", 0).log
    assert log.size_bytes <= sum(amount for _, amount in time.used), "all that was appended counts"
    check(time, BYTES_PER_SECOND)


async def test_a_consumer_gets_its_bytes_per_second(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await Client.connect(node)
    await client.produce("t", bytes(2_000), acks=-1)
    await set_quota(node, CONSUMER_BYTE_RATE, BYTES_PER_SECOND)
    time = Time(node, monkeypatch)
    time.kind = CONSUMER_BYTE_RATE
    received = 0

    async def fetch() -> None:
        nonlocal received
        answer = await client.fetch([("t", 0, 0)])
        received += len(answer.one().records)

    await use(time, fetch)
    assert received == sum(amount for _, amount in time.used)
    check(time, BYTES_PER_SECOND)


async def test_a_client_gets_its_part_of_the_event_loop(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await set_quota(node, REQUEST_PERCENTAGE, PERCENT)
    time = Time(node, monkeypatch)
    time.kind, time.request_s = REQUEST_PERCENTAGE, 0.005
    client = await Client.connect(node)
    await use(time, lambda: client.ask(frame(API_VERSIONS, 0)))
    check(time, PERCENT)


async def test_two_connections_of_a_client_share_its_quota(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_quota(node, PRODUCER_BYTE_RATE, BYTES_PER_SECOND)
    time = Time(node, monkeypatch)
    time.kind = PRODUCER_BYTE_RATE
    clients = [await Client.connect(node) for _ in range(2)]

    async def produce() -> None:
        for client in clients:
            await client.produce("t", bytes(2_000))

    await use(time, produce)
    check(time, BYTES_PER_SECOND)


async def test_replies_come_before_the_wait(node: Node) -> None:
    """On the real clock: the reply of a request that exceeds the quota comes at once, and the next one is not read."""
    await set_quota(node, PRODUCER_BYTE_RATE, 1_000.0)
    client = await Client.connect(node)
    await client.produce("t", bytes(60_000))
    client.writer.write(fetch_v7([("t", 0, 0)]))
    (connection,) = node.server.connections
    assert 0 < connection.throttle_ms <= 60_000
    assert not connection.has_pending_replies
