"""A plain model of access rules: it goes through all of them, in the words of Kafka's documentation."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.protocol.acls import (
    CLUSTER_NAME,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)

#: A name that no rule has, in no prefix of which there is a rule either.
NO_NAME = "~"
_IMPLYING = {
    Operation.DESCRIBE: (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER),
    Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
}


def covers(acl: AclBinding, resource_type: int, name: str) -> bool:
    if acl.resource_type != resource_type:
        return False
    if acl.pattern_type == PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name == name or acl.resource_name == "*"


def concerns(acl: AclBinding, principal: str, host: str) -> bool:
    return acl.principal in (principal, "User:*") and acl.host in (host, "*")


def grants(acl: AclBinding, operation: int) -> bool:
    return acl.operation in (Operation.ALL, operation, *_IMPLYING.get(Operation(operation), ()))


@dataclass
class Model:
    """What one principal on one host may do."""

    rules: Collection[AclBinding]
    principal: str
    host: str
    is_super_user: bool = False
    #: allow.everyone.if.no.acl.found
    is_open: bool = False

    def may(self, operation: int, resource_type: int, name: str = CLUSTER_NAME) -> bool:
        if self.is_super_user:
            return True
        covering = [acl for acl in self.rules if covers(acl, resource_type, name)]
        if not covering:
            return self.is_open and resource_type not in (ResourceType.USER, ResourceType.DELEGATION_TOKEN)
        concerning = [acl for acl in covering if concerns(acl, self.principal, self.host)]
        for acl in concerning:
            if acl.permission == Permission.DENY and acl.operation in (Operation.ALL, operation):
                return False
        return any(acl.permission == Permission.ALLOW and grants(acl, operation) for acl in concerning)

    def may_to_any(self, operation: int, resource_type: int) -> bool:
        """Whether there can be a name to which it may do this: one of a rule, one in a prefix, or any other."""
        names = {acl.resource_name for acl in self.rules if acl.resource_type == resource_type}
        return any(
            self.may(operation, resource_type, name)
            for name in {NO_NAME, *names, *(name + NO_NAME for name in names)}
        )
