"""Tenants: users that share a namespace and limits. A tenant is a configuration resource, as a metrics subscription is.

The tenant `acme` with the prefix `acme.` owns the topics, groups and transactional ids whose names begin with `acme.`.
Its access rules are not stored: they follow from its users and its prefix. Prefixes of two tenants never overlap and a
user belongs to one tenant only, so that every name and every user has at most one tenant.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from uuid import UUID, uuid5

from penstock.cluster.image import ClusterImage, ConfigResource, ResourceType
from penstock.cluster.topic_names import TOPIC_NAME_LENGTH_MAX, collision_key, topic_name_error
from penstock.cluster.topic_settings import NO_LAYERS, ConfigSource, EffectiveSetting, effective_setting
from penstock.protocol.acls import (
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
)
from penstock.protocol.acls import ResourceType as AclResourceType
from penstock.protocol.config_def import InvalidSetting, Setting, SettingType, SettingValue
from penstock.protocol.errors import ApiError, ErrorCode

#: Each has labels in the metrics of every node.
TENANTS_MAX: Final = 1_000
_USERS_MAX: Final = 1_000
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,100}")
#: What remains of a topic's name is for the tenant to choose.
_PREFIX_LENGTH_MAX: Final = TOPIC_NAME_LENGTH_MAX - 49
#: Kafka's and our own internal topics begin with it.
_INTERNAL_PREFIX: Final = "__"
_USER: Final = "User:"
_ANONYMOUS: Final = "ANONYMOUS"
#: Of the identifiers of access rules that follow from tenants.
_RULES: Final = UUID("5a1d5b1c-9e8e-4f3b-8a55-74656e616e74")

USERS: Final = "users"
PREFIX: Final = "prefix"
PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_RATE: Final = "request_rate"
STORAGE_BYTES_MAX: Final = "storage_bytes_max"
PARTITIONS_MAX: Final = "partitions_max"
CONNECTIONS_MAX: Final = "connections_max"
GROUPS_MAX: Final = "groups_max"


def _users_flaw(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    users = parse_users(value)
    if not users:
        return "must name a user"
    if len(users) > _USERS_MAX:
        return f"must name at most {_USERS_MAX} users"
    for user in users:
        if not user or user == WILDCARD:
            return "a tenant has users by name, not a wildcard or an empty name"
        if user == _ANONYMOUS:
            return f"{_ANONYMOUS} is everybody who has not logged in"
    return None


def _prefix_flaw(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    # A prefix may be "." or "..", which no topic may be.
    if (flaw := topic_name_error(f"{value}x")) is not None or not value:
        return (
            "must begin names of topics"
            if not value
            else (flaw or "").removeprefix("Topic name is invalid: ")
        )
    if len(value) > _PREFIX_LENGTH_MAX:
        return f"must have at most {_PREFIX_LENGTH_MAX} characters"
    if prefixes_overlap(value, _INTERNAL_PREFIX):
        return f"names that begin with {_INTERNAL_PREFIX} are those of internal topics"
    return None


def _limit(name: str, doc: str) -> Setting:
    return Setting(name, SettingType.LONG, None, doc, at_least=1)


TENANT_SETTINGS: Final[dict[str, Setting]] = {
    setting.name: setting
    for setting in (
        Setting(
            USERS,
            SettingType.STRING,
            "",
            "Principals, as User:NAME, with semicolons between.",
            check=_users_flaw,
        ),
        Setting(
            PREFIX,
            SettingType.STRING,
            "",
            "How the names of its topics, groups and transactional ids begin.",
            check=_prefix_flaw,
        ),
        _limit(PRODUCER_BYTE_RATE, "Bytes per second that its users may produce, together."),
        _limit(CONSUMER_BYTE_RATE, "Bytes per second that its users may fetch, together."),
        _limit(REQUEST_RATE, "Requests per second that its users may send, together."),
        _limit(STORAGE_BYTES_MAX, "Bytes of its topics on disk, all replicas together."),
        _limit(PARTITIONS_MAX, "Partitions of its topics."),
        _limit(CONNECTIONS_MAX, "Connections that its users may have open, together."),
        _limit(GROUPS_MAX, "Groups whose names begin with its prefix."),
    )
}
LIMITS: Final = tuple(name for name in TENANT_SETTINGS if name not in (USERS, PREFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`limits` holds the limits that are set, by the names of their settings.

    `flaw` says what this version cannot read of a stored tenant. `is_closed`: it cannot read the users or the prefix,
    so that no user may use names with the prefix. Without a prefix, a closed tenant owns no names.
    """

    name: str
    users: tuple[str, ...]
    prefix: str
    limits: Mapping[str, int]
    flaw: str | None = None
    is_closed: bool = False

    def limit(self, name: str) -> int | None:
        return self.limits.get(name)


