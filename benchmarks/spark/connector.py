"""Spark's own Kafka connector as the peer: its jars from Maven Central, kept in a cache folder."""

import hashlib
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.brokers.kafka import PeerUnavailable

CACHE = Path(__file__).parent.parent / ".cache" / "spark-connector"
CENTRAL = "https://repo1.maven.org/maven2"
_SPARK = "org.apache.spark"
_TIMEOUT_S = 60
_RELEASE = re.compile(r"\d+\.\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    jars: tuple[Path, ...]
    #: Of each artifact, for the report.
    versions: dict[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


@dataclass(frozen=True, slots=True)
class _Artifact:
    group: str
    name: str

    def address(self, version: str, kind: str) -> str:
        return f"{self._folder}/{version}/{self.name}-{version}.{kind}"

    def list_address(self) -> str:
        return f"{self._folder}/maven-metadata.xml"

    @property
    def _folder(self) -> str:
        return f"{CENTRAL}/{self.group.replace('.', '/')}/{self.name}"


def fetch_connector(spark_version: str, scala_version: str) -> Connector:
    """Bring the jars into the cache unless they are there. Raises PeerUnavailable.

    Where Maven Central does not have an artifact of Spark's own version, the newest before it is taken; the first
    query tells whether the two fit, and the versions stand in the results.
    """
    folder = CACHE / f"{spark_version}-{scala_version}"
    complete = folder / "complete"
    if not complete.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            versions = _download(folder, spark_version, scala_version)
        except (OSError, ElementTree.ParseError) as reason:
            raise PeerUnavailable(f"its jars cannot be had from {CENTRAL}: {reason}") from None
        complete.write_text("\n".join(f"{name} {version}" for name, version in versions.items()))
    versions = dict(line.split() for line in complete.read_text().splitlines())
    jars = tuple(folder / f"{name}-{version}.jar" for name, version in versions.items())
    return Connector(jars=jars, versions=versions)


def _download(folder: Path, spark_version: str, scala_version: str) -> dict[str, str]:
    connector = _Artifact(_SPARK, f"spark-sql-kafka-0-10_{scala_version}")
    tokens = _Artifact(_SPARK, f"spark-token-provider-kafka-0-10_{scala_version}")
    chosen = {artifact.name: _newest(folder, artifact, spark_version) for artifact in (connector, tokens)}
    needed = _dependencies(_get(connector.address(chosen[connector.name], "pom")))
    for artifact in (
        _Artifact("org.apache.kafka", "kafka-clients"),
        _Artifact("org.apache.commons", "commons-pool2"),
    ):
        chosen[artifact.name] = version = needed[artifact.name]
        _save(folder, artifact, version)
    return chosen


def _newest(folder: Path, artifact: _Artifact, spark_version: str) -> str:
    """The version of the newest that is no newer than Spark itself, which is in the folder then."""
    for version in _candidates(artifact, spark_version):
        try:
            _save(folder, artifact, version)
        except urllib.error.HTTPError as reason:
            if reason.code != 404:
                raise
        else:
            return version
    raise PeerUnavailable(f"{CENTRAL} has no {artifact.name} for Spark {spark_version} or older")


def _candidates(artifact: _Artifact, spark_version: str) -> Iterator[str]:
    yield spark_version
    listed = ElementTree.fromstring(_get(artifact.list_address())).iter("version")
    releases = {each.text or "" for each in listed if _RELEASE.fullmatch(each.text or "")}
    major = spark_version.partition(".")[0]
    for version in sorted(releases, key=_numbers, reverse=True):
        if version.partition(".")[0] == major and _numbers(version) < _numbers(spark_version):
            yield version


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _dependencies(pom: bytes) -> dict[str, str]:
    space = "{http://maven.apache.org/POM/4.0.0}"
    found = ElementTree.fromstring(pom).iter(f"{space}dependency")
    return {
        each.findtext(f"{space}artifactId", ""): each.findtext(f"{space}version", "")
        for each in found
        if each.findtext(f"{space}scope", "compile") == "compile"
    }


def _save(folder: Path, artifact: _Artifact, version: str) -> None:
    jar = _get(artifact.address(version, "jar"))
    said = _get(artifact.address(version, "jar.sha1")).decode().split()[0]
    if hashlib.sha1(jar, usedforsecurity=False).hexdigest() != said:
        raise PeerUnavailable(f"{artifact.name} {version} does not have the checksum that {CENTRAL} says")
    (folder / f"{artifact.name}-{version}.jar").write_bytes(jar)


def _get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:
        return bytes(answer.read())
