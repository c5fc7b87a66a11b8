"""A commit arrives, its reply is lost, and librdkafka sends the commit again when the member is no longer in the group.

Nothing of that reaches the application: `commit` only reports that the last attempt was refused.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from kio.schema.leave_group.v5.request import LeaveGroupRequest, MemberIdentity
from kio.schema.types import GroupId
from tests.application.apps import QUICK, committed
from tests.brokers import BrokerProcess
from tests.compat.raw_client import send_request
from tests.waiting import eventually

from penstock.client import Penstock
from penstock.client.wire.settings import Address

OFFSET_COMMIT = 8


class Proxy:
    """Forwards frames between clients and a broker. After `lose_reply`, it closes a connection instead of replying."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("localhost", 0))
        self.port: int = self._listening.getsockname()[1]
        self.broker: tuple[str, int] = ("", 0)
        self._arrived: Callable[[], None] | None = None
        self._lost: tuple[socket.socket, bytes] | None = None
        self.was_lost = threading.Event()

    def lose_reply(self, arrived: Callable[[], None]) -> None:
        """The next OffsetCommit is forwarded and not answered; `arrived` is called when the broker has replied."""
        self._arrived = arrived

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.broker) as broker:
            back = threading.Thread(target=self._forward_replies, args=(client, broker), daemon=True)
            back.start()
            for frame in frames(client):
                (api,) = struct.unpack_from(">h", frame, 4)
                if api == OFFSET_COMMIT and self._arrived is not None and self._lost is None:
                    self._lost = client, frame[8:12]
                broker.sendall(frame)
            shut_down(broker)
            back.join()

    def _forward_replies(self, client: socket.socket, broker: socket.socket) -> None:
        for frame in frames(broker):
            if self._lost == (client, frame[4:8]) and self._arrived is not None:
                self._arrived()
                self.was_lost.set()
                break
            client.sendall(frame)
        shut_down(client)


def frames(connection: socket.socket) -> Iterator[bytes]:
    with connection.makefile("rb") as stream, suppress(OSError):
        while len(head := stream.read(4)) == 4:
            yield head + stream.read(int.from_bytes(head))


def shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer has closed it
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def broker_behind_proxy(directory: Path) -> Iterator[tuple[BrokerProcess, Proxy]]:
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(Proxy()))
        settings = {"advertised.listeners": f"PLAINTEXT://localhost:{proxy.port}"}
        broker = BrokerProcess(directory / "data", settings).start()
        stack.callback(broker.stop)
        proxy.broker = broker.address
        threading.Thread(target=proxy.run, daemon=True).start()
        yield broker, proxy


def test_a_commit_that_was_sent_twice_may_have_succeeded(tmp_path: Path) -> None:
    with (
        broker_behind_proxy(tmp_path) as (broker, proxy),
        Penstock(f"localhost:{proxy.port}", settings=QUICK) as app,
    ):
        app.create_topic("orders", partitions=1)
        app.publish("orders", 0)
        with app.consumer("orders", group="billing", delivery="at-most-once") as consumer:
            eventually(lambda: consumer.poll(timeout="200ms"), what="the first message")
            member = MemberIdentity(member_id=consumer._membership.member_id)  # type: ignore[attr-defined]

            def leave() -> None:
                send_request(
                    Address(broker.address),
                    LeaveGroupRequest(group_id=GroupId("billing"), members=(member,)),
                )

            proxy.lose_reply(leave)
            app.publish("orders", 1)
            eventually(lambda: consumer.poll(timeout="200ms") or proxy.was_lost.is_set())
            # The offset is committed, so no member gets the message: it must be counted.
            assert consumer.figures.dropped == 1
            assert committed(f"localhost:{proxy.port}", "billing", "orders", 1) == {0: 2}
            app.publish("orders", 2)
            (message,) = eventually(lambda: consumer.poll(timeout="200ms"), what="the next message")
            assert message.value == b"2"
