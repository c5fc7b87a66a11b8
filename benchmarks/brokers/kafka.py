"""Apache Kafka as the peer: its jars by Maven coordinates, its broker in KRaft combined mode, as it ships."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port

from benchmarks.brokers.broker import COMMON_SETTINGS, HOST, Broker
from benchmarks.brokers.security import OPEN, Security
from benchmarks.wire.access import ADMIN

CACHE = Path(__file__).parent.parent / ".cache" / "kafka"
#: What Kafka's own start script passes: kafka-server-start.sh and kafka-run-class.sh.
HEAP_OPTIONS = ("-Xmx1G", "-Xms1G")
JVM_OPTIONS = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
#: Its default.
_NEVER = 2**63 - 1
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"

_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>benchmarks</groupId>
  <artifactId>kafka-runtime</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>[4.0,5.0)</version>
    </dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka-tools</artifactId>
      <version>[4.0,5.0)</version>
      <exclusions>
        <exclusion>
          <groupId>*</groupId>
          <artifactId>*</artifactId>
        </exclusion>
      </exclusions>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>[2.24,3.0)</version>
    </dependency>
  </dependencies>
</project>
"""

_LOG4J = """\
Configuration:
  Appenders:
    Console: {name: STDOUT, PatternLayout: {pattern: "[%d] %p %m (%c)%n"}}
  Loggers:
    Root: {level: INFO, AppenderRef: {ref: STDOUT}}
"""


class PeerUnavailable(Exception):
    """Apache Kafka cannot be had here; the message says why."""


def fetch_kafka() -> str:
    """Bring the jars into the cache unless they are there; returns Kafka's version."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise PeerUnavailable(f"`{tool}` is not installed")
    pom = CACHE / "pom.xml"
    if not (CACHE / "complete").exists() or pom.read_text() != _POM:
        _download()
    return _version()


def _download() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "complete").unlink(missing_ok=True)
    (CACHE / "pom.xml").write_text(_POM)
    (CACHE / "log4j2.yaml").write_text(_LOG4J)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={CACHE / 'libs'}"]
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(CACHE / "pom.xml"), *goal]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerUnavailable(f"Maven could not fetch the jars:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    (CACHE / "complete").touch()


def _version() -> str:
    return next((CACHE / "libs").glob("kafka_2.13-*.jar")).stem.partition("-")[2]


class KafkaBroker(Broker):
    name = "kafka"

    def __init__(self, folder: Path, security: Security = OPEN) -> None:
        super().__init__(folder, security)
        self.controller_port, self._node_port = free_port(), free_port()

    def prepare(self) -> None:
        """Formatting is a separate command that a user runs once, so starting does not include it."""
        self._properties.write_text(self._property_lines())
        arguments = ["format", "--cluster-id", _CLUSTER_ID, "--config", str(self._properties)]
        subprocess.run(_java("kafka.tools.StorageTool", *arguments), check=True, capture_output=True)

    def command(self) -> list[str]:
        return _java("kafka.Kafka", str(self._properties), options=(*HEAP_OPTIONS, *JVM_OPTIONS))

    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        return {"flush.messages": "1" if fsync else str(_NEVER)}

    def settings(self) -> Mapping[str, str]:
        java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
        return {
            "version": _version(),
            "java": java.splitlines()[0],
            "jvm": " ".join((*HEAP_OPTIONS, *JVM_OPTIONS)),
            "settings": self._property_lines(),
        }

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _property_lines(self) -> str:
        """What Kafka's shipped server.properties sets, on loopback."""
        return "\n".join(
            (
                "process.roles=broker,controller",
                f"listeners={self._client_listeners},CONTROLLER://{HOST}:{self.controller_port}",
                "controller.listener.names=CONTROLLER",
                "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
                "SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",
                *self._security_lines(),
                f"log.dirs={self.folder / 'data'}",
                "num.network.threads=3",
                "num.io.threads=8",
                "socket.send.buffer.bytes=102400",
                "socket.receive.buffer.bytes=102400",
                *(f"{name}={value}" for name, value in COMMON_SETTINGS.items()),
                *self.place_lines(),
                "",
            )
        )

    @property
    def _client_listeners(self) -> str:
        own = f"{self.security.protocol}://{HOST}:{self.port}"
        return own if self.security == OPEN else f"{own},PLAINTEXT://{HOST}:{self._node_port}"

    def _security_lines(self) -> tuple[str, ...]:
        """The brokers and controllers themselves stay on listeners without any."""
        if self.security == OPEN:
            return ()
        lines = [f"{name}={value}" for name, value in self.security.settings(self.folder).items()]
        if self.security.users:
            lines += [
                "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                f"super.users=User:{ADMIN};User:ANONYMOUS",
            ]
        return ("inter.broker.listener.name=PLAINTEXT", *lines)

    def place_lines(self) -> tuple[str, ...]:
        """Who and where it is: alone."""
        return (
            "node.id=1",
            f"controller.quorum.voters=1@{HOST}:{self.controller_port}",
            f"advertised.listeners={self._client_listeners}",
            "offsets.topic.replication.factor=1",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "share.coordinator.state.topic.replication.factor=1",
            "share.coordinator.state.topic.min.isr=1",
        )


def _java(main_class: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    logging = f"-Dlog4j2.configurationFile={CACHE / 'log4j2.yaml'}"
    return ["java", *options, logging, "-cp", f"{CACHE / 'libs'}/*", main_class, *arguments]
