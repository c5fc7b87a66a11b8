"""`penstock acl`: list, add and remove access rules, with the options of `kafka-acls`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import confirm, note, plural, print_json, print_table
from penstock.client.admin.acls import create_acls, delete_acls, list_acls
from penstock.protocol.acls import (
    CLUSTER_NAME,
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    parse_principal,
)

app = typer.Typer(help="Who may do what: list, add and remove access rules.", no_args_is_help=True)

Resource = tuple[ResourceType, str]


class Pattern(StrEnum):
    LITERAL = "literal"
    PREFIXED = "prefixed"
    ANY = "any"
    MATCH = "match"


@dataclass(frozen=True)
class ResourceOptions:
    """What the rules are about."""

    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="NAME", help="A topic; * is all of them.", show_default=False),
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="NAME", help="A group; * is all of them.", show_default=False),
    ] = None
    cluster: Annotated[bool, typer.Option("--cluster", help="The cluster itself.")] = False
    transactional_id: Annotated[
        list[str] | None,
        typer.Option(
            "--transactional-id", metavar="ID", help="A transactional id; * is all.", show_default=False
        ),
    ] = None
    delegation_token: Annotated[
        list[str] | None,
        typer.Option("--delegation-token", metavar="ID", help="A delegation token.", show_default=False),
    ] = None
    user_principal: Annotated[
        list[str] | None,
        typer.Option(
            "--user-principal", metavar="PRINCIPAL", help="A user, as an owner of tokens.", show_default=False
        ),
    ] = None

    def resources(self) -> list[Resource]:
        named = (
            (ResourceType.TOPIC, self.topic),
            (ResourceType.GROUP, self.group),
            (ResourceType.CLUSTER, [CLUSTER_NAME] if self.cluster else None),
            (ResourceType.TRANSACTIONAL_ID, self.transactional_id),
            (ResourceType.DELEGATION_TOKEN, self.delegation_token),
            (ResourceType.USER, self.user_principal),
        )
        return [(kind, name) for kind, names in named for name in names or ()]


@dataclass(frozen=True)
class RuleOptions:
    """Whom the rules are about, and what they allow or deny."""

    allow_principal: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-principal",
            metavar="PRINCIPAL",
            help="User:NAME; User:* is everybody.",
            show_default=False,
        ),
    ] = None
    deny_principal: Annotated[
        list[str] | None,
        typer.Option(
            "--deny-principal",
            metavar="PRINCIPAL",
            help="User:NAME; User:* is everybody.",
            show_default=False,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="HOST", help="An address. Default: every host.", show_default=False
        ),
    ] = None
    deny_host: Annotated[
        list[str] | None,
        typer.Option(
            "--deny-host", metavar="HOST", help="An address. Default: every host.", show_default=False
        ),
    ] = None
    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            metavar="NAME",
            help="Read, Write, Create, Delete, Alter, Describe, DescribeConfigs, AlterConfigs, ... Default: All.",
            show_default=False,
        ),
    ] = None
    producer: Annotated[
        bool,
        typer.Option("--producer", help="What a producer needs: Write, Describe and Create on its topics."),
    ] = False
    consumer: Annotated[
        bool,
        typer.Option(
            "--consumer", help="What a consumer needs: Read and Describe on its topics, Read on its groups."
        ),
    ] = False
    idempotent: Annotated[
        bool, typer.Option("--idempotent", help="With --producer: also IdempotentWrite on the cluster.")
    ] = False
    pattern: Annotated[
        Pattern,
        typer.Option(
            "--resource-pattern-type",
            help="`literal` or `prefixed`. To list or remove: `any` for both, `match` for rules that cover the name.",
            case_sensitive=False,
        ),
    ] = Pattern.LITERAL

    def subjects(self) -> Iterator[tuple[str, str, Permission]]:
        for principals, hosts, permission in (
            (self.allow_principal, self.allow_host, Permission.ALLOW),
            (self.deny_principal, self.deny_host, Permission.DENY),
        ):
            for principal in principals or ():
                try:
                    parse_principal(principal)
                except ValueError:
                    raise _usage(f"{principal!r} is no principal", "write User:NAME") from None
                for host in hosts or (WILDCARD,):
                    yield principal, host, permission

    def granted(self, resources: list[Resource]) -> list[tuple[ResourceType, str, Operation]]:
        """Return what the rules are about, with the operations on it."""
        if self.producer or self.consumer:
            return self._granted_to_clients(resources)
        operations = [parse_operation(name) for name in self.operation or ("All",)]
        for kind, _ in resources:
            for operation in operations:
                if operation is not Operation.ALL and operation not in SUPPORTED_OPERATIONS[kind]:
                    raise _usage(
                        f"there is no {acl_word(operation)} on a {acl_word(kind)}",
                        "use " + ", ".join(sorted(map(acl_word, SUPPORTED_OPERATIONS[kind]))),
                    )
        return [(*resource, operation) for resource in resources for operation in operations]

    def _granted_to_clients(self, resources: list[Resource]) -> list[tuple[ResourceType, str, Operation]]:
        if self.operation:
            raise _usage("--producer and --consumer set the operations", "leave out --operation")
        kinds = {kind for kind, _ in resources}
        if ResourceType.TOPIC not in kinds:
            raise _usage("producers and consumers need a topic", "add --topic")
        if self.consumer and ResourceType.GROUP not in kinds:
            raise _usage("consumers need a group", "add --group")
        found: list[tuple[ResourceType, str, Operation]] = []
        for kind, name in resources:
            operations: list[Operation] = []
            if self.producer:
                operations += PRODUCER_OPERATIONS.get(kind, ())
            if self.consumer:
                operations += CONSUMER_OPERATIONS.get(kind, ())
            found += [(kind, name, operation) for operation in dict.fromkeys(operations)]
        if self.producer and self.idempotent:
            found.append((ResourceType.CLUSTER, CLUSTER_NAME, Operation.IDEMPOTENT_WRITE))
        return found


#: By the type of the resource, what producers and consumers need on it.
PRODUCER_OPERATIONS = {
    ResourceType.TOPIC: (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE),
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}
CONSUMER_OPERATIONS = {
    ResourceType.TOPIC: (Operation.READ, Operation.DESCRIBE),
    ResourceType.GROUP: (Operation.READ,),
}


@app.command("list")
@expand_options
def list_rules(
    connection: ConnectionOptions,
    resource: ResourceOptions,
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", metavar="PRINCIPAL", help="Only rules about it.", show_default=False),
    ] = None,
    pattern: Annotated[
        Pattern,
        typer.Option("--resource-pattern-type", help="How names are meant.", case_sensitive=False),
    ] = Pattern.ANY,
    as_json: AsJson = False,
) -> None:
    """List rules: all of them, or those about some resources or principals."""
    wanted_resources: list[tuple[ResourceType, str | None]] = [*resource.resources()]
    wanted_resources = wanted_resources or [(ResourceType.ANY, None)]
    filters = [
        AclFilter(kind, name, PatternType[pattern.name], who)
        for kind, name in wanted_resources
        for who in principal or (None,)
    ]
    with open_cluster(connection) as cluster:
        found = sorted({acl for wanted in filters for acl in list_acls(cluster, wanted)})
    if as_json:
        print_json([acl_document(acl) for acl in found])
    elif found:
        print_table(
            ["resource", "name", "pattern", "principal", "host", "operation", "permission"],
            [list(acl_document(acl).values()) for acl in found],
        )
    else:
        note("no access rules")


@app.command()
@expand_options
def add(connection: ConnectionOptions, resource: ResourceOptions, rule: RuleOptions) -> None:
    """Add rules. `penstock acl add --allow-principal User:alice --consumer --topic orders --group billing`"""
    rules = _rules(resource, rule)
    if rule.pattern not in (Pattern.LITERAL, Pattern.PREFIXED):
        raise _usage(f"a rule cannot have the pattern type {rule.pattern.value}", "use literal or prefixed")
    with open_cluster(connection) as cluster:
        create_acls(cluster, rules)
    note(f"{plural(len(rules), 'rule')} added")
    for acl in rules:
        if acl.pattern_type == PatternType.PREFIXED and acl.resource_name == WILDCARD:
            note("a prefixed * covers only names that begin with *; for all names use literal")


@app.command()
@expand_options
def remove(
    connection: ConnectionOptions, resource: ResourceOptions, rule: RuleOptions, yes: Yes = False
) -> None:
    """Remove rules: those that are named in full, or without principals all rules of the resources."""
    resources = resource.resources()
    if not resources:
        raise _usage("which rules?", "name a resource: --topic, --group, --cluster or --transactional-id")
    pattern = PatternType[rule.pattern.name]
    if rule.allow_principal or rule.deny_principal:
        filters = [
            AclFilter(kind, name, pattern, principal, host, operation, permission)
            for kind, name, operation in rule.granted(resources)
            for principal, host, permission in rule.subjects()
        ]
    else:
        filters = [AclFilter(kind, name, pattern) for kind, name in resources]
    with open_cluster(connection) as cluster:
        found = sorted({acl for wanted in filters for acl in list_acls(cluster, wanted)})
        if not found:
            raise CommandError("there is no such rule", hint="`penstock acl list` shows all rules")
        confirm(f"Remove {plural(len(found), 'rule')}?", yes=yes)
        deleted = delete_acls(cluster, filters)
    note(f"{plural(len(deleted), 'rule')} removed")
    if left := len(found) - len(deleted):
        note(f"{plural(left, 'rule')} of tenants left: `penstock tenant alter` and `delete` change those")


def _rules(resource: ResourceOptions, rule: RuleOptions) -> list[AclBinding]:
    resources = resource.resources()
    if not resources:
        raise _usage("rules about what?", "add --topic, --group, --cluster or --transactional-id")
    subjects = list(rule.subjects())
    if not subjects:
        raise _usage("rules about whom?", "add --allow-principal or --deny-principal")
    pattern = PatternType[rule.pattern.name]
    return [
        AclBinding(
            kind,
            name,
            PatternType.LITERAL if kind is ResourceType.CLUSTER else pattern,
            principal,
            host,
            operation,
            permission,
        )
        for kind, name, operation in rule.granted(resources)
        for principal, host, permission in subjects
    ]


def parse_operation(text: str) -> Operation:
    """Raises CommandError."""
    wanted = text.replace("_", "").lower()
    for operation in Operation:
        if operation > Operation.ANY and operation.name.replace("_", "").lower() == wanted:
            return operation
    known = ", ".join(acl_word(operation) for operation in Operation if operation > Operation.ANY)
    raise _usage(f"there is no operation {text}", f"use one of {known}")


def acl_word(value: Operation | ResourceType | PatternType | Permission) -> str:
    """`DescribeConfigs`, as kafka-acls writes it."""
    return value.name.title().replace("_", "")


def acl_document(acl: AclBinding) -> dict[str, str]:
    return {
        "resource": acl_word(ResourceType(acl.resource_type)),
        "name": acl.resource_name,
        "pattern": PatternType(acl.pattern_type).name.lower(),
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl_word(Operation(acl.operation)),
        "permission": acl_word(Permission(acl.permission)),
    }


def _usage(message: str, hint: str) -> CommandError:
    return CommandError(message, hint=hint, exit_code=EXIT_USAGE)
