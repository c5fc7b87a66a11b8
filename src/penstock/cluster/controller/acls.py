"""CreateAcls and DeleteAcls, with the validation and the messages of Apache Kafka."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.rare_records import AccessControlEntryRecord, RemoveAccessControlEntryRecord
from penstock.protocol.acls import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    parse_principal,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

#: Records that one request may cause, as in Apache Kafka.
RECORDS_MAX: Final = 10_000
_NO_RESOURCE: Final = (ResourceType.UNKNOWN, ResourceType.ANY)
_NO_OPERATION: Final = (Operation.UNKNOWN, Operation.ANY)


class DeletedAcls(NamedTuple):
    """The rules that a filter has deleted, or why it was refused."""

    acls: tuple[AclBinding, ...] = ()
    error: ApiError | None = None


def create_acls(
    image: ClusterImage, acls: Sequence[AclBinding], *, new_id: Callable[[], UUID]
) -> Steps[Decision[tuple[ApiError | None, ...]]]:
    """Return an error or None for each rule. A rule that exists is not created again, and that is no error."""
    records: list[AccessControlEntryRecord] = []
    results: list[ApiError | None] = []
    known = image.security.acl_ids
    added: set[AclBinding] = set()
    for acl in acls:
        yield
        try:
            check_acl(acl)
        except ApiError as error:
            results.append(error)
            continue
        results.append(None)
        if acl not in known and acl not in added:
            added.add(acl)
            records.append(_record(acl, new_id()))
    if len(records) > RECORDS_MAX:
        raise ApiError(
            ErrorCode.policy_violation, f"Unable to create more than {RECORDS_MAX} acls in a single request."
        )
    return Decision(tuple(records), tuple(results))


def check_acl(acl: AclBinding) -> None:
    """Raises ApiError if the rule may not be stored."""
    if acl.resource_type == ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
        raise _invalid(f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}")
    if not acl.resource_name:
        raise _invalid("Invalid empty resource name")
    if acl.resource_type in _NO_RESOURCE or acl.resource_type not in set(ResourceType):
        raise _invalid(f"Invalid resourceType {_name(ResourceType, acl.resource_type)}")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise _invalid(f"Invalid patternType {_name(PatternType, acl.pattern_type)}")
    if acl.operation in _NO_OPERATION or acl.operation not in set(Operation):
        raise _invalid(f"Invalid operation {_name(Operation, acl.operation)}")
    if acl.permission not in (Permission.DENY, Permission.ALLOW):
        raise _invalid(f"Invalid permissionType {_name(Permission, acl.permission)}")
    try:
        parse_principal(acl.principal)
    except ValueError as error:
        raise _invalid(str(error)) from None


def delete_acls(
    image: ClusterImage, filters: Sequence[AclFilter]
) -> Steps[Decision[tuple[DeletedAcls, ...]]]:
    """Return the deleted rules of each filter. Two filters may report the same rule, which is deleted once."""
    rules = _RulesToFind(image)
    removed: dict[UUID, None] = {}
    results: list[DeletedAcls] = []
    for wanted in filters:
        yield
        try:
            check_filter(wanted)
        except ApiError as error:
            results.append(DeletedAcls(error=error))
            continue
        found = yield from rules.matching(wanted)
        removed.update(dict.fromkeys(found))
        if len(removed) > RECORDS_MAX:
            raise _invalid(f"Cannot remove more than {RECORDS_MAX} acls in a single delete operation.")
        results.append(DeletedAcls(tuple(found.values())))
    return Decision(tuple(RemoveAccessControlEntryRecord(id=acl_id) for acl_id in removed), tuple(results))


class _RulesToFind:
    """The rules of an image by name and by principal: a request may have many filters, and a cluster many rules."""

    __slots__ = ("_by_name", "_by_principal", "_ids")

    def __init__(self, image: ClusterImage) -> None:
        self._ids = image.security.acl_ids
        self._by_name: defaultdict[str, list[AclBinding]] = defaultdict(list)
        self._by_principal: defaultdict[str, list[AclBinding]] = defaultdict(list)

    def matching(self, wanted: AclFilter) -> Steps[dict[UUID, AclBinding]]:
        if (rule := wanted.rule()) is not None:
            return {self._ids[rule]: rule} if rule in self._ids else {}
        found: dict[UUID, AclBinding] = {}
        for acl in (yield from self._candidates(wanted)):
            if wanted.matches(acl):
                found[self._ids[acl]] = acl
            yield
        return found

    def _candidates(self, wanted: AclFilter) -> Steps[Iterable[AclBinding]]:
        name = wanted.resource_name
        if name is None and wanted.principal is None:
            return self._ids
        if not self._by_name:
            for acl in self._ids:
                self._by_name[acl.resource_name].append(acl)
                self._by_principal[acl.principal].append(acl)
                yield
        if wanted.principal is not None:
            return self._by_principal.get(wanted.principal, ())
        assert name is not None
        if wanted.pattern_type != PatternType.MATCH:
            return self._by_name.get(name, ())
        names = {WILDCARD, *(name[:length] for length in range(len(name) + 1))}
        return [acl for each in names for acl in self._by_name.get(each, ())]


def check_filter(wanted: AclFilter) -> None:
    """Raises ApiError if the filter has a value that does not exist."""
    if _is_unknown(ResourceType, wanted.resource_type) or _is_unknown(PatternType, wanted.pattern_type):
        raise _invalid("Unknown patternFilter.")
    if _is_unknown(Operation, wanted.operation) or _is_unknown(Permission, wanted.permission):
        raise _invalid("Unknown entryFilter.")


def _record(acl: AclBinding, acl_id: UUID) -> AccessControlEntryRecord:
    return AccessControlEntryRecord(
        id=acl_id,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )


def _is_unknown(kind: type[ResourceType | PatternType | Operation | Permission], value: int) -> bool:
    return value == 0 or value not in set(kind)


def _name(kind: type[ResourceType | PatternType | Operation | Permission], value: int) -> str:
    return kind(value).name if value in set(kind) else "UNKNOWN"


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, message)
