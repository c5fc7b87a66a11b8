"""What a broker under measurement asks of its clients, in the settings that both brokers share."""

from dataclasses import dataclass
from pathlib import Path

from kio.schema.alter_client_quotas.v1 import request as quotas_request
from kio.schema.alter_client_quotas.v1 import response as quotas_response
from kio.schema.create_acls.v3 import request as acls_request
from kio.schema.create_acls.v3 import response as acls_response
from tests.certificates import Authority

from benchmarks.wire.access import ADMIN, LOAD, Access
from benchmarks.wire.raw_client import BrokerError, Connection
from penstock.protocol.acls import WILDCARD, Operation, PatternType, Permission, ResourceType

_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_CERTIFICATE, _AUTHORITY = "node.pem", "ca.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """`users` log in by PLAIN and do what access rules allow them; without users everybody may do everything."""

    tls: bool = False
    users: tuple[str, ...] = ()

    @property
    def protocol(self) -> str:
        return ("SASL_" if self.users else "") + ("SSL" if self.tls else "PLAINTEXT")

    def prepare(self, folder: Path) -> None:
        """Make the certificate of the broker, the same kind for all."""
        if self.tls:
            Authority(folder).issue("node")

    def access(self, folder: Path) -> Access:
        """Of the administrator."""
        return Access(
            certificate=folder / _AUTHORITY if self.tls else None, user=ADMIN if self.users else None
        )

    def settings(self, folder: Path) -> dict[str, str]:
        """Those that have the same names and meanings in Penstock and Apache Kafka."""
        found: dict[str, str] = {}
        if self.tls:
            found |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(folder / _CERTIFICATE)}
        if self.users:
            users = " ".join(f'user_{name}="{name}"' for name in (ADMIN, *self.users))
            prefix = f"listener.name.{self.protocol.lower()}.plain"
            found |= {
                "sasl.enabled.mechanisms": "PLAIN",
                f"{prefix}.sasl.jaas.config": f"{_MODULE} required {users};",
            }
        return found


OPEN = Security()
#: One user, who logs in, has rules, and has quotas that are never reached.
LOAD_ONLY = Security(users=(LOAD,))


def allow_all_topics(admin: Connection, user: str) -> None:
    """Rules for every topic and group, one for each operation that a client needs."""
    wanted = [
        *(
            (ResourceType.TOPIC, operation)
            for operation in (Operation.READ, Operation.WRITE, Operation.DESCRIBE)
        ),
        (ResourceType.GROUP, Operation.READ),
        (ResourceType.TRANSACTIONAL_ID, Operation.WRITE),
    ]
    creations = tuple(
        acls_request.AclCreation(
            resource_type=kind,
            resource_name=WILDCARD,
            resource_pattern_type=PatternType.LITERAL,
            principal=f"User:{user}",
            host=WILDCARD,
            operation=operation,
            permission_type=Permission.ALLOW,
        )
        for kind, operation in wanted
    )
    answer = admin.call(acls_request.CreateAclsRequest(creations=creations), acls_response.CreateAclsResponse)
    for result in answer.results:
        if result.error_code.value:
            raise BrokerError(f"no rules for {user}: {result.error_message}")


def set_quotas(admin: Connection, entity: str, name: str, limits: dict[str, float]) -> None:
    entry = quotas_request.EntryData(
        entity=(quotas_request.EntityData(entity_type=entity, entity_name=name),),
        ops=tuple(quotas_request.OpData(key=key, value=value, remove=False) for key, value in limits.items()),
    )
    request = quotas_request.AlterClientQuotasRequest(entries=(entry,), validate_only=False)
    (result,) = admin.call(request, quotas_response.AlterClientQuotasResponse).entries
    if result.error_code.value:
        raise BrokerError(f"no quotas for {entity} {name}: {result.error_message}")
