"""TLS on a node's listeners: who gets in, as whom, and what happens to everything else that arrives there."""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.unit.broker.raw_client import create_topic, new_node, produce, turn_until
from tests.waiting import eventually_async

from penstock.broker.environment import StartFailed
from penstock.broker.node import Node
from penstock.security.principal import ANONYMOUS, Principal

#: ApiVersions v0, correlation id 7, client id "c".
API_VERSIONS = struct.pack(">ihhih", 11, 18, 0, 7, 1) + b"c"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def tls_settings(authority: Authority, **more: str) -> dict[str, str]:
    return {
        "listeners": "SSL://127.0.0.1:0",
        "ssl.keystore.location": str(authority.issue("node")),
        "ssl.truststore.location": str(authority.certificate),
        **{name.replace("_", "."): value for name, value in more.items()},
    }


@asynccontextmanager
async def running(tmp_path: Path, settings: dict[str, str]) -> AsyncIterator[Node]:
    node = new_node(tmp_path, **settings)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def client_context(authority: Authority, certificate: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(node: Node, context: ssl.SSLContext | None, **more: object) -> Streams:
    return await asyncio.open_connection("127.0.0.1", node.listeners[0].port, ssl=context, **more)  # type: ignore[arg-type]


async def ask(streams: Streams, request: bytes = API_VERSIONS) -> bytes:
    reader, writer = streams
    writer.write(request)
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(size)


async def until(reached) -> None:
    async def check() -> bool:
        return reached()

    await eventually_async(check)


def failures(node: Node) -> dict[str, int]:
    return {kind: count for (_, kind), count in node.metrics.authentication_failures.items()}


def principals(node: Node) -> list[Principal]:
    return [connection.principal for connection in node.server.connections]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_without_a_certificate_is_anonymous(tmp_path, authority, version):
    async with running(tmp_path, tls_settings(authority)) as node:
        context = client_context(authority)
        context.minimum_version = context.maximum_version = version
        streams = await connect(node, context)
        assert (await ask(streams))[:4] == struct.pack(">i", 7)
        assert principals(node) == [ANONYMOUS]
        assert node.metrics.tls_handshakes == {"SSL": 1}
        assert node.server.unauthenticated_counts() == {"SSL": 0}
        streams[1].close()
        await until(lambda: not node.server.connections)


async def test_the_certificate_of_a_client_names_its_principal(tmp_path, authority):
    settings = tls_settings(
        authority, ssl_client_auth="required", ssl_principal_mapping_rules="RULE:^CN=(.*?),.*$/$1/U"
    )
    async with running(tmp_path, settings) as node:
        streams = await connect(node, client_context(authority, authority.issue("alice")))
        await ask(streams)
        assert principals(node) == [Principal("User", "ALICE")]
        streams[1].close()


async def test_certificates_are_asked_for_as_configured(tmp_path, authority, caplog):
    caplog.set_level(logging.WARNING, "penstock.server")
    async with running(tmp_path, tls_settings(authority, ssl_client_auth="required")) as node:
        for certificate in (
            None,
            authority.issue("old", expired=True),
            Authority(tmp_path / "b").issue("eve"),
        ):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await ask(await connect(node, client_context(authority, certificate)))
        await until(lambda: failures(node) == {"certificate": 3})
        assert "has no certificate" in caplog.records[0].reason
        assert not node.server.unauthenticated_counts()["SSL"]
    (tmp_path / "second").mkdir()
    async with running(tmp_path / "second", tls_settings(authority, ssl_client_auth="requested")) as node:
        streams = await connect(node, client_context(authority))
        await ask(streams)
        assert principals(node) == [ANONYMOUS]
        streams[1].close()


@pytest.mark.parametrize(
    ("rule", "subject"), [("RULE:^CN=(.*?),.*$/$1/U", "anonymous"), ("RULE:^CN=(.*?),.*$/$1/", "*")]
)
async def test_no_certificate_names_everybody_or_a_client_without_one(
    tmp_path, authority, caplog, rule, subject
):
    """Access rules for all clients, or super users, would be those of one certificate."""
    caplog.set_level(logging.WARNING, "penstock.server")
    settings = tls_settings(authority, ssl_client_auth="required", ssl_principal_mapping_rules=rule)
    async with running(tmp_path, settings) as node:
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(await connect(node, client_context(authority, authority.issue(subject, file="c.pem"))))
        assert failures(node) == {"certificate": 1}
        assert f"no user can be named {subject.upper()}" in caplog.records[0].reason


async def test_a_subject_that_no_rule_fits_is_refused(tmp_path, authority):
    settings = tls_settings(
        authority, ssl_client_auth="required", ssl_principal_mapping_rules="RULE:^CN=bob,.*$/bob/"
    )
    async with running(tmp_path, settings) as node:
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(await connect(node, client_context(authority, authority.issue("alice"))))
        assert failures(node) == {"certificate": 1}


async def test_a_client_checks_the_host_and_the_authority(tmp_path, authority):
    async with running(tmp_path, tls_settings(authority)) as node:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await connect(node, client_context(authority), server_hostname="other")
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
            await connect(node, client_context(Authority(tmp_path / "b")))
        await until(lambda: not node.server.connections)


async def test_plaintext_on_a_tls_listener_is_one_line_in_the_log(tmp_path, authority, caplog):
    caplog.set_level(logging.WARNING, "penstock.server")
    async with running(tmp_path, tls_settings(authority)) as node:
        for _ in range(20):
            reader, writer = await connect(node, None)
            writer.write(API_VERSIONS)
            assert await reader.read() == b""
            writer.close()
        assert failures(node) == {"plaintext": 20}
        reasons = [record.reason for record in caplog.records if hasattr(record, "reason")]
        assert reasons
        assert len(reasons) < 20
        assert "security.protocol=SSL" in reasons[0]


async def test_tls_on_a_plaintext_listener_is_told_to_the_client_and_the_log(tmp_path, authority, caplog):
    caplog.set_level(logging.WARNING, "penstock.server")
    async with running(tmp_path, {}) as node:
        with pytest.raises(ssl.SSLError, match=r"(?i)handshake.failure"):
            await connect(node, client_context(authority))
        assert failures(node) == {"tls_on_plaintext": 1}
        assert "speaks TLS to a listener without it" in caplog.records[-1].reason


async def test_half_a_handshake_ends_at_the_deadline_and_holds_up_nobody(tmp_path, authority):
    settings = tls_settings(authority, penstock_authentication_timeout_ms="50")
    async with running(tmp_path, settings) as node:
        outgoing = ssl.MemoryBIO()
        hello = client_context(authority).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            hello.do_handshake()
        reader, writer = await connect(node, None)
        writer.write(outgoing.read()[:100])
        silent, silent_writer = await connect(node, None)
        await ask(await connect(node, client_context(authority)))
        assert await reader.read() == b""
        assert await silent.read() == b""
        assert failures(node) == {"timeout": 2}
        writer.close()
        silent_writer.close()


async def test_of_too_many_unauthenticated_connections_the_oldest_is_closed(tmp_path, authority):
    settings = tls_settings(authority, penstock_unauthenticated_connections_max="2")
    async with running(tmp_path, settings) as node:
        silent = [await connect(node, None) for _ in range(2)]
        await until(lambda: node.server.unauthenticated_counts() == {"SSL": 2})
        streams = await connect(node, client_context(authority))
        await ask(streams)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await silent[0][0].readexactly(1)
        assert failures(node) == {"too_many": 1}
        for _, writer in (*silent, streams):
            writer.close()


async def test_large_requests_and_replies_pass_also_to_a_slow_reader(tmp_path, authority):
    """Replies of 20 MB wait until the client reads: they are neither lost nor held in memory without a bound."""
    async with running(tmp_path, tls_settings(authority)) as node:
        reader, writer = await connect(node, client_context(authority))
        count = 40_000
        writer.write(API_VERSIONS * count)
        await asyncio.sleep(0)
        for _ in range(count):
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            assert (await reader.readexactly(size))[:4] == struct.pack(">i", 7)
        writer.write(struct.pack(">ihhih", 200_000 + 11, 18, 0, 8, 1) + b"c" + bytes(200_000))
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        assert (await reader.readexactly(size))[:4] == struct.pack(">i", 8)
        writer.close()


async def test_changed_certificates_are_used_for_new_connections(tmp_path, authority, caplog):
    async with running(tmp_path, tls_settings(authority)) as node:
        old = await connect(node, client_context(authority))
        other = Authority(authority.folder, "ca2")
        other.issue("node2", file="node.pem")
        await node.server.reload_certificates()
        new = await connect(node, client_context(other))
        subject = dict(pair[0] for pair in new[1].get_extra_info("peercert")["subject"])
        assert subject["commonName"] == "node2"
        await ask(new)
        await ask(old)
        (authority.folder / "node.pem").write_text("damaged")
        await node.server.reload_certificates()
        assert "cannot be used" in caplog.text
        await ask(await connect(node, client_context(other)))
        for _, writer in (old, new):
            writer.close()


async def test_keys_may_stand_in_settings_in_one_line_and_be_encrypted(tmp_path, authority):
    text = authority.issue("node", password="planted-secret").read_text().replace("\n", " ")
    key, _, chain = text.partition("-----END ENCRYPTED PRIVATE KEY-----")
    settings = {
        "listeners": "SSL://127.0.0.1:0",
        "ssl.keystore.key": key + "-----END ENCRYPTED PRIVATE KEY-----",
        "ssl.keystore.certificate.chain": chain,
        "ssl.key.password": "planted-secret",
    }
    async with running(tmp_path, settings) as node:
        await ask(await connect(node, client_context(authority)))
    for wrong in ({"ssl.key.password": "wrong-secret"}, {"ssl.keystore.key": "no PEM"}):
        node = new_node(tmp_path / "wrong", **{**settings, **wrong})
        with pytest.raises(StartFailed, match=r"listener SSL: ssl\.keystore\.key") as error:
            await node.start()
        assert "secret" not in str(error.value)


async def test_a_node_without_its_files_does_not_start(tmp_path, authority):
    settings = tls_settings(authority)
    settings["ssl.keystore.location"] = str(tmp_path / "missing.pem")
    with pytest.raises(StartFailed, match=r"missing\.pem: no usable private key and certificate"):
        await new_node(tmp_path, **settings).start()


async def test_the_http_endpoint_speaks_tls_and_asks_for_its_token(tmp_path, authority):
    settings = {
        "penstock.http.listen": "127.0.0.1:0",
        "penstock.http.tls": "true",
        "penstock.http.token": "planted-secret",
        "ssl.keystore.location": str(authority.issue("node")),
    }
    async with running(tmp_path, settings) as node:
        assert node.http is not None

        async def get(header: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", node.http.port, ssl=client_context(authority)
            )
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
            answer = await reader.read()
            writer.close()
            return answer

        assert (await get(b"Authorization: Bearer planted-secret\r\n")).startswith(b"HTTP/1.1 200")
        for wrong in (b"", b"Authorization: Bearer wrong\r\n", b"Authorization: Basic planted-secret\r\n"):
            answer = await get(wrong)
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"WWW-Authenticate: Bearer" in answer


class Session:
    """A client whose test decides which records it writes."""

    def __init__(self, streams: Streams, context: ssl.SSLContext) -> None:
        self.reader, self.writer = streams
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def records(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self.outgoing.read()

    async def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                data += self.tls.read(count - len(data))
            except ssl.SSLWantReadError:
                self.incoming.write(await self.reader.read(65536))
        return data


async def hand_shake(streams: Streams, context: ssl.SSLContext, requests: bytes = b"") -> Session:
    """Send requests in one piece with the last flight of the handshake."""
    session = Session(streams, context)
    while True:
        try:
            session.tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            session.writer.write(session.outgoing.read())
            session.incoming.write(await session.reader.read(65536))
    if requests:
        session.tls.write(requests)
    session.writer.write(session.outgoing.read())
    return session


async def test_a_request_that_arrives_with_the_handshake_of_a_refused_certificate_is_not_handled(
    tmp_path, authority
):
    settings = tls_settings(
        authority, ssl_client_auth="required", ssl_principal_mapping_rules="RULE:^CN=good,.*$/good/"
    )
    async with running(tmp_path, settings) as node:
        await create_topic(node, "t")
        partition = node.partitions.get("t", 0)
        for name, appended in (("bad", 0), ("good", 1)):
            context = client_context(authority, authority.issue(name))
            # In TLS 1.3 the client's certificate is in its last flight.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            streams = await connect(node, None)
            await hand_shake(streams, context, produce("t", b"x"))
            if name == "good":
                await until(lambda: partition.log.end_offset)
            else:
                with suppress(ConnectionError):
                    while await streams[0].read(65536):
                        pass
            assert partition.log.end_offset == appended
            streams[1].close()
        assert failures(node) == {"certificate": 1}


class TickingClock:
    """Each look at the time takes longer than a turn, so that a turn has room for two records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("tls", "slices"):
            monkeypatch.setattr(f"penstock.broker.network.{module}.perf_counter", self, raising=False)

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def test_many_small_records_in_one_read_are_decrypted_in_turns(tmp_path, authority, monkeypatch):
    """A record per byte costs the sender little and the node a call into OpenSSL."""
    async with running(tmp_path, tls_settings(authority)) as node:
        hog_streams = await connect(node, None)
        hog = await hand_shake(hog_streams, client_context(authority))
        await until(lambda: node.server.unauthenticated_counts() == {"SSL": 0})
        (hog_connection,) = node.server.connections
        neighbour = await connect(node, client_context(authority))
        await ask(neighbour)
        handled: list[bool] = []
        dispatch = node.server.dispatch

        def note(connection, frame):
            handled.append(connection is hog_connection)
            dispatch(connection, frame)

        monkeypatch.setattr(node.server, "dispatch", note)
        TickingClock(monkeypatch)
        for byte in struct.pack(">ihhih", 1000 + 11, 18, 0, 8, 1) + b"c" + bytes(1000):
            hog.tls.write(bytes((byte,)))
        hog_streams[1].write(hog.outgoing.read() + hog.records(API_VERSIONS))
        await turn_until(lambda: hog_connection._partial is not None)
        await ask(neighbour)
        assert handled == [False]
        await until(lambda: handled == [False, True, True])
        # All of it arrived, in order, and the reply to the request behind it too.
        correlations = []
        for _ in range(2):
            (size,) = struct.unpack(">i", await hog.read(4))
            correlations.append((await hog.read(size))[:4])
        assert correlations == [struct.pack(">i", 8), struct.pack(">i", 7)]
        for _, writer in (hog_streams, neighbour):
            writer.close()


async def test_what_a_client_sent_before_it_closed_is_handled(tmp_path, authority, monkeypatch):
    """Also if it needs many turns: a producer with acks=0 may close as soon as it has sent its records."""
    async with running(tmp_path, tls_settings(authority)) as node:
        await create_topic(node, "t")
        streams = await connect(node, None)
        session = await hand_shake(streams, client_context(authority))
        await until(lambda: node.server.unauthenticated_counts() == {"SSL": 0})
        TickingClock(monkeypatch)
        for byte in produce("t", b"x", acks=0) * 20:
            session.tls.write(bytes((byte,)))
        with suppress(ssl.SSLError):
            session.tls.unwrap()  # says that it closes
        streams[1].write(session.outgoing.read())
        streams[1].close()
        partition = node.partitions.get("t", 0)
        await until(lambda: partition.log.end_offset == 20)
        await until(lambda: not node.server.connections)
