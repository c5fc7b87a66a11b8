"""A certificate authority in a folder, for tests and for trying out."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.protocol.durable_files import replace_private

#: Part of the subject of every certificate.
ORGANIZATION: Final = "Penstock"
_DAY: Final = datetime.timedelta(days=1)
_AUTHORITY_DAYS: Final = 3650
_NODE_DAYS: Final = 397
_RENEWED_DAYS: Final = 30


class Authority:
    """`ca.pem` and `ca.key` in a folder, and the certificates that it has signed."""

    def __init__(self, folder: Path) -> None:
        """Makes the authority if the folder has none. Raises ValueError for files that cannot be used, OSError."""
        self._folder = folder
        self.certificate_file = folder / "ca.pem"
        self._key_file = folder / "ca.key"
        if self.certificate_file.exists() or self._key_file.exists():
            self._key, self._certificate = self._read()
        else:
            self._key, self._certificate = self._make()

    def issue(self, name: str, hosts: Sequence[str]) -> Path:
        """Return the file with the key and the certificate of a node, which is made if it is missing or too old."""
        path = self._folder / f"{name}.pem"
        if not self._is_usable(path, hosts):
            key = ec.generate_private_key(ec.SECP256R1())
            builder = _builder(_subject(name), self._certificate.subject, key, self._key, days=_NODE_DAYS)
            builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            replace_private(path, _key_pem(key) + _signed_pem(builder, self._key))
        return path

    def _is_usable(self, path: Path, hosts: Iterable[str]) -> bool:
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            certificate.verify_directly_issued_by(self._certificate)
        except Exception:  # a file of any other content is replaced
            return False
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        remaining = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return {*map(_general_name, hosts)} <= {*names} and remaining > _RENEWED_DAYS * _DAY

    def _make(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject("ca")
        builder = _builder(subject, subject, key, key, days=_AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        pem = _signed_pem(builder.add_extension(usage, critical=True), key)
        replace_private(self._key_file, _key_pem(key))
        replace_private(self.certificate_file, pem)
        return key, x509.load_pem_x509_certificate(pem)

    def _read(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Raises ValueError, without what the files contain."""
        try:
            key: Any = serialization.load_pem_private_key(self._key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(self.certificate_file.read_bytes())
            is_pair = key.public_key() == certificate.public_key()
        except (FileNotFoundError, ValueError, TypeError):
            is_pair = False
        if not is_pair:
            raise ValueError(
                f"{self._key_file} and {self.certificate_file.name} are not a key and its certificate; "
                f"without {self._folder} they are made again, and all clients need the new one"
            )
        return key, certificate


def _subject(common_name: str) -> x509.Name:
    attributes = ((NameOID.ORGANIZATION_NAME, ORGANIZATION), (NameOID.COMMON_NAME, common_name))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _DAY).not_valid_after(now + days * _DAY)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return builder.add_extension(own, critical=False).add_extension(authority, critical=False)


def _signed_pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
