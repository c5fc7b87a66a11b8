"""An SSL context from settings. Keys that came as text touch the disk for a moment, readable by nobody else."""

from __future__ import annotations

import os
import ssl
import tempfile
from contextlib import ExitStack
from pathlib import Path

from penstock.client.errors import ClientError
from penstock.client.settings import TlsSettings


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """Raises ClientError when a file or a key cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = tls.checks_hostname and tls.verifies
    context.verify_mode = ssl.CERT_REQUIRED if tls.verifies else ssl.CERT_NONE
    _load_authorities(context, tls)
    _load_certificate(context, tls)
    return context


def _load_authorities(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.ca_location is None and tls.ca_pem is None:
        context.load_default_certs()
        return
    where = tls.ca_location
    is_folder = where is not None and Path(where).is_dir()
    try:
        context.load_verify_locations(
            cafile=None if is_folder else where, capath=where if is_folder else None, cadata=tls.ca_pem
        )
    except (OSError, ValueError) as error:
        raise ClientError(f"ssl.ca.location={where}: cannot be read as PEM: {error}") from None


def _load_certificate(context: ssl.SSLContext, tls: TlsSettings) -> None:
    if tls.certificate_location is None and tls.certificate_pem is None:
        return
    with ExitStack() as stack:
        certificate = tls.certificate_location or _file_of(stack, tls.certificate_pem)
        key = tls.key_location or _file_of(stack, tls.key_pem)
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate or "", key, password=tls.key_password or "")
        except (OSError, ValueError) as error:
            raise ClientError(
                f"ssl.certificate.location and ssl.key.location (or ssl.keystore.*) cannot be used: {error}"
            ) from None


def _file_of(stack: ExitStack, pem: str | None) -> str | None:
    """OpenSSL reads certificates and keys of one's own from files only."""
    if pem is None:
        return None
    handle, path = tempfile.mkstemp(suffix=".pem")
    stack.callback(os.unlink, path)
    with os.fdopen(handle, "w") as file:
        file.write(pem)
    return path
