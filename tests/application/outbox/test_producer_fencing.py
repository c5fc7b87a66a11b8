"""A transactional producer that is fenced gets an error, whatever it was about to do."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from penstock.client import Penstock
from penstock.client.outbox.kafka import TransactionalSender
from penstock.client.outbox.messages import OutboxRow, RelayInterrupted

ROW = partial(OutboxRow, partition=None, key=b"k", value=b"v", headers="[]")


@pytest.fixture
def topic(bootstrap: str, unique: Callable[[str], str]) -> str:
    with Penstock(bootstrap) as app:
        app.create_topic(name := unique("sales"), partitions=1)
    return name


def sender(bootstrap: str, topic: str) -> TransactionalSender:
    made = TransactionalSender(
        {"bootstrap.servers": bootstrap}, f"relay of {topic}", topic, threading.Event()
    )
    made.open()
    return made


@pytest.mark.parametrize("is_known", [False, True])
def test_a_relay_that_was_fenced_is_disturbed(bootstrap: str, topic: str, is_known: bool) -> None:
    """Where partitions were written to before, the first to say no is another request than where they were not."""
    first = sender(bootstrap, topic)
    if is_known:
        first.send([ROW(id=1, topic=topic, message_id="1")], {})
        first.commit()
    second = sender(bootstrap, topic)
    with pytest.raises(RelayInterrupted):
        first.send([ROW(id=2, topic=topic, message_id="2")], {})
    second.send([ROW(id=3, topic=topic, message_id="3")], {})
    second.commit()
