"""A certificate authority for tests, and the PEM files that it signs."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


def _name(common_name: str) -> x509.Name:
    attributes = ((NameOID.ORGANIZATION_NAME, "Acme"), (NameOID.COMMON_NAME, common_name))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in attributes])


class Authority:
    """`folder` gets `ca.pem` and one file for each certificate, with the key and the chain."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = self._builder(self._name, self._key.public_key(), expired=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(self._signed(builder))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, expired: bool
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - 3 * _DAY)
        builder = builder.not_valid_after(now + (-_DAY if expired else 30 * _DAY))
        own, authority = x509.SubjectKeyIdentifier.from_public_key(key), self._key.public_key()
        builder = builder.add_extension(own, critical=False)
        return builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        expired: bool = False,
        password: str | None = None,
        file: str | None = None,
    ) -> Path:
        """Return a file with the key and the certificate of `CN=name,O=Acme`; it replaces an earlier one at once."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = []
        for host in hosts:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                alternatives.append(x509.DNSName(host))
        builder = self._builder(_name(name), key.public_key(), expired=expired)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password.encode())
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        path = self.folder / (file or f"{name}.pem")
        new = path.with_suffix(".new")
        new.write_bytes(private + self._signed(builder))
        new.replace(path)
        return path