class Tenants:
    """The tenants of an image, found by user or by the name of a topic, group or transactional id."""

    __slots__ = ("_by_prefix", "_by_user", "_prefixes", "by_name")

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.by_name = {tenant.name: tenant for tenant in tenants}
        self._by_user = {user: tenant for tenant in self.by_name.values() for user in tenant.users}
        self._by_prefix = {tenant.prefix: tenant for tenant in self.by_name.values() if tenant.prefix}
        # Prefixes of closed tenants may overlap with others; the shorter one covers both.
        self._prefixes: list[str] = []
        for prefix in sorted(self._by_prefix):
            if not self._prefixes or not prefix.startswith(self._prefixes[-1]):
                self._prefixes.append(prefix)

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self.by_name)}>"

    def of_user(self, user: str) -> Tenant | None:
        return self._by_user.get(user)

    def of_name(self, name: str) -> Tenant | None:
        """Return the tenant that owns a topic, a group or a transactional id."""
        # Prefixes do not overlap, so the last one that sorts before the name is the only one that can fit.
        index = bisect_right(self._prefixes, name) - 1
        if index < 0 or not name.startswith(self._prefixes[index]):
            return None
        return self._by_prefix[self._prefixes[index]]

    @property
    def users(self) -> Iterable[str]:
        return self._by_user

    @property
    def flaws(self) -> dict[str, str]:
        """What cannot be read of stored tenants, by their names."""
        return {tenant.name: tenant.flaw for tenant in self.by_name.values() if tenant.flaw is not None}

    def access_rules(self) -> dict[UUID, AclBinding]:
        """Return the access rules that follow from the tenants, each with an identifier that is always the same."""
        return {
            uuid5(_RULES, "\n".join(map(str, rule))): rule
            for tenant in self.by_name.values()
            for rule in tenant_rules(tenant)
        }


def tenants_of(image: ClusterImage) -> Tenants:
    return Tenants(
        stored_tenant(resource.name, values)
        for resource, values in image.configs.items()
        if resource.type == ResourceType.TENANT
    )


def stored_tenant(name: str, values: Mapping[str, str]) -> Tenant:
    """Return a tenant that may have been stored by another version.

    What this version cannot read removes no limit and opens no namespace: a limit becomes 0, and without certain users
    and a certain prefix the tenant is closed. Settings that this version does not know have no effect.
    """
    try:
        return parse_tenant(name, values)
    except InvalidSetting as error:
        flaw = str(error)
    users, prefix = (_parsed(key, values) for key in (USERS, PREFIX))
    return Tenant(
        name=name,
        users=tuple(
            user for user in parse_users(values.get(USERS, "")) if user and user not in (WILDCARD, _ANONYMOUS)
        ),
        prefix=str(prefix or ""),
        limits={
            key: limit if isinstance(limit := _parsed(key, values), int) else 0
            for key in LIMITS
            if key in values
        },
        flaw=flaw,
        is_closed=users is None or prefix is None,
    )


