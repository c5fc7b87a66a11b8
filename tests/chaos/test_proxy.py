"""The network itself: a cut holds bytes one way and closes nothing; healing delivers late or resets."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.chaos.network import ProxyProcess, both_ways, out_of
from tests.chaos.proxy import OUTSIDE, Path
from tests.waiting import eventually

ONE, TWO = "127.0.0.11", "127.0.0.12"
SILENCE_S = 0.3  # how long nothing must arrive for us to believe that nothing will


class Echo:
    """A node that sends back what it gets, and keeps it."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.received = b""
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.connections.append(connection)
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                self.received += data
                connection.sendall(data)

    def close(self) -> None:
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[ProxyProcess]:
    process = ProxyProcess()
    yield process
    process.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def door(proxy: ProxyProcess, echo: Echo) -> tuple[str, int]:
    """Where node 2 is reached; node 1 has a door too, so that its address is known."""
    proxy.open(1, ONE, ("127.0.0.1", 1))
    return TWO, proxy.open(2, TWO, echo.address)


@contextlib.contextmanager
def called(door: tuple[str, int], source: str = ONE) -> Iterator[socket.socket]:
    with socket.create_connection(door, timeout=10, source_address=(source, 0)) as connection:
        yield connection


def called_by_family(family: socket.AddressFamily, door: tuple[str, int]) -> socket.socket:
    """Unbound; a socket of the newer family reaches the older one by mapped addresses."""
    caller = socket.socket(family)
    caller.settimeout(10)
    caller.connect(door if family == socket.AF_INET else (f"::ffff:{door[0]}", door[1]))
    return caller


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def is_silent(connection: socket.socket) -> bool:
    """Neither bytes nor an end."""
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)
    return False


def test_bytes_pass_both_ways(door: tuple[str, int]) -> None:
    data = b"x" * 3_000_000
    with called(door) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert receive(connection, len(data)) == data
        sender.join()


def test_a_cut_holds_requests_and_healing_delivers_them(
    proxy: ProxyProcess, door: tuple[str, int], echo: Echo
) -> None:
    with called(door) as connection:
        assert exchange(connection, b"before") == b"before"
        proxy.cut([Path("1", "2")])
        connection.sendall(b"during")
        assert is_silent(connection)
        assert echo.received == b"before"
        assert proxy.heal() == 1
        assert receive(connection, 6) == b"during"


def test_a_cut_of_the_way_back_lets_requests_through(
    proxy: ProxyProcess, door: tuple[str, int], echo: Echo
) -> None:
    with called(door) as connection:
        assert exchange(connection, b"before") == b"before"
        proxy.cut([Path("2", "1")])
        connection.sendall(b"during")
        eventually(lambda: echo.received == b"beforeduring")
        assert is_silent(connection)
        proxy.heal()
        assert receive(connection, 6) == b"during"


def test_healing_with_a_reset_delivers_nothing(
    proxy: ProxyProcess, door: tuple[str, int], echo: Echo
) -> None:
    with called(door) as connection:
        assert exchange(connection, b"before") == b"before"
        proxy.cut(both_ways(1, [2]))
        connection.sendall(b"during")
        assert is_silent(connection)
        proxy.heal(reset=True)
        with pytest.raises(ConnectionError):
            assert receive(connection, 1) == b"never"
        assert echo.received == b"before"


def test_a_cut_is_of_one_pair_only(proxy: ProxyProcess, door: tuple[str, int]) -> None:
    with called(door) as node, called(door, "127.0.0.1") as client:
        proxy.cut(both_ways(1, [2]))
        assert exchange(client, b"hello") == b"hello"
        node.sendall(b"hello")
        assert is_silent(node)
        assert proxy.links() == [Path("1", "2"), Path(OUTSIDE, "2")]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_process_is_known_without_an_address_of_its_own(
    proxy: ProxyProcess, door: tuple[str, int], family: socket.AddressFamily
) -> None:
    proxy.introduce(7, os.getpid())
    with called_by_family(family, door) as ours, called(door) as other:
        assert exchange(ours, b"hello") == b"hello"
        assert exchange(other, b"hello") == b"hello"
        assert proxy.links() == [Path("1", "2"), Path("7", "2")]
        proxy.cut(both_ways(7, [2]))
        ours.sendall(b"hello")
        assert is_silent(ours)


def test_no_connection_succeeds_while_either_direction_is_cut(
    proxy: ProxyProcess, door: tuple[str, int], echo: Echo
) -> None:
    proxy.cut(out_of(2, [1]))
    with called(door) as connection:
        connection.sendall(b"hello")
        assert is_silent(connection)
        assert not echo.connections
        proxy.heal()
        assert receive(connection, 5) == b"hello"


def test_a_hang_up_is_not_heard_across_a_cut(proxy: ProxyProcess, door: tuple[str, int], echo: Echo) -> None:
    with called(door) as connection:
        assert exchange(connection, b"before") == b"before"
        proxy.cut(both_ways(1, [2]))
        echo.close()
        assert is_silent(connection)
        proxy.heal()
        assert receive(connection, 1) == b""


def test_a_hang_up_is_heard_otherwise(door: tuple[str, int], echo: Echo) -> None:
    with called(door) as connection:
        assert exchange(connection, b"before") == b"before"
        echo.hang_up()
        assert receive(connection, 1) == b""


def test_a_dead_node_closes_what_knocks(proxy: ProxyProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with called((TWO, proxy.open(2, TWO, address))) as connection, contextlib.suppress(ConnectionResetError):
        assert receive(connection, 1) == b""


def test_refusing_resets_old_and_new_connections(proxy: ProxyProcess, door: tuple[str, int]) -> None:
    with called(door) as old:
        assert exchange(old, b"before") == b"before"
        proxy.refuse([Path("1", "2")])
        with contextlib.suppress(ConnectionResetError):
            assert receive(old, 1) == b""
    with called(door) as new, contextlib.suppress(ConnectionResetError):
        assert receive(new, 1) == b""
    proxy.heal()
    with called(door) as connection:
        assert exchange(connection, b"after") == b"after"


def test_delay_keeps_order_and_delivers_all(proxy: ProxyProcess, door: tuple[str, int], echo: Echo) -> None:
    with called(door) as connection:
        proxy.delay(both_ways(1, [2]), 0.1)
        connection.sendall(b"one")
        proxy.delay(both_ways(1, [2]), 0.0)
        connection.sendall(b"two")
        assert receive(connection, 6) == b"onetwo"
