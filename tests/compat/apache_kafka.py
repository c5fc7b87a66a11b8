"""Apache Kafka in a process of its own, where its jars can be had: for what our own brokers do not have to offer.

`secure_kafka` has all ways in: alice, with PASSWORD by PLAIN and with SCRAM_PASSWORD by SCRAM, and a certificate for
localhost.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.chaos.late.producers import java_libs
from tests.ports import free_address
from tests.waiting import eventually

from penstock.client.errors import Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings

HOST = "127.0.0.1"
SECURE_LISTENERS = ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL")
PASSWORD = 'open "sesame", friend'
SCRAM_PASSWORD = "easy"
JAAS = "org.apache.kafka.common.security"
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"
START_S = 60.0
STOP_S = 30.0
#: The exit code where the jars cannot be had: `make test-kafka` then leaves the tests out, and fails for any other.
LEFT_OUT = 75
#: The log cleaner takes 128 MB of it in one piece, which G1 does not find in a small heap.
_HEAP = ("-Xmx512M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
#: One node that is all it needs.
_ALONE = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.num.partitions": "2",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "2",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
}


#: Of tests that run against it; `make test-kafka` fetches the jars and runs these.
NEEDED = [
    pytest.mark.kafka,
    pytest.mark.skipif(
        java_libs() is None, reason="needs java and the jars of Apache Kafka: make test-kafka fetches them"
    ),
]


class ApacheKafka:
    """`listeners` are protocols, each of which gets a port: PLAINTEXT, and SSL, SASL_PLAINTEXT, SASL_SSL."""

    def __init__(
        self,
        folder: Path,
        listeners: Sequence[str],
        settings: Mapping[str, str],
        *,
        controller_protocol: str = "PLAINTEXT",
    ) -> None:
        self._folder = folder
        self.ports = {name: free_address(HOST)[1] for name in (*listeners, "CONTROLLER")}
        places = {name: f"{name}://{HOST}:{port}" for name, port in self.ports.items()}
        protocols = {name: name for name in listeners} | {"CONTROLLER": controller_protocol}
        self._settings = {
            **_ALONE,
            "controller.quorum.voters": f"1@{HOST}:{self.ports['CONTROLLER']}",
            "listeners": ",".join(places.values()),
            "advertised.listeners": ",".join(places[name] for name in listeners),
            "listener.security.protocol.map": ",".join(f"{a}:{b}" for a, b in protocols.items()),
            "inter.broker.listener.name": listeners[0],
            "log.dirs": str(folder / "data"),
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, protocol: str, host: str = HOST) -> str:
        return f"{host}:{self.ports[protocol]}"

    def start(self, format_options: Sequence[str] = ()) -> "ApacheKafka":
        self._folder.mkdir(parents=True, exist_ok=True)
        properties = self._folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in self._settings.items()))
        identity = ["--cluster-id", CLUSTER_ID, "--config", str(properties)]
        tool = java_command("kafka.tools.StorageTool", "format", *identity, *format_options)
        subprocess.run(tool, check=True, capture_output=True)
        with self._log.open("wb") as log:
            command = java_command("kafka.Kafka", str(properties))
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(self._is_started, within_s=START_S, what="Apache Kafka's start")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_S)

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _is_started(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"Apache Kafka has ended:\n{self._log.read_text()[-3000:]}")
        impatient = {"bootstrap.servers": self.address("PLAINTEXT"), "default.api.timeout.ms": "100"}
        try:
            with Cluster(ConnectionSettings.parse(impatient)) as cluster:
                return bool(cluster.nodes())
        except Unavailable:
            return False


def has_tools() -> bool:
    """Whether the programs of kafka-tools are there: they are a jar of their own."""
    libs = java_libs()
    return libs is not None and any(libs.glob("kafka-tools-4.*.jar"))


def java_command(program: str, *arguments: str) -> list[str]:
    libs, java = java_libs(), shutil.which("java")
    assert libs is not None
    assert java is not None
    return [java, *_HEAP, "-cp", f"{libs}/*", program, *arguments]


def make_certificate(folder: Path) -> Path:
    """For localhost, with its key in `keystore.pem`, in one file as Kafka wants it."""
    key, made, both = (folder / name for name in ("server.key", "server.pem", "keystore.pem"))
    names = ["-subj", "/CN=server", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-nodes", *names]
    subprocess.run([*command, "-keyout", key, "-out", made], check=True, capture_output=True)
    both.write_text(key.read_text() + made.read_text())
    return made


def secure_kafka(folder: Path) -> ApacheKafka:
    """Started, with the certificate that is in the folder."""
    escaped = PASSWORD.replace('"', '\\\\"')
    security = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "keystore.pem"),
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
    }
    for name in ("sasl_plaintext", "sasl_ssl"):
        prefix = f"listener.name.{name}"
        security[f"{prefix}.plain.sasl.jaas.config"] = (
            f'{JAAS}.plain.PlainLoginModule required user_alice="{escaped}";'
        )
        for kind in ("scram-sha-256", "scram-sha-512"):
            security[f"{prefix}.{kind}.sasl.jaas.config"] = f"{JAAS}.scram.ScramLoginModule required;"
    users = [f'SCRAM-SHA-{bits}=[name=alice,password="{SCRAM_PASSWORD}"]' for bits in (256, 512)]
    broker = ApacheKafka(folder / "broker", SECURE_LISTENERS, security)
    return broker.start([word for each in users for word in ("--add-scram", each)])


def main() -> int:
    """Fetch the jars by Maven into the ignored cache of the benchmarks, where they are looked for."""
    from benchmarks.brokers.kafka import PeerUnavailable, fetch_kafka

    try:
        print(f"Apache Kafka {fetch_kafka()}")
    except PeerUnavailable as reason:
        print(f"TESTS AGAINST APACHE KAFKA ARE LEFT OUT: {reason}", file=sys.stderr)
        return LEFT_OUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
