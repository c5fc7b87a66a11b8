"""A connection matches replies to requests, respects timeouts, and verifies the broker."""

import os
import shutil
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.client.wire.scripted_broker import (
    API_VERSIONS,
    METADATA,
    ScriptedServer,
    api_versions,
    encoded,
    frame,
)

from penstock.client.errors import AuthenticationFailed, ClientError, Unavailable, UnsupportedVersion
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import metadata_request
from penstock.client.wire.settings import Address, ConnectionSettings, SaslSettings, TlsSettings
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

APIS = {METADATA: (0, 1)}
#: Metadata v1 of an empty cluster: no brokers, controller -1, no topics.
NOBODY = struct.pack(">iii", 0, -1, 0)


def settings(address: Address, **more: Any) -> ConnectionSettings:
    values: dict[str, Any] = {"request_timeout_ms": 2000, "connect_timeout_ms": 2000, **more}
    return ConnectionSettings(bootstrap=(address,), **values)


def connect(server: ScriptedServer, **more: Any) -> Connection:
    return Connection(server.address, settings(server.address, **more))


def answering(body: bytes) -> Any:
    return lambda server, api_key, version, correlation_id, request: frame(correlation_id, body)


def ask(connection: Connection, **options: Any) -> Any:
    return connection.call(metadata_request(()), **options)


def test_a_call_is_made_in_the_newest_version_that_both_know() -> None:
    with ScriptedServer(answering(NOBODY), APIS) as server, connect(server) as connection:
        assert (connection.versions(METADATA), connection.features()) == ((0, 1), {})
        answer = ask(connection)
        assert (int(answer.__version__), answer.controller_id) == (1, -1)
        with pytest.raises(UnsupportedVersion, match="API 22"):
            connection.version(22, 5)
        with pytest.raises(UnsupportedVersion, match=r"0 to 1 .* 2 to 12"):
            connection.version(METADATA, 12, 2)
        assert connection.is_usable, "nothing was sent"


def test_brokers_that_know_only_the_oldest_way_to_tell_their_versions() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        if version > 0:
            return frame(correlation_id, struct.pack(">hi", ErrorCode.unsupported_version, 0))
        return frame(correlation_id, api_versions(APIS, version=0))

    with ScriptedServer(script, {**APIS, API_VERSIONS: (0, 0)}) as server, connect(server) as connection:
        assert connection.versions(METADATA) == (0, 1)
        assert server.asked == [API_VERSIONS, API_VERSIONS]


def test_a_late_answer_is_never_taken_for_the_next_one() -> None:
    release = threading.Event()

    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        release.wait(20)
        return frame(correlation_id, NOBODY)

    with ScriptedServer(script, APIS) as server, connect(server) as connection:
        with pytest.raises(Unavailable, match="no response within 50 ms"):
            ask(connection, timeout_ms=50)
        release.set()
        assert not connection.is_usable
        with pytest.raises(Unavailable, match="closed"):
            ask(connection)


def test_an_answer_to_something_else_closes_the_connection() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        return frame(correlation_id + 1, NOBODY)

    with ScriptedServer(script, APIS) as server, connect(server) as connection:
        with pytest.raises(Unavailable, match="instead of"):
            ask(connection)
        assert not connection.is_usable


@pytest.mark.parametrize(
    "reply",
    [
        struct.pack(">i", 101),
        struct.pack(">i", -1),
        struct.pack(">i", 3),
        struct.pack(">i", 2**31 - 1),
    ],
)
def test_an_answer_of_a_size_that_cannot_be(reply: bytes) -> None:
    with (
        ScriptedServer(lambda *_: reply, APIS) as server,
        connect(server, answer_bytes_max=100) as connection,
        pytest.raises(Unavailable, match="a response of"),
    ):
        ask(connection)


@pytest.mark.parametrize("body", [b"", NOBODY[:-1], struct.pack(">i", 2**31 - 1), b"\xff" * 40])
def test_an_answer_that_cannot_be_read(body: bytes) -> None:
    with ScriptedServer(answering(body), APIS) as server, connect(server) as connection:
        with pytest.raises(Unavailable):
            ask(connection)
        assert not connection.is_usable