def _parsed(key: str, values: Mapping[str, str]) -> SettingValue:
    """Return None for a setting that is missing or that this version cannot read."""
    try:
        return TENANT_SETTINGS[key].parse(values[key]) if key in values else None
    except InvalidSetting:
        return None


def parse_tenant(name: str, values: Mapping[str, str]) -> Tenant:
    """Raises InvalidSetting."""
    parsed = {key: TENANT_SETTINGS[key].parse(text) for key, text in values.items() if key in TENANT_SETTINGS}
    for key in (USERS, PREFIX):
        if key not in parsed:
            raise InvalidSetting(f"Tenant {name} has no {key}")
    limits = {key: value for key, value in parsed.items() if isinstance(value, int)}
    return Tenant(name=name, users=parse_users(str(parsed[USERS])), prefix=str(parsed[PREFIX]), limits=limits)


def parse_users(text: str) -> tuple[str, ...]:
    """Return the names of `User:alice;User:bob`, each once. A name without its type is one of a user, too."""
    parts = (part.strip() for part in text.split(";"))
    return tuple(dict.fromkeys(part.removeprefix(_USER) for part in parts if part))


def format_users(users: Iterable[str]) -> str:
    return ";".join(f"{_USER}{user}" for user in users)


@lru_cache(TENANTS_MAX)
def _rules_of(users: tuple[str, ...], prefix: str) -> tuple[AclBinding, ...]:
    granted = (
        *((AclResourceType.TOPIC, operation) for operation in SUPPORTED_OPERATIONS[AclResourceType.TOPIC]),
        *((AclResourceType.GROUP, operation) for operation in SUPPORTED_OPERATIONS[AclResourceType.GROUP]),
        # Without TWO_PHASE_COMMIT: such transactions have no timeout, which is for the operator to allow.
        (AclResourceType.TRANSACTIONAL_ID, Operation.DESCRIBE),
        (AclResourceType.TRANSACTIONAL_ID, Operation.WRITE),
    )
    return tuple(
        AclBinding(
            kind, prefix, PatternType.PREFIXED, f"{_USER}{user}", WILDCARD, operation, Permission.ALLOW
        )
        for user in users
        for kind, operation in granted
    )


def tenant_rules(tenant: Tenant) -> tuple[AclBinding, ...]:
    """Return the access rules that the tenant's users have because they are its users."""
    if tenant.is_closed:
        return _closing_rules(tenant.prefix) if tenant.prefix else ()
    return _rules_of(tenant.users, tenant.prefix)


def _closing_rules(prefix: str) -> tuple[AclBinding, ...]:
    """Only super users may use names with the prefix."""
    return tuple(
        AclBinding(
            kind,
            prefix,
            PatternType.PREFIXED,
            f"{_USER}{WILDCARD}",
            WILDCARD,
            Operation.ALL,
            Permission.DENY,
        )
        for kind in (AclResourceType.TOPIC, AclResourceType.GROUP, AclResourceType.TRANSACTIONAL_ID)
    )


def validate_tenant(
    image: ClusterImage, name: str, values: Mapping[str, str], *, super_users: frozenset[str] = frozenset()
) -> None:
    """Raises ApiError if the tenant may not have these settings. No settings at all delete the tenant."""
    for key, text in values.items():
        setting = TENANT_SETTINGS.get(key)
        if setting is None:
            raise ApiError(ErrorCode.invalid_config, f"Unknown tenant configuration: {key}")
        try:
            setting.parse(text)
        except InvalidSetting as error:
            raise ApiError(ErrorCode.invalid_config, str(error)) from None
    if not values:
        return
    _refuse_bad_name(image, name)
    try:
        tenant = parse_tenant(name, values)
    except InvalidSetting as error:
        raise ApiError(ErrorCode.invalid_config, str(error)) from None
    if powerful := sorted(super_users.intersection(tenant.users)):
        raise ApiError(ErrorCode.invalid_config, f"User {powerful[0]} is one of super.users.")
    current = image.config(ResourceType.TENANT, name)
    if current and current.get(PREFIX) != tenant.prefix:
        raise ApiError(
            ErrorCode.invalid_config,
            f"The prefix of tenant {name} is {current.get(PREFIX)}; it cannot be changed.",
        )
    for other in tenants_of(image).by_name.values():
        if other.name != name:
            _refuse_conflict(tenant, other)


