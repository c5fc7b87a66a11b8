"""Decides who may do what, by the rules of Kafka's StandardAuthorizer.

- A rule covers a resource if it names it literally, if its name is the literal `*`, or if its prefix fits.
- One rule that denies wins over all that allow. Where rules cover the resource but none allows, the answer is no.
- Only where no rule at all covers the resource, no matter for which principal, `allow.everyone.if.no.acl.found` counts.
  It never counts for users and delegation tokens: whoever makes or sees the token of a super user is one.
- READ, WRITE, DELETE and ALTER imply DESCRIBE, and ALTER_CONFIGS implies DESCRIBE_CONFIGS, in rules that allow.
- Super users may do everything, whatever the rules say.
- Confined users (our own addition, for tenants) may use what a rule allows them, never what no rule covers.

A decision costs a few lookups however many rules there are: one for the name, one for `*`, and one for each length that
a prefix has. `Decisions` remembers the decisions for one principal and host until a rule changes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

from penstock.protocol.acls import (
    SUPPORTED_OPERATIONS,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    canonical_host,
)

__all__ = (
    "AclsNotLoaded",
    "Authorizer",
    "Decisions",
    "Operation",
    "PatternType",
    "Permission",
    "ResourceType",
    "all_operations",
)

#: Type and name; a `Principal` is one.
PrincipalKey = tuple[str, str]
Stored = TypeVar("Stored")

_EVERYBODY: Final[PrincipalKey] = ("User", WILDCARD)
#: A name that stands for "any resource" when super users and the default are asked about; Kafka uses the same.
_ANY_NAME: Final = "hardcode"
#: Decisions that are remembered for one principal and host, and the longest name in them, which is that of a topic:
#: clients choose the names.
_REMEMBERED_MAX: Final = 10_000
_REMEMBERED_CHARS_MAX: Final = 249
_HOSTS_REMEMBERED: Final = 10_000
#: What only a rule allows.
_NEVER_OPEN: Final = frozenset({ResourceType.USER, ResourceType.DELEGATION_TOKEN})

_IMPLIED_BY: Final[Mapping[int, tuple[Operation, ...]]] = {
    Operation.DESCRIBE: (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER),
    Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
}


def _bits(operations: Iterable[int]) -> int:
    mask = 0
    for operation in operations:
        mask |= 1 << operation
    return mask


#: For each operation, as bits: the operations of rules that deny it, and of rules that allow it.
_DENIED_BY: Final = tuple(_bits((operation, Operation.ALL)) for operation in Operation)
_ALLOWED_BY: Final = tuple(
    _bits((operation, Operation.ALL, *_IMPLIED_BY.get(operation, ()))) for operation in Operation
)

_canonical_host = lru_cache(_HOSTS_REMEMBERED)(canonical_host)


class AclsNotLoaded(Exception):
    """The node does not know the rules yet, so it can decide for super users only."""


class _Granted(NamedTuple):
    """The operations that rules allow and deny, as bits."""

    allowed: int
    denied: int


class _Pattern:
    """All rules with the same resource type, name and pattern type."""

    __slots__ = ("granted", "rules")

    def __init__(self) -> None:
        self.rules: dict[tuple[PrincipalKey, str], dict[UUID, AclBinding]] = {}
        #: By principal and host; both may be wildcards.
        self.granted: dict[tuple[PrincipalKey, str], _Granted] = {}

    def add(self, acl_id: UUID, acl: AclBinding) -> None:
        key = _subject(acl)
        self.rules.setdefault(key, {})[acl_id] = acl
        self._sum_up(key)

    def remove(self, acl_id: UUID, acl: AclBinding) -> None:
        key = _subject(acl)
        rules = self.rules[key]
        del rules[acl_id]
        if not rules:
            del self.rules[key]
        self._sum_up(key)

    def _sum_up(self, key: tuple[PrincipalKey, str]) -> None:
        rules = self.rules.get(key)
        if rules is None:
            del self.granted[key]
            return
        self.granted[key] = _Granted(
            _bits(acl.operation for acl in rules.values() if acl.permission == Permission.ALLOW),
            _bits(acl.operation for acl in rules.values() if acl.permission != Permission.ALLOW),
        )

    def granted_to(self, principal: PrincipalKey, host: str) -> Iterator[_Granted]:
        known = self.granted
        for subject in ((principal, host), (principal, WILDCARD), (_EVERYBODY, host), (_EVERYBODY, WILDCARD)):
            found = known.get(subject)
            if found is not None:
                yield found


class _Section:
    """The patterns of one resource type."""

    __slots__ = ("_counts", "_lengths", "literal", "prefixed")

    def __init__(self) -> None:
        self.literal: dict[str, _Pattern] = {}
        self.prefixed: dict[str, _Pattern] = {}
        #: The lengths of the prefixes in order, and how many prefixes have each.
        self._lengths: list[int] = []
        self._counts: dict[int, int] = {}

    def add(self, acl_id: UUID, acl: AclBinding) -> None:
        patterns = self._patterns(acl)
        pattern = patterns.get(acl.resource_name)
        if pattern is None:
            pattern = patterns[acl.resource_name] = _Pattern()
            if patterns is self.prefixed:
                self._count(len(acl.resource_name), 1)
        pattern.add(acl_id, acl)

    def remove(self, acl_id: UUID, acl: AclBinding) -> None:
        patterns = self._patterns(acl)
        pattern = patterns[acl.resource_name]
        pattern.remove(acl_id, acl)
        if not pattern.rules:
            del patterns[acl.resource_name]
            if patterns is self.prefixed:
                self._count(len(acl.resource_name), -1)

    def _count(self, length: int, change: int) -> None:
        count = self._counts.pop(length, 0)
        if not count:
            insort(self._lengths, length)
        if count + change:
            self._counts[length] = count + change
        else:
            self._lengths.remove(length)

    def _patterns(self, acl: AclBinding) -> dict[str, _Pattern]:
        return self.prefixed if acl.pattern_type == PatternType.PREFIXED else self.literal

    def covering(self, name: str) -> list[_Pattern]:
        found = []
        pattern = self.literal.get(name)
        if pattern is not None:
            found.append(pattern)
        pattern = self.literal.get(WILDCARD)
        if pattern is not None and name != WILDCARD:
            found.append(pattern)
        size = len(name)
        for length in self._lengths:
            if length > size:
                break
            pattern = self.prefixed.get(name[:length])
            if pattern is not None:
                found.append(pattern)
        return found


class Authorizer:
    """The rules of a cluster. Until they are loaded only super users get an answer; for others it is an error."""

    __slots__ = (
        "_acls",
        "_allows_everyone",
        "_confined",
        "_decisions",
        "_sections",
        "generation",
        "is_loaded",
        "super_users",
    )

    def __init__(
        self,
        acls: Mapping[UUID, AclBinding] | None = None,
        *,
        super_users: Iterable[PrincipalKey] = (),
        allow_everyone_if_no_acl_found: bool = False,
    ) -> None:
        self.super_users = frozenset(tuple(principal) for principal in super_users)
        #: Grows with every change of the rules; decisions of an older generation are void.
        self.generation = 0
        self.is_loaded = False
        self._allows_everyone = allow_everyone_if_no_acl_found
        self._confined: frozenset[PrincipalKey] = frozenset()
        self._acls: dict[UUID, AclBinding] = {}
        self._sections: dict[int, _Section] = {}
        self._decisions: WeakValueDictionary[tuple[PrincipalKey, str], Decisions] = WeakValueDictionary()
        if acls is not None:
            self.update(acls)

    def __repr__(self) -> str:
        return f"<Authorizer {len(self._acls)} rules, generation {self.generation}>"

    def update(self, acls: Mapping[UUID, AclBinding]) -> None:
        """Take these rules instead of the current ones. A rule with a known id is unchanged."""
        self.update_from(acls, lambda acl: acl)

    def update_from(self, acls: Mapping[UUID, Stored], binding_of: Callable[[Stored], AclBinding]) -> None:
        """Do the same with rules in the form in which they are stored; only new ones are converted."""
        removed, added = self._acls.keys() - acls.keys(), acls.keys() - self._acls.keys()
        if self.is_loaded and not removed and not added:
            return  # something else of the image has changed
        for acl_id in removed:
            acl = self._acls.pop(acl_id)
            self._sections[acl.resource_type].remove(acl_id, acl)
        for acl_id in added:
            acl = self._acls[acl_id] = binding_of(acls[acl_id])
            self._sections.setdefault(acl.resource_type, _Section()).add(acl_id, acl)
        self.is_loaded = True
        self.generation += 1

    def confine(self, principals: Iterable[PrincipalKey]) -> None:
        """Take these principals, instead of the current ones, as those that may use nothing that no rule covers."""
        confined = frozenset(principals)
        if confined != self._confined:
            self._confined = confined
            self.generation += 1

    def decisions(self, principal: PrincipalKey, host: str) -> Decisions:
        """Return the decisions for a principal and a host, which its connections share."""
        key = (principal, host)
        shared = self._decisions.get(key)
        if shared is None:
            shared = self._decisions[key] = Decisions(self, principal, host)
        return shared

    def authorize(
        self, principal: PrincipalKey, host: str, operation: int, resource_type: int, name: str
    ) -> bool:
        """Whether the principal may do this to the resource. Raises AclsNotLoaded."""
        if principal in self.super_users:
            return True
        if not self.is_loaded:
            raise AclsNotLoaded
        section = self._sections.get(resource_type)
        patterns = [] if section is None else section.covering(name)
        if not patterns:
            return (
                self._allows_everyone and principal not in self._confined and resource_type not in _NEVER_OPEN
            )
        denied_by, allowed_by = _DENIED_BY[operation], _ALLOWED_BY[operation]
        host = _canonical_host(host)
        is_allowed = False
        for pattern in patterns:
            for granted in pattern.granted_to(principal, host):
                if granted.denied & denied_by:
                    return False
                if granted.allowed & allowed_by:
                    is_allowed = True
        return is_allowed

    def has_rule_about(self, resource_type: int, name: str) -> bool:
        """Whether a rule covers the resource, no matter for which principal."""
        section = self._sections.get(resource_type)
        return section is not None and bool(section.covering(name))

    def authorize_any(self, principal: PrincipalKey, host: str, operation: int, resource_type: int) -> bool:
        """Whether the principal may do this to some resource of the type, which may not exist. Raises AclsNotLoaded.

        Kafka's authorizeByResourceType: implied operations do not count.
        """
        if self.authorize(principal, host, operation, resource_type, _ANY_NAME):
            return True
        section = self._sections.get(resource_type)
        if section is None:
            return False
        asked, host = _DENIED_BY[operation], _canonical_host(host)
        allowed_names, denied_names = _names(section.literal, principal, host, asked)
        allowed_prefixes, denied_prefixes = _names(section.prefixed, principal, host, asked)
        if WILDCARD in denied_names:
            return False
        if WILDCARD in allowed_names:
            return True
        lengths = {len(prefix) for prefix in denied_prefixes}
        return any(
            not any(name[:length] in denied_prefixes for length in lengths if length <= len(name))
            for name in (allowed_names - denied_names) | allowed_prefixes
        )


def all_operations(resource_type: int) -> int:
    """Return all operations of a resource type, as bits: what replies list if there is no authorizer."""
    return _bits(SUPPORTED_OPERATIONS[ResourceType(resource_type)])


class Decisions:
    """The decisions for one principal on one host, remembered until a rule changes."""

    __slots__ = (
        "__weakref__",
        "_any",
        "_authorizer",
        "_count",
        "_known",
        "generation",
        "host",
        "principal",
        "readable",
        "writable",
    )

    def __init__(self, authorizer: Authorizer, principal: PrincipalKey, host: str) -> None:
        self._authorizer = authorizer
        self.principal = principal
        self.host = host
        self._forget()

    def _forget(self) -> None:
        #: Of the rules that they follow from. Once the authorizer's is another, they are void.
        self.generation = self._authorizer.generation
        self._known = _nothing_known()
        self._any: dict[tuple[int, int], bool] = {}
        self._count = 0
        #: Topics that may be read and written, in the bytes by which requests name them: their names, and their ids.
        self.readable: tuple[set[bytes], set[bytes]] = (set(), set())
        self.writable: tuple[set[bytes], set[bytes]] = (set(), set())

    def remember_topic(self, operation: int, raw: bytes, *, by_id: bool) -> None:
        """Put a topic for which `allows` has just said yes into `readable` or `writable`."""
        if operation not in (Operation.READ, Operation.WRITE) or len(raw) > _REMEMBERED_CHARS_MAX:
            return
        if self._count >= _REMEMBERED_MAX:
            self._forget()
        (self.readable if operation == Operation.READ else self.writable)[by_id].add(raw)
        self._count += 1

    def allows(self, operation: int, resource_type: int, name: str) -> bool:
        """Raises AclsNotLoaded."""
        if self.generation != self._authorizer.generation:
            self._forget()
        known = self._known[resource_type][operation]
        if known is None:
            known = self._known[resource_type][operation] = {}
        is_allowed = known.get(name)
        if is_allowed is None:
            is_allowed = self._authorizer.authorize(self.principal, self.host, operation, resource_type, name)
            if len(name) <= _REMEMBERED_CHARS_MAX:
                if self._count >= _REMEMBERED_MAX:
                    self._forget()
                    known = self._known[resource_type][operation] = {}
                known[name] = is_allowed
                self._count += 1
        return is_allowed

    def allows_any(self, operation: int, resource_type: int) -> bool:
        """Whether the principal may do this to some resource of the type. Raises AclsNotLoaded."""
        if self.generation != self._authorizer.generation:
            self._forget()
        asked = (operation, resource_type)
        is_allowed = self._any.get(asked)
        if is_allowed is None:
            is_allowed = self._any[asked] = self._authorizer.authorize_any(self.principal, self.host, *asked)
        return is_allowed


def _nothing_known() -> tuple[list[dict[str, bool] | None], ...]:
    return tuple([None] * len(Operation) for _ in ResourceType)


def _subject(acl: AclBinding) -> tuple[PrincipalKey, str]:
    kind, _, name = acl.principal.partition(":")
    return (kind, name), canonical_host(acl.host)


def _names(
    patterns: Mapping[str, _Pattern], principal: PrincipalKey, host: str, asked: int
) -> tuple[set[str], set[str]]:
    """Return the names for which a rule allows one of the operations, and those for which a rule denies it."""
    allowed, denied = set(), set()
    for name, pattern in patterns.items():
        for granted in pattern.granted_to(principal, host):
            if granted.allowed & asked:
                allowed.add(name)
            if granted.denied & asked:
                denied.add(name)
    return allowed, denied
