"""The mover hands held records to their schedule shard, each of them once."""

import threading
from functools import partial
from typing import Any

import pytest
from tests.compat import confluent
from tests.compat.message import Message, values

from penstock.broker.coordinators.schedule import mover
from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.scheduling.schedule_shard import cut_chunks
from penstock.testing import EmbeddedBroker


def test_a_part_that_fails_does_not_bring_back_the_parts_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_REQUEST_BYTES", 1)  # each record is handed over on its own
    monkeypatch.setattr(mover, "cut_chunks", partial(cut_chunks, chunk_bytes=1))
    are_there = threading.Event()  # all batches, so that one look at the log finds them together
    moves: list[ScheduleRequest] = []
    real = ScheduleCoordinator.ask

    async def ask(schedule: ScheduleCoordinator, what: ScheduleRequest) -> Any:
        if what.what is ScheduleOperation.MOVE:
            if are_there.is_set():
                moves.append(what)
            if len(moves) in (0, 4):  # the fourth is not of the first batch
                raise ApiError(ErrorCode.coordinator_not_available)
        return await real(schedule, what)

    monkeypatch.setattr(ScheduleCoordinator, "ask", ask)
    with EmbeddedBroker() as broker:
        broker.create_topic("jobs", partitions=1, penstock_schedule_enable="true")
        held = (("penstock-deliver-after", b"1500"),)
        sent = [Message(b"%d" % number, headers=held) for number in range(6)]
        confluent.publish(broker.bootstrap_servers, "jobs", sent, batch_num_messages=2, linger_ms=50)
        are_there.set()
        found = values(confluent.read(broker.bootstrap_servers, "jobs", len(sent)))
        assert found == [message.value for message in sent]
        last = Message(b"last", headers=(("penstock-deliver-after", b"1"),))
        confluent.publish(broker.bootstrap_servers, "jobs", [last])
        assert values(confluent.read(broker.bootstrap_servers, "jobs", len(sent) + 1))[-1] == b"last"
    assert len(moves) == len(sent) + 2