def test_who_hangs_up_is_gone() -> None:
    with (
        ScriptedServer(lambda *_: None, APIS) as server,
        connect(server) as connection,
        pytest.raises(Unavailable, match="closed"),
    ):
        ask(connection)


def test_who_listens_and_says_nothing_is_left_soon() -> None:
    with ScriptedServer(lambda *_: b"", {**APIS, API_VERSIONS: (0, 3)}) as server:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="no response within 50 ms"):
            connect(server, connect_timeout_ms=50)
        assert time.monotonic() - begun < 10


def test_connection_refused() -> None:
    with ScriptedServer(lambda *_: None, APIS) as server:
        address = server.address
    with pytest.raises(Unavailable, match=f"{address[1]}: Connection refused"):
        Connection(address, settings(address))


def test_answers_come_in_order() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        return frame(correlation_id, struct.pack(">iii", 0, len(server.asked), 0))

    with ScriptedServer(script, APIS) as server, connect(server) as connection:
        body = [struct.pack(">i", 0)]
        pending = [connection.begin(METADATA, 1, body) for _ in range(5)]
        found = [connection.decode(each, connection.finish(each)).controller_id for each in pending]
        assert found == [2, 3, 4, 5, 6]


def test_a_connection_belongs_to_its_process() -> None:
    with ScriptedServer(answering(NOBODY), APIS) as server, connect(server) as connection:
        child = os.fork()
        if child == 0:
            try:
                connection.begin(METADATA, 1, [b"\0\0\0\0"])
            except ClientError:
                os._exit(0 if not connection.is_usable else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(connection).controller_id == -1


# Logging in

SASL_APIS = {**APIS, 17: (0, 1), 36: (0, 2)}


def shaken(correlation_id: int, *, error: ErrorCode = ErrorCode.none) -> bytes:
    response = schema_class("sasl_handshake.v1.response:SaslHandshakeResponse")
    return frame(correlation_id, encoded(response(error_code=error, mechanisms=("PLAIN",))))


def authenticated(
    correlation_id: int,
    *,
    error: ErrorCode = ErrorCode.none,
    message: str | None = None,
    lifetime_ms: int = 0,
) -> bytes:
    response = schema_class("sasl_authenticate.v2.response:SaslAuthenticateResponse")(
        error_code=error,
        error_message=message,
        auth_bytes=b"",
        session_lifetime=timedelta(milliseconds=lifetime_ms),
    )
    return frame(correlation_id, encoded(response), flexible=True)


def plain(mechanism: str = "PLAIN") -> SaslSettings:
    return SaslSettings(mechanism=mechanism, username="user", password="secret")


def test_logging_in() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        match api_key:
            case 17:
                return shaken(correlation_id)
            case 36:
                assert b"\0user\0secret" in request
                return authenticated(correlation_id, lifetime_ms=3_600_000)
            case _:
                return frame(correlation_id, NOBODY)

    with ScriptedServer(script, SASL_APIS) as server, connect(server, sasl=plain()) as connection:
        assert ask(connection).controller_id == -1
        assert connection.is_usable


def test_a_session_is_left_before_the_broker_ends_it() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        return shaken(correlation_id) if api_key == 17 else authenticated(correlation_id, lifetime_ms=1)

    with ScriptedServer(script, SASL_APIS) as server, connect(server, sasl=plain()) as connection:
        time.sleep(0.002)
        assert not connection.is_usable


def test_a_wrong_password_is_told_with_the_brokers_words() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        if api_key == 17:
            return shaken(correlation_id)
        failed = ErrorCode.sasl_authentication_failed
        return authenticated(correlation_id, error=failed, message="no such user")

    with ScriptedServer(script, SASL_APIS) as server:
        with pytest.raises(AuthenticationFailed, match="refuses the login of user: no such user") as caught:
            connect(server, sasl=plain())
        assert "secret" not in str(caught.value)


def test_a_mechanism_that_the_broker_does_not_take() -> None:
    def script(server: Any, api_key: int, version: int, correlation_id: int, request: bytes) -> bytes:
        return shaken(correlation_id, error=ErrorCode.unsupported_sasl_mechanism)

    offer = "SCRAM-SHA-256; it offers: PLAIN"
    with ScriptedServer(script, SASL_APIS) as server, pytest.raises(AuthenticationFailed, match=offer):
        connect(server, sasl=plain("SCRAM-SHA-256"))


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.pem and server.key for localhost, client.pem with its encrypted key in it; both sign themselves."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    for name, protection in (("server", ["-nodes"]), ("client", ["-passout", "pass:open sesame"])):
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-days",
            "2",
            *names,
            *protection,
            *files,
        ]
        subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[ScriptedServer]:
    """Wants a certificate, and takes the client's only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.load_verify_locations(certificates / "client.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with ScriptedServer(answering(NOBODY), APIS, context=context) as server:
        yield server


def over_tls(server: ScriptedServer, tls: TlsSettings, host: str = "localhost") -> Connection:
    address = (host, server.address[1])
    return Connection(address, settings(address, security=tls))


def test_tls_with_files_and_with_text(tls_server: ScriptedServer, certificates: Path) -> None:
    by_file = TlsSettings(
        ca_location=str(certificates / "server.pem"),
        certificate_location=str(certificates / "client.pem"),
        key_location=str(certificates / "client.key"),
        key_password="open sesame",
    )
    by_text = TlsSettings(
        ca_pem=(certificates / "server.pem").read_text(),
        certificate_pem=(certificates / "client.pem").read_text(),
        key_pem=(certificates / "client.key").read_text(),
        key_password="open sesame",
    )
    for tls in (by_file, by_text):
        with over_tls(tls_server, tls) as connection:
            assert ask(connection).controller_id == -1
            big = connection.begin(METADATA, 1, [struct.pack(">i", 0), b"x" * 300_000])
            assert connection.finish(big)


def with_client(certificates: Path, **more: Any) -> TlsSettings:
    return TlsSettings(
        certificate_location=str(certificates / "client.pem"),
        key_location=str(certificates / "client.key"),
        key_password="open sesame",
        **more,
    )


def test_a_broker_with_an_untrusted_certificate(tls_server: ScriptedServer, certificates: Path) -> None:
    with pytest.raises(AuthenticationFailed, match="not trusted: self-signed"):
        over_tls(tls_server, with_client(certificates))
    with over_tls(tls_server, with_client(certificates, verifies=False)) as connection:
        assert connection.is_usable


def test_a_broker_under_another_name(tls_server: ScriptedServer, certificates: Path) -> None:
    authority = str(certificates / "server.pem")
    with pytest.raises(AuthenticationFailed, match=r"not valid for '127\.0\.0\.1'"):
        over_tls(tls_server, with_client(certificates, ca_location=authority), host="127.0.0.1")
    lenient = with_client(certificates, ca_location=authority, checks_hostname=False)
    with over_tls(tls_server, lenient, host="127.0.0.1") as connection:
        assert connection.is_usable


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"ca_location": "/nowhere.pem"}, r"ssl\.ca\.location=/nowhere\.pem"),
        ({"key_password": "wrong"}, r"ssl\.key\.location"),
        ({"key_password": None}, r"ssl\.key\.location"),
        ({"certificate_location": "/nowhere.pem"}, r"ssl\.certificate\.location"),
    ],
)
def test_files_that_cannot_be_used(
    tls_server: ScriptedServer, certificates: Path, more: dict[str, Any], named: str
) -> None:
    good = {
        "ca_location": str(certificates / "server.pem"),
        "certificate_location": str(certificates / "client.pem"),
        "key_location": str(certificates / "client.key"),
        "key_password": "open sesame",
    }
    with pytest.raises(ClientError, match=named):
        over_tls(tls_server, TlsSettings(**{**good, **more}))
