"""The file of `penstock apply`: tenants, users, access rules and client quotas, checked before a cluster is asked.

A section that the file does not have is not managed: `None`. Errors name the key, and never quote a password.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.cli.access.acl import CONSUMER_OPERATIONS, PRODUCER_OPERATIONS, parse_operation
from penstock.cli.access.tenant import LIMIT_OPTIONS, parse_limit
from penstock.cli.errors import CommandError
from penstock.cli.options import parse_size
from penstock.client.admin.tenants import Tenant
from penstock.cluster.controller.client_quotas import check_limits, quota_key
from penstock.cluster.tenants import PREFIX, TENANT_SETTINGS, USERS, check_tenant_name, prefixes_overlap
from penstock.protocol.acls import (
    CLUSTER_NAME,
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from penstock.protocol.config_def import InvalidSetting
from penstock.protocol.errors import ApiError
from penstock.protocol.scram import ITERATIONS_MAX, ITERATIONS_MIN, SCRAM_HASHES

#: Sorted pairs of an entity type and a name; the name None is the default of that type.
QuotaEntity = tuple[tuple[str, str | None], ...]
_SECTIONS: Final = ("tenants", "users", "rules", "quotas")
_USER: Final = "User:"
_ANONYMOUS: Final = "ANONYMOUS"
#: In a quota it stands for all that have no quota of their own.
_DEFAULT: Final = "default"
_ENTITY_KEYS: Final = {"user": "user", "client_id": "client-id", "ip": "ip"}
_QUOTA_KEYS: Final = {
    "produce": "producer_byte_rate",
    "consume": "consumer_byte_rate",
    "requests": "request_percentage",
    "mutations": "controller_mutation_rate",
    "connections": "connection_creation_rate",
}
_BYTE_RATES: Final = ("produce", "consume")
_RESOURCE_KEYS: Final = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
    "delegation_token": ResourceType.DELEGATION_TOKEN,
    "user_principal": ResourceType.USER,
}
_ROLES: Final[Mapping[str, Mapping[ResourceType, tuple[Operation, ...]]]] = {
    "producer": PRODUCER_OPERATIONS,
    "consumer": CONSUMER_OPERATIONS,
}
_PATTERNS: Final = {"literal": PatternType.LITERAL, "prefixed": PatternType.PREFIXED}


class DeclarationError(Exception):
    """The message begins with the key."""

    def __init__(self, key: str, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{key}: {problem}")
        self.hint = hint


class PasswordSource(NamedTuple):
    """`kind` is password_env, password_file or password; `value` is what the file says there."""

    kind: str
    value: str

    def __repr__(self) -> str:
        return f"PasswordSource({self.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredUser:
    """A field that is None is not declared: the cluster keeps what it has."""

    name: str
    mechanisms: tuple[str, ...] | None = None
    iterations: int | None = None
    password: PasswordSource | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    tenants: Mapping[str, Tenant] | None = None
    users: Mapping[str, DeclaredUser] | None = None
    rules: frozenset[AclBinding] | None = None
    quotas: Mapping[QuotaEntity, Mapping[str, float]] | None = None


def parse_declaration(document: Mapping[str, Any]) -> Declaration:
    """Raises DeclarationError."""
    top = _Table("the file", dict(document), prefix="")
    sections = {name: top.take(name) for name in _SECTIONS}
    top.finish()
    tenants, users, rules, quotas = (sections[name] for name in _SECTIONS)
    return Declaration(
        tenants=None if tenants is None else _parse_tenants(_tables("tenants", tenants)),
        users=None
        if users is None
        else {table.name: _parse_user(table) for table in _tables("users", users)},
        rules=None if rules is None else _parse_rules(_list_of_tables("rules", rules)),
        quotas=None if quotas is None else _parse_quotas(_list_of_tables("quotas", quotas)),
    )


# Tables


class _Table:
    """Reads one key after the other, and reports at the end the keys that were not read."""

    def __init__(
        self, key: str, values: dict[str, Any], *, name: str = "", prefix: str | None = None
    ) -> None:
        self.key, self.name = key, name
        self._values = values
        self._prefix = f"{key}." if prefix is None else prefix
        self._known: list[str] = []

    def at(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._values.pop(name, None)

    def text(self, name: str) -> str | None:
        found = self.take(name)
        if found is not None and (not isinstance(found, str) or not found):
            raise DeclarationError(self.at(name), f"must be text, not {_kind(found)}")
        return found

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A text or a list of texts, each once."""
        found = self.take(name)
        if found is None:
            return None
        items = found if isinstance(found, list) else [found]
        for item in items:
            if not isinstance(item, str) or not item:
                raise DeclarationError(self.at(name), f"must be text or a list of texts, not {_kind(item)}")
        if twice := _repeated(items):
            raise DeclarationError(self.at(name), f"names {twice} twice")
        if not items:
            raise DeclarationError(self.at(name), "must not be empty")
        return tuple(items)

    def flag(self, name: str) -> bool:
        found = self.take(name)
        if found is not None and not isinstance(found, bool):
            raise DeclarationError(self.at(name), f"must be true or false, not {_kind(found)}")
        return bool(found)

    def finish(self) -> None:
        for name in self._values:
            close = difflib.get_close_matches(name, self._known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(self._known)}"
            raise DeclarationError(self.at(name), "there is no such key", hint=hint)


