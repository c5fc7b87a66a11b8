"""An issuer of OAUTHBEARER's tokens for tests: its keys, its tokens, and its endpoints over HTTP."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://issuer.example", "penstock"
CLIENT_ID, CLIENT_SECRET = "orders-app", "planted-client-secret"
_CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}


def new_key(algorithm: str = "ES256") -> Any:
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm]())
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa_key()


@cache
def rsa_key(bits: int = 2048) -> Any:
    """Making one takes long, so tests share it."""
    return rsa.generate_private_key(65537, bits)


def web_key(private_key: Any, **members: Any) -> dict[str, Any]:
    """Return the public key as JSON Web Key."""
    public = private_key.public_key()
    kinds = ((ec.EllipticCurvePublicKey, ECAlgorithm), (rsa.RSAPublicKey, RSAAlgorithm))
    kind: Any = next((kind for type, kind in kinds if isinstance(public, type)), OKPAlgorithm)
    return {**json.loads(kind.to_jwk(public)), **members}


def key_set(**keys: Any) -> bytes:
    """Return the key set document of private keys by id."""
    return json.dumps({"keys": [web_key(key, kid=key_id) for key_id, key in keys.items()]}).encode()


def claims(now_s: float | None = None, **others: Any) -> dict[str, Any]:
    """Return what a good token says; a claim that is None is left out."""
    now = time.time() if now_s is None else now_s
    common = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": int(now), "exp": int(now) + 300}
    return {name: value for name, value in (common | others).items() if value is not None}


def token(key: Any, *, algorithm: str = "ES256", kid: str | None = "one", **others: Any) -> str:
    headers = {"kid": kid} if kid is not None else {}
    return jwt.encode(claims(**others), key, algorithm=algorithm, headers=headers)


def unsigned(header: Any, payload: Any, signature: bytes = b"") -> str:
    """Return a token with any header; texts are taken as they are."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, payload)]
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=") for part in (*parts, signature)]
    return b".".join(encoded).decode()


class Issuer:
    """`/keys` and `/token` on localhost. Tokens are for the client credentials CLIENT_ID and CLIENT_SECRET."""

    def __init__(self) -> None:
        self.keys = {"one": new_key()}
        self.lifetime_s = 300
        self.status = 200
        #: What `/token` answers instead of a token.
        self.token_document: bytes | None = None
        self.key_requests = 0
        self.token_requests: list[dict[str, str]] = []
        self.url = ""

    def token(self, **others: Any) -> str:
        """Return a token that is signed with the newest key."""
        kid, key = list(self.keys.items())[-1]
        lifetime = {"exp": time.time() + self.lifetime_s}
        return token(key, kid=kid, **({"sub": CLIENT_ID} | lifetime | others))

    @property
    def key_set(self) -> bytes:
        return key_set(**self.keys)

    def answer_keys(self) -> tuple[int, bytes]:
        self.key_requests += 1
        return self.status, self.key_set

    def answer_token(self, authorization: str, form: dict[str, str]) -> tuple[int, bytes]:
        self.token_requests.append(form)
        expected = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        if authorization != f"Basic {expected}" or form.get("grant_type") != "client_credentials":
            return 401, json.dumps({"error": "invalid_client", "error_description": authorization}).encode()
        if self.token_document is not None:
            return self.status, self.token_document
        answer = {"access_token": self.token(), "token_type": "Bearer", "expires_in": self.lifetime_s}
        return self.status, json.dumps(answer).encode()


@contextmanager
def serve(issuer: Issuer) -> Iterator[Issuer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/keys")
                self.end_headers()
                return
            self._send(*issuer.answer_keys())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._send(*issuer.answer_token(self.headers.get("Authorization", ""), form))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield issuer
        finally:
            server.shutdown()
            thread.join()
