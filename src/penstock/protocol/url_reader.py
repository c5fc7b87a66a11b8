"""Reads small documents from the addresses that settings name: key sets and tokens of OAUTHBEARER.

Calls block, so they belong into a thread where an event loop runs. Redirections are refused: only the operator decides
where secrets are sent and keys come from. Errors show neither what was sent nor what was received.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from http.client import HTTPException
from types import MappingProxyType
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import BaseHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

_SCHEMES: Final = ("http", "https", "file")
_CHUNK_BYTES: Final = 16 * 1024
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class UrlUnreadable(Exception):
    """`status` is that of an HTTP response, and `document` what it contains; None and empty without a response."""

    def __init__(self, reason: str, *, status: int | None = None, document: bytes = b"") -> None:
        super().__init__(reason)
        self.status = status
        self.document = document


def url_flaw(url: str) -> str | None:
    """Return what is wrong with an address, or None."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return "is no URL"
    if parts.scheme not in _SCHEMES:
        return "must begin with https://, http:// or file://"
    if parts.scheme == "file":
        is_absolute = parts.netloc in ("", "localhost") and parts.path.startswith("/")
        return None if is_absolute else "must be file:///PATH"
    if parts.username is not None:
        return "must not contain a user name or a password"
    return None if has_host and url.isprintable() and " " not in url else "has no host"


def read_url(
    url: str,
    *,
    bytes_max: int,
    timeout_s: float,
    form: bytes | None = None,
    headers: Mapping[str, str] = _NOTHING,
    ca_location: str | None = None,
) -> bytes:
    """Return a document; with `form`, the answer to a POST of it. Raises UrlUnreadable."""
    flaw = url_flaw(url)
    if flaw is not None:
        raise UrlUnreadable(flaw)
    parts = urlsplit(url)
    if parts.scheme == "file":
        return _read_file(unquote(parts.path), bytes_max)
    request = Request(url, form, {"Accept": "application/json", **headers})
    return _read_http(request, bytes_max, timeout_s, ca_location)


def _read_http(request: Request, bytes_max: int, timeout_s: float, ca_location: str | None) -> bytes:
    end = time.monotonic() + timeout_s
    try:
        handlers: list[BaseHandler] = [_NoRedirection()]
        if request.type == "https":
            handlers.append(HTTPSHandler(context=ssl.create_default_context(cafile=ca_location)))
        with build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return _read_all(answer, bytes_max, end)
    except HTTPError as error:
        with error:
            raise UrlUnreadable(
                f"it answers {error.code}", status=error.code, document=_error_document(error, end)
            ) from None
    except (OSError, HTTPException, ValueError) as error:
        raise UrlUnreadable(_reason(error)) from None


class _NoRedirection(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _read_file(path: str, bytes_max: int) -> bytes:
    try:
        with open(path, "rb") as file:
            document = file.read(bytes_max + 1)
    except OSError as error:
        raise UrlUnreadable(error.strerror or "it cannot be read") from None
    return _within(document, bytes_max)


def _read_all(answer: Any, bytes_max: int, end: float) -> bytes:
    """Raises TimeoutError at `end`. The timeout of the socket begins again with each piece that arrives.

    An endpoint that sends a byte now and then would never reach it.
    """
    document = bytearray()
    while piece := answer.read1(_CHUNK_BYTES):
        document += piece
        _within(document, bytes_max)
        if time.monotonic() > end:
            raise TimeoutError
    return bytes(document)


def _error_document(error: HTTPError, end: float) -> bytes:
    try:
        return _read_all(error, _CHUNK_BYTES, end)
    except (OSError, UrlUnreadable, HTTPException, AttributeError):
        return b""


def _within(document: bytes | bytearray, bytes_max: int) -> bytes:
    if len(document) > bytes_max:
        raise UrlUnreadable(f"it has more than {bytes_max} bytes")
    return bytes(document)


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, TimeoutError):
        return "it does not answer in time"
    if isinstance(cause, OSError):
        return cause.strerror or "it cannot be reached"
    return "its answer is no HTTP"
