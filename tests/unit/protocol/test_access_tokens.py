"""Tokens of clients: where settings say that they come from, when they are replaced, and what is never shown."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import tokens
from tests.tokens import CLIENT_ID, CLIENT_SECRET, Issuer

from penstock.protocol.access_tokens import (
    URL_SETTING,
    AccessToken,
    TokenEndpoint,
    TokenSource,
    TokenUnavailable,
    retrieve_token,
    token_endpoint,
)
from penstock.protocol.url_reader import UrlUnreadable, read_url, url_flaw

URL = "https://issuer.example/token"
NOW_MS = 1_700_000_000_000


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with tokens.serve(Issuer()) as serving:
        yield serving


def endpoint_of(issuer: Issuer, path: str = "/token", secret: str = CLIENT_SECRET) -> TokenEndpoint:
    return TokenEndpoint(url=issuer.url + path, client_id=CLIENT_ID, client_secret=secret, scope="kafka")


def test_the_names_of_settings() -> None:
    expected = TokenEndpoint(
        url=URL,
        client_id="app",
        client_secret="pw",
        scope="kafka",
        extensions=(("logicalCluster", "lkc-1"), ("tenant", "acme")),
    )
    java = {
        URL_SETTING: URL,
        "sasl.oauthbearer.client.credentials.client.id": "app",
        "sasl.oauthbearer.client.credentials.client.secret": "pw",
        "sasl.oauthbearer.scope": "kafka",
    }
    extensions = {"extension_logicalCluster": "lkc-1", "extension_tenant": "acme"}
    assert token_endpoint(java.get, extensions) == expected
    options = {"clientId": "app", "clientSecret": "pw", "scope": "kafka", **extensions}
    assert token_endpoint({URL_SETTING: URL}.get, options) == expected
    mapping = expected.to_mapping()
    assert mapping["sasl.oauthbearer.method"] == "oidc"
    assert token_endpoint(mapping.get, {}) == expected
    assert "pw" not in repr(expected)
    file = token_endpoint({URL_SETTING: "file:///run/token"}.get, {})
    assert file.to_mapping() == {URL_SETTING: "file:///run/token"}


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({}, {}, f"{URL_SETTING} must name"),
        ({URL_SETTING: "issuer/token"}, {}, "must begin with"),
        ({URL_SETTING: URL}, {"clientId": "app"}, "needs the client's id and secret"),
        ({URL_SETTING: URL}, {"clientSecret": "planted"}, "needs the client's id and secret"),
        ({URL_SETTING: URL}, {"clientId": "a", "clientSecret": "planted", "extension_a": "b,c"}, "commas"),
        (
            {URL_SETTING: URL},
            {"clientId": "a", "clientSecret": "planted", "extension_1": "b"},
            "no extension",
        ),
        ({URL_SETTING: URL}, {"clientId": "a", "clientSecret": "planted", "extension_auth": "b"}, "'auth'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str], options: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        token_endpoint(settings.get, options)
    assert "planted" not in str(raised.value)


def test_a_token_from_an_endpoint(issuer: Issuer) -> None:
    token = retrieve_token(endpoint_of(issuer), NOW_MS)
    assert token.expires_ms is not None
    assert token.value not in repr(token)
    assert issuer.token_requests == [{"grant_type": "client_credentials", "scope": "kafka"}]


def test_a_token_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(tokens.token(tokens.new_key(), exp=1_800_000_000) + "\n")
    endpoint = TokenEndpoint(url=path.as_uri())
    assert retrieve_token(endpoint, NOW_MS).expires_ms == 1_800_000_000_000
    path.write_text("opaque-token")
    assert retrieve_token(endpoint, NOW_MS) == AccessToken("opaque-token", None)
    for content in ("", "two words", "a\x01auth=b", "x" * 300_000):
        path.write_text(content)
        with pytest.raises(TokenUnavailable):
            retrieve_token(endpoint, NOW_MS)
    path.unlink()
    with pytest.raises(TokenUnavailable, match="No such file"):
        retrieve_token(endpoint, NOW_MS)


def test_refusals_show_no_secret(issuer: Issuer) -> None:
    with pytest.raises(TokenUnavailable, match=r"answers 401 \(invalid_client\)") as raised:
        retrieve_token(endpoint_of(issuer, secret="planted"), NOW_MS)
    assert raised.value.is_refused
    assert "planted" not in str(raised.value)
    issuer.status = 503
    with pytest.raises(TokenUnavailable, match="503") as raised:
        retrieve_token(endpoint_of(issuer), NOW_MS)
    assert not raised.value.is_refused
    assert "eyJ" not in str(raised.value)


def test_where_no_token_comes_from(issuer: Issuer) -> None:
    for body in (b"", b"[]", b"{}", b'{"access_token": 7}', b'{"access_token": "a b"}', b"[" * 100_000):
        issuer.token_document = body
        with pytest.raises(TokenUnavailable):
            retrieve_token(endpoint_of(issuer), NOW_MS)
    issuer.token_document = json.dumps({"access_token": "opaque", "expires_in": 60}).encode()
    assert retrieve_token(endpoint_of(issuer), NOW_MS) == AccessToken("opaque", NOW_MS + 60_000)
    for lifetime in (0, -1, 1e400, "60", None):
        issuer.token_document = json.dumps({"access_token": "opaque", "expires_in": lifetime}).encode()
        assert retrieve_token(endpoint_of(issuer), NOW_MS) == AccessToken("opaque", None)
    with pytest.raises(TokenUnavailable):
        retrieve_token(
            TokenEndpoint(url="http://127.0.0.1:1/token", client_id="a", client_secret="b"), NOW_MS
        )


class World:
    def __init__(self, lifetime_ms: int | None = 100) -> None:
        self.now_ms = 0
        self.count = 0
        self.is_down = False
        self.lifetime_ms = lifetime_ms

    def retrieve(self, endpoint: TokenEndpoint, now_ms: int) -> AccessToken:
        if self.is_down:
            raise TokenUnavailable("down", is_refused=False)
        self.count += 1
        return AccessToken(f"t{self.count}", None if self.lifetime_ms is None else now_ms + self.lifetime_ms)

    def source(self, url: str = URL) -> TokenSource:
        return TokenSource(TokenEndpoint(url=url), retrieve=self.retrieve, now_ms=lambda: self.now_ms)


def test_a_token_is_replaced_before_it_expires() -> None:
    world = World()
    source = world.source()
    taken = []
    for world.now_ms in (0, 79, 80, 159, 160):
        taken.append(source.token().value)
    assert taken == ["t1", "t1", "t2", "t2", "t3"]
    world.is_down = True
    world.now_ms = 259
    assert source.token().value == "t3"  # it is still good
    world.now_ms = 260
    with pytest.raises(TokenUnavailable):
        source.token()
    world.is_down = False
    assert source.token().value == "t4"


@pytest.mark.parametrize(("url", "lifetime_ms"), [("file:///token", 100), (URL, None)])
def test_what_is_read_for_every_connection(url: str, lifetime_ms: int | None) -> None:
    source = World(lifetime_ms).source(url)
    assert [source.token().value for _ in range(3)] == ["t1", "t2", "t3"]


def test_connections_share_one_request() -> None:
    world = World()
    source = world.source()
    threads = [threading.Thread(target=source.token) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.count == 1


def test_what_is_read_from_addresses(issuer: Issuer, tmp_path: Path) -> None:
    def read(url: str, bytes_max: int = 10_000) -> bytes:
        return read_url(url, bytes_max=bytes_max, timeout_s=60)

    assert read(f"{issuer.url}/keys") == issuer.key_set
    for url, bytes_max in ((f"{issuer.url}/keys", 10), (f"{issuer.url}/moved", 10_000), (URL + " x", 10)):
        with pytest.raises(UrlUnreadable):
            read(url, bytes_max)
    spaced = tmp_path / "a b"
    spaced.write_bytes(b"12345678901")
    assert read(spaced.as_uri()) == b"12345678901"
    with pytest.raises(UrlUnreadable, match="10 bytes"):
        read(spaced.as_uri(), 10)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "gopher://x",
        "http://",
        "http:///x",
        "https://a:b@c/",
        "file://host/x",
        "http://[::1",
        "file:x",
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    assert url_flaw(url) is not None