def check_tenant_name(name: str) -> None:
    """Raises ApiError."""
    if not _NAME.fullmatch(name):
        raise ApiError(
            ErrorCode.invalid_request,
            "The name of a tenant has 1 to 100 characters, which are ASCII alphanumerics, '.', '_' and '-'.",
        )


def _refuse_bad_name(image: ClusterImage, name: str) -> None:
    check_tenant_name(name)
    if ConfigResource(ResourceType.TENANT, name) in image.configs:
        return
    if sum(resource.type == ResourceType.TENANT for resource in image.configs) >= TENANTS_MAX:
        raise ApiError(ErrorCode.policy_violation, f"A cluster has at most {TENANTS_MAX} tenants.")


def _refuse_conflict(tenant: Tenant, other: Tenant) -> None:
    if other.is_closed:
        raise ApiError(
            ErrorCode.invalid_config,
            f"Tenant {other.name} was stored by another version and cannot be read, so it may have the same users or "
            f"prefix; use that version, or delete it first: {other.flaw}",
        )
    both = sorted(set(tenant.users) & set(other.users))
    if both:
        raise ApiError(ErrorCode.invalid_config, f"User {both[0]} belongs to tenant {other.name}.")
    if prefixes_overlap(tenant.prefix, other.prefix):
        raise ApiError(
            ErrorCode.invalid_config,
            f"The prefix {tenant.prefix} overlaps with {other.prefix}, the prefix of tenant {other.name}.",
        )


def prefixes_overlap(one: str, other: str) -> bool:
    """Whether a name can begin with both, or begin with one and collide with a name that begins with the other."""
    one, other = collision_key(one), collision_key(other)
    return one.startswith(other) or other.startswith(one)


class PartitionBudgets:
    """How many more partitions tenants may have, while one request creates some."""

    __slots__ = ("_added", "_image", "_present", "_tenants")

    def __init__(self, image: ClusterImage) -> None:
        self._image = image
        self._tenants = tenants_of(image)
        self._added: dict[str, int] = {}
        self._present: dict[str, int] = {}

    def check(self, topic: str, partitions: int) -> None:
        """Raises ApiError: POLICY_VIOLATION if the tenant that owns the topic would have too many."""
        tenant = self._tenants.of_name(topic)
        limit = None if tenant is None else tenant.limit(PARTITIONS_MAX)
        if tenant is None or limit is None:
            return
        if tenant.name not in self._present:
            self._present[tenant.name] = partition_count(self._image, tenant)
        used = self._present[tenant.name] + self._added.get(tenant.name, 0)
        if used + partitions > limit:
            raise ApiError(
                ErrorCode.policy_violation,
                f"Tenant {tenant.name} has {used} of at most {limit} partitions; {partitions} more are too many.",
            )

    def take(self, topic: str, partitions: int) -> None:
        """Count partitions of a topic that is created."""
        tenant = self._tenants.of_name(topic)
        if tenant is not None:
            self._added[tenant.name] = self._added.get(tenant.name, 0) + partitions


def partition_count(image: ClusterImage, tenant: Tenant) -> int:
    if not tenant.prefix:
        return 0
    return sum(
        len(topic.partitions) for topic in image.topics.values() if topic.name.startswith(tenant.prefix)
    )


def effective_tenant_settings(own: Mapping[str, str]) -> dict[str, EffectiveSetting]:
    return {
        name: effective_setting(setting, own, NO_LAYERS, own=ConfigSource.TENANT)
        for name, setting in TENANT_SETTINGS.items()
    }
