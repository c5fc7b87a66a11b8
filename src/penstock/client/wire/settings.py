"""From the names and values that Java clients and librdkafka take to ConnectionSettings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.sasl import MECHANISMS, PLAIN, SCRAM_HASHES
from penstock.client.settings import NUMBERS, Address, ConnectionSettings, SaslSettings, TlsSettings

_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_NUMBER_MAX: Final = 2**31 - 1
_DEFAULT_PORT: Final = 9092
_BOOLEANS: Final = {"true": True, "false": False}
_STORES: Final = ("ssl.truststore", "ssl.keystore")
#: `module.Class required name="value" other='value' third=value;`
_JAAS: Final = re.compile(
    r"\s*(?P<module>[\w.$]+)\s+(required|requisite|sufficient|optional)\b(?P<options>.*)", re.S
)
_JAAS_OPTION: Final = re.compile(
    r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))"""
)
_JAAS_MECHANISMS: Final = {"PlainLoginModule": (PLAIN,), "ScramLoginModule": tuple(SCRAM_HASHES)}


def parse(mapping: Mapping[str, str]) -> ConnectionSettings:
    """Raises ClientError, which names the setting."""
    given = _Given(mapping)
    protocol = given.take("security.protocol", default="PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise _wrong("security.protocol", protocol, f"must be one of {', '.join(_PROTOCOLS)}")
    numbers = {name: value for name, names in NUMBERS.items() if (value := _number(given, names)) is not None}
    tls, sasl = _tls(given), _sasl(given, wanted=protocol.startswith("SASL_"))
    return ConnectionSettings(
        bootstrap=_addresses(given),
        security=tls if protocol.endswith("SSL") else None,
        sasl=sasl,
        client_id=given.take("client.id", default="penstock"),
        unknown=given.rest(),
        **numbers,
    )


class _Given:
    """What the user wrote, less what was read already."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._left = {str(name).strip(): str(value) for name, value in mapping.items() if value is not None}

    def find(self, *names: str) -> str | None:
        """The first of these that is there; all of them count as read."""
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None and value != ""), None)

    def has(self, name: str) -> bool:
        return bool(self._left.get(name))

    def take(self, *names: str, default: str) -> str:
        value = self.find(*names)
        return default if value is None else value.strip()

    def rest(self) -> tuple[str, ...]:
        return tuple(sorted(self._left))


def _addresses(given: _Given) -> tuple[Address, ...]:
    text = given.take("bootstrap.servers", "metadata.broker.list", default="")
    addresses = tuple(_address(part.strip()) for part in text.split(",") if part.strip())
    if not addresses:
        raise ClientError(
            "bootstrap.servers is not given: it names brokers as host:port, separated by commas"
        )
    return addresses


def _address(text: str) -> Address:
    bare = text.rpartition("://")[2]
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>\d{1,5}))?", bare)
    port = int(match["port"] or _DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise _wrong("bootstrap.servers", text, "must be host:port")
    return match["six"] or match["host"], port


def _number(given: _Given, names: tuple[str, ...]) -> int | None:
    text = given.find(*names)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,10}", text.strip()) or not 0 < int(text) <= _NUMBER_MAX:
        raise _wrong(names[0], text, f"must be a whole number from 1 to {_NUMBER_MAX}")
    return int(text)


def _boolean(given: _Given, name: str, *, default: bool) -> bool:
    text = given.take(name, default="true" if default else "false").lower()
    if text not in _BOOLEANS:
        raise _wrong(name, text, "must be true or false")
    return _BOOLEANS[text]


# Trust


def _tls(given: _Given) -> TlsSettings:
    for store in _STORES:
        _refuse_java_store(given, store)
    keystore = given.find("ssl.keystore.location")
    algorithm = given.take("ssl.endpoint.identification.algorithm", default="https").lower()
    if algorithm not in ("https", "none"):
        raise _wrong("ssl.endpoint.identification.algorithm", algorithm, "must be https or none")
    return TlsSettings(
        ca_location=given.find("ssl.ca.location", "ssl.truststore.location"),
        ca_pem=given.find("ssl.ca.pem", "ssl.truststore.certificates"),
        certificate_location=given.find("ssl.certificate.location") or keystore,
        certificate_pem=given.find("ssl.certificate.pem", "ssl.keystore.certificate.chain"),
        key_location=given.find("ssl.key.location") or keystore,
        key_pem=given.find("ssl.key.pem", "ssl.keystore.key"),
        key_password=given.find("ssl.key.password", "ssl.keystore.password"),
        checks_hostname=algorithm == "https",
        verifies=_boolean(given, "enable.ssl.certificate.verification", default=True),
    )


def _refuse_java_store(given: _Given, store: str) -> None:
    """Python reads no Java keystores; without a type Java would take the file for one."""
    kind = given.find(f"{store}.type")
    if (kind or ("JKS" if given.has(f"{store}.location") else "PEM")).strip().upper() != "PEM":
        raise ClientError(
            f"{store}.type={kind or 'JKS'} cannot be read: give the certificates as PEM "
            f"(convert them with `keytool -exportcert -rfc` or `openssl pkcs12`, and set {store}.type=PEM)"
        )
    if store == "ssl.truststore":
        given.find("ssl.truststore.password")  # PEM files of certificates have none


# Credentials


def _sasl(given: _Given, *, wanted: bool) -> SaslSettings | None:
    mechanism = given.take("sasl.mechanism", "sasl.mechanisms", default="").upper()
    jaas = given.find("sasl.jaas.config")
    username, password = given.find("sasl.username"), given.find("sasl.password")
    if not wanted:
        return None
    if mechanism not in MECHANISMS:
        raise _wrong("sasl.mechanism", mechanism or "(none)", f"must be one of {', '.join(MECHANISMS)}")
    if jaas is not None:
        options = _jaas_options(jaas, mechanism)
        username, password = username or options.get("username"), password or options.get("password")
    if username is None or password is None:
        raise ClientError(f"{mechanism} needs sasl.username and sasl.password, or both in sasl.jaas.config")
    return SaslSettings(mechanism=mechanism, username=username, password=password)


def _jaas_options(text: str, mechanism: str) -> dict[str, str]:
    """Never shows the text, which holds a password."""
    match = _JAAS.fullmatch(text)
    if match is None:
        raise ClientError(
            'sasl.jaas.config must look like: <LoginModule> required username="..." password="...";'
        )
    module = match["module"].rpartition(".")[2]
    if mechanism not in _JAAS_MECHANISMS.get(module, ()):
        raise ClientError(f"sasl.jaas.config: {module} does not go with sasl.mechanism={mechanism}")
    return {name: _jaas_value(*values) for name, *values in _JAAS_OPTION.findall(match["options"])}


def _jaas_value(double: str, single: str, bare: str) -> str:
    return bare or re.sub(r"\\(.)", r"\1", double or single)


def _wrong(name: str, value: Any, wanted: str) -> ClientError:
    return ClientError(f"{name}={value}: {wanted}")