def _kind(value: object) -> str:
    """The kind of a value, without the value: it may be a password in the wrong place."""
    match value:
        case "":
            return "empty text"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def _tables(section: str, value: object) -> list[_Table]:
    if not isinstance(value, dict):
        raise DeclarationError(section, f"must be tables [{section}.NAME], not {_kind(value)}")
    for name, item in value.items():
        if not isinstance(item, dict):
            raise DeclarationError(f"{section}.{name}", f"must be a table, not {_kind(item)}")
        if not name:
            raise DeclarationError(section, "a name is empty")
    return [_Table(f"{section}.{name}", dict(item), name=name) for name, item in value.items()]


def _list_of_tables(section: str, value: object) -> list[_Table]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DeclarationError(section, f"must be tables [[{section}]], or an empty list for none")
    return [_Table(f"{section}[{number}]", dict(item)) for number, item in enumerate(value, 1)]


def _repeated(items: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


# Tenants


def _parse_tenants(tables: Iterable[_Table]) -> dict[str, Tenant]:
    found: dict[str, Tenant] = {}
    owners: dict[str, str] = {}
    for table in tables:
        tenant = _parse_tenant(table)
        for user in tenant.users:
            if user in owners:
                raise DeclarationError(
                    table.at("users"), f"{user} belongs to tenant {owners[user]} already, and to one only"
                )
            owners[user] = tenant.name
        for other in found.values():
            if prefixes_overlap(tenant.prefix, other.prefix):
                raise DeclarationError(
                    table.at("prefix"), f"{tenant.prefix} overlaps with {other.prefix} of tenant {other.name}"
                )
        found[tenant.name] = tenant
    return found


def _parse_tenant(table: _Table) -> Tenant:
    try:
        check_tenant_name(table.name)
    except ApiError as error:
        raise DeclarationError(table.key, str(error.message)) from None
    users, prefix = table.texts("users"), table.text("prefix")
    for name, value in (("users", users), ("prefix", prefix)):
        if value is None:
            raise DeclarationError(table.key, f"{name} is missing")
    assert users is not None
    assert prefix is not None
    members = tuple(user.removeprefix(_USER) for user in users)
    for member in members:
        if ";" in member:
            raise DeclarationError(table.at("users"), f"{member} contains a semicolon")
    if twice := _repeated(members):
        raise DeclarationError(table.at("users"), f"names {twice} twice")
    _check_setting(table.at("users"), USERS, ";".join(f"{_USER}{member}" for member in members))
    _check_setting(table.at("prefix"), PREFIX, prefix)
    limits = {}
    for option, (setting, _, example) in LIMIT_OPTIONS.items():
        given = table.take(option)
        if given is None:
            continue
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise DeclarationError(table.at(option), f"must be a limit, not {_kind(given)}", hint=example)
        limit = _parsed(lambda key, text, option=option: parse_limit(key, option, text), table, option, given)
        if limit is not None:
            _check_setting(table.at(option), setting, str(limit))
            limits[setting] = limit
    table.finish()
    return Tenant(table.name, members, prefix, limits)


def _check_setting(key: str, setting: str, text: str) -> None:
    try:
        TENANT_SETTINGS[setting].parse(text)
    except InvalidSetting as error:
        raise DeclarationError(key, str(error)) from None


def _parsed(parse: Any, table: _Table, name: str, given: str | int) -> Any:
    """Calls a parser of command line options, whose errors begin with the name of the option."""
    try:
        return parse(table.at(name), str(given))
    except CommandError as error:
        raise DeclarationError(
            table.at(name), error.message.removeprefix(f"{table.at(name)}: "), hint=error.hint
        ) from None


# Users


def _parse_user(table: _Table) -> DeclaredUser:
    if table.name in (WILDCARD, _ANONYMOUS) or table.name.startswith(_USER):
        raise DeclarationError(table.key, "must be the name with which the user logs in")
    mechanisms, iterations = table.texts("mechanisms"), table.take("iterations")
    for mechanism in mechanisms or ():
        if mechanism not in SCRAM_HASHES:
            raise DeclarationError(
                table.at("mechanisms"), f"there is no {mechanism}", hint=f"use {' or '.join(SCRAM_HASHES)}"
            )
    if iterations is not None and (
        type(iterations) is not int or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX
    ):
        raise DeclarationError(
            table.at("iterations"), f"must be a whole number from {ITERATIONS_MIN} to {ITERATIONS_MAX}"
        )
    sources = [
        PasswordSource(kind, value)
        for kind in ("password_env", "password_file", "password")
        if (value := table.text(kind)) is not None
    ]
    if len(sources) > 1:
        raise DeclarationError(
            table.key, f"takes only one of {' and '.join(source.kind for source in sources)}"
        )
    table.finish()
    return DeclaredUser(
        name=table.name,
        mechanisms=mechanisms and tuple(sorted(mechanisms)),
        iterations=iterations,
        password=sources[0] if sources else None,
    )


# Access rules


def _parse_rules(tables: Iterable[_Table]) -> frozenset[AclBinding]:
    found: dict[AclBinding, str] = {}
    for table in tables:
        rules = _parse_rule(table)
        # Two entries may overlap, as those of a producer and a consumer of one topic do.
        if rules and all(rule in found for rule in rules):
            raise DeclarationError(table.key, f"is contained in {found[rules[0]]}, remove it")
        for rule in rules:
            found.setdefault(rule, table.key)
    return frozenset(found)


def _parse_rule(table: _Table) -> list[AclBinding]:
    allow, deny = table.texts("allow"), table.texts("deny")
    if (allow is None) is (deny is None):
        raise DeclarationError(table.key, "takes one of allow and deny", hint='allow = "User:NAME"')
    principals = allow or deny or ()
    for principal in principals:
        _check_principal(table.at("deny" if allow is None else "allow"), principal)
    hosts = table.texts("host") or (WILDCARD,)
    word = table.text("pattern") or "literal"
    if word not in _PATTERNS:
        raise DeclarationError(
            table.at("pattern"), f"{word} is no pattern of a rule", hint="use literal or prefixed"
        )
    resources = [
        (kind, name, _PATTERNS[word])
        for key, kind in _RESOURCE_KEYS.items()
        for name in table.texts(key) or ()
    ]
    if table.flag("cluster"):
        resources.append((ResourceType.CLUSTER, CLUSTER_NAME, PatternType.LITERAL))
    for kind, name, pattern in resources:
        if pattern is PatternType.PREFIXED and name == WILDCARD:
            raise DeclarationError(
                table.at("pattern"),
                f"a prefixed * covers only names of a {kind.name.lower()} that begin with *",
                hint='for all names, write pattern = "literal"',
            )
    granted = _granted(table, resources)
    table.finish()
    permission = Permission.DENY if allow is None else Permission.ALLOW
    return [
        AclBinding(kind, name, pattern, principal, host, operation, permission)
        for kind, name, pattern, operation in granted
        for principal in principals
        for host in hosts
    ]


def _granted(
    table: _Table, resources: list[tuple[ResourceType, str, PatternType]]
) -> list[tuple[ResourceType, str, PatternType, Operation]]:
    role, words = table.text("role"), table.texts("operation")
    idempotent = table.flag("idempotent")
    if not resources:
        raise DeclarationError(
            table.key, "names no resource", hint=f"add one of {', '.join(_RESOURCE_KEYS)}, or cluster = true"
        )
    if (role is None) is (words is None):
        raise DeclarationError(
            table.key,
            "takes one of role and operation",
            hint='role = "consumer", or operation = ["Read", "Describe"], or operation = "All"',
        )
    if role is not None:
        return _granted_to_role(table, role, idempotent, resources)
    if idempotent:
        raise DeclarationError(table.at("idempotent"), 'goes with role = "producer"')
    granted = []
    for word in words or ():
        try:
            operation = parse_operation(word)
        except CommandError as error:
            raise DeclarationError(table.at("operation"), error.message, hint=error.hint) from None
        for kind, name, pattern in resources:
            if operation is not Operation.ALL and operation not in SUPPORTED_OPERATIONS[kind]:
                raise DeclarationError(
                    table.at("operation"), f"there is no {word} on a {kind.name.lower().replace('_', ' ')}"
                )
            granted.append((kind, name, pattern, operation))
    return granted


def _granted_to_role(
    table: _Table, role: str, idempotent: bool, resources: list[tuple[ResourceType, str, PatternType]]
) -> list[tuple[ResourceType, str, PatternType, Operation]]:
    if role not in _ROLES:
        raise DeclarationError(
            table.at("role"), f"{role} is no role", hint=f"use {' or '.join(_ROLES)}, or operation"
        )
    if idempotent and role != "producer":
        raise DeclarationError(table.at("idempotent"), 'goes with role = "producer"')
    needed = {"producer": ("topic",), "consumer": ("topic", "group")}[role]
    kinds = {kind for kind, _, _ in resources}
    for key in needed:
        if _RESOURCE_KEYS[key] not in kinds:
            raise DeclarationError(table.key, f"a {role} needs a {key}")
    for kind in kinds - _ROLES[role].keys():
        raise DeclarationError(
            table.key, f"a {role} needs nothing on a {kind.name.lower().replace('_', ' ')}"
        )
    granted = [
        (kind, name, pattern, operation)
        for kind, name, pattern in resources
        for operation in _ROLES[role][kind]
    ]
    if idempotent:
        granted.append((ResourceType.CLUSTER, CLUSTER_NAME, PatternType.LITERAL, Operation.IDEMPOTENT_WRITE))
    return granted


def _check_principal(key: str, principal: str) -> None:
    name = principal.removeprefix(_USER)
    if not principal.startswith(_USER) or not name:
        raise DeclarationError(key, f"{principal} is no principal", hint="write User:NAME")
    if WILDCARD in name and name != WILDCARD:
        raise DeclarationError(
            key,
            f"{principal} looks like a wildcard, but principals have none",
            hint="User:* is everybody; name the others one by one",
        )


# Quotas


def _parse_quotas(tables: Iterable[_Table]) -> dict[QuotaEntity, dict[str, float]]:
    found: dict[QuotaEntity, dict[str, float]] = {}
    first: dict[QuotaEntity, str] = {}
    for table in tables:
        entity, limits = _parse_quota(table)
        if entity in found:
            raise DeclarationError(table.key, f"is about the same as {first[entity]}; write one of them")
        found[entity], first[entity] = limits, table.key
    return found


def _parse_quota(table: _Table) -> tuple[QuotaEntity, dict[str, float]]:
    named = {kind: table.text(key) for key, kind in _ENTITY_KEYS.items()}
    entity = tuple(
        (kind, None if name == _DEFAULT else name) for kind, name in named.items() if name is not None
    )
    if not entity:
        raise DeclarationError(table.key, "has no client", hint="add user, client_id, both, or ip")
    try:
        key = quota_key(entity)
    except ApiError as error:
        raise DeclarationError(table.key, str(error.message)) from None
    limits: dict[str, float] = {}
    for option, setting in _QUOTA_KEYS.items():
        given = table.take(option)
        if given is None:
            continue
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if option in _BYTE_RATES and isinstance(given, str):
            given = _parsed(_byte_rate, table, option, given)
        elif not is_number:
            wanted = "a number or a rate such as 20MB" if option in _BYTE_RATES else "a number"
            raise DeclarationError(table.at(option), f"must be {wanted}, not {_kind(given)}")
        try:
            limits[setting] = float(given)
            check_limits(key, {setting: limits[setting]})
        except OverflowError:
            raise DeclarationError(table.at(option), "is too large") from None
        except ApiError as error:
            raise DeclarationError(table.at(option), str(error.message)) from None
    table.finish()
    if not limits:
        raise DeclarationError(table.key, "has no limit", hint=f"add one of {', '.join(_QUOTA_KEYS)}")
    return key, limits


def _byte_rate(key: str, text: str) -> int:
    return parse_size(key, text, what="rate", example="bytes per second, as in 500000, 500KB or 20MB")
