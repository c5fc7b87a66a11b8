"""AlterClientQuotas: which entities and limits exist, checked as Apache Kafka's controller checks them."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.rare_records import ClientQuotaRecord, QuotaEntity
from penstock.cluster.security_image import QuotaKey
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.quota_entities import canonical_entity
from penstock.protocol.steps import Steps

_USER, _CLIENT_ID, _IP = "user", "client-id", "ip"
_ENTITY_TYPES: Final = frozenset({_USER, _CLIENT_ID, _IP})
_WHOLE_NUMBERS: Final = frozenset({"producer_byte_rate", "consumer_byte_rate", "connection_creation_rate"})
_OF_CLIENTS: Final = frozenset(
    {"producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate"}
)
_OF_HOSTS: Final = frozenset({"connection_creation_rate"})
_LONG_MAX: Final = 2**63 - 1
#: How far a limit that must be a whole number may be from one.
_FRACTION_MAX: Final = 1e-6


class QuotaAlteration(NamedTuple):
    """`limits` holds what to set, and None for what to remove."""

    entity: tuple[tuple[str, str | None], ...]
    limits: Mapping[str, float | None]


class QuotaResult(NamedTuple):
    entity: tuple[tuple[str, str | None], ...]
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def alter_client_quotas(
    image: ClusterImage, alterations: Sequence[QuotaAlteration]
) -> Steps[Decision[tuple[QuotaResult, ...]]]:
    """An entity that cannot be altered as requested stays as it is; the others are altered."""
    records: list[ClientQuotaRecord] = []
    results = []
    spelled: dict[QuotaKey, list[QuotaKey]] = {}
    for key in image.security.quotas:
        if (canonical := canonical_entity(key)) != key:
            spelled.setdefault(canonical, []).append(key)
    for entity, limits in alterations:
        yield
        try:
            key = quota_key(entity)
            check_limits(key, limits)
        except ApiError as error:
            results.append(QuotaResult(entity, error.code, error.message))
            continue
        present = image.security.quotas.get(key, {})
        for other in spelled.get(key, ()):
            # Stored by an older version, which did not know that it is the same address.
            replaced = image.security.quotas[other]
            records += _changes(replaced, other, dict.fromkeys(replaced))
            limits = {**replaced, **present, **limits}
        records += _changes(present, key, limits)
        results.append(QuotaResult(entity))
    return Decision(tuple(records), tuple(results))


def quota_key(entity: Iterable[tuple[str, str | None]]) -> QuotaKey:
    """Return the key of an entity. Raises ApiError if no such entity can have quotas."""
    parts: dict[str, str | None] = {}
    for kind, name in entity:
        if kind not in _ENTITY_TYPES:
            raise ApiError(ErrorCode.invalid_request, f"Unhandled client quota entity type: {kind}")
        if kind in parts:
            raise ApiError(ErrorCode.invalid_request, f"Duplicate client quota entity type: {kind}")
        if name == "":
            raise ApiError(ErrorCode.invalid_request, f"Empty {kind} not supported")
        parts[kind] = name
    if not parts:
        raise ApiError(ErrorCode.invalid_request, "Invalid empty client quota entity")
    if _IP in parts:
        if len(parts) > 1:
            raise ApiError(
                ErrorCode.invalid_request,
                "Invalid quota entity combination: an IP has no user and no client id",
            )
        _check_address(parts[_IP])
    return canonical_entity(tuple(sorted(parts.items(), key=lambda part: part[0])))


def _check_address(name: str | None) -> None:
    """Host names are not looked up: the controller would wait for a name server."""
    if name is None:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise ApiError(ErrorCode.invalid_request, f"{name} is not an IP address.") from None


def check_limits(key: QuotaKey, limits: Mapping[str, float | None]) -> None:
    """Raises ApiError if the entity cannot have these limits."""
    allowed = _OF_HOSTS if key[0][0] == _IP else _OF_CLIENTS
    for name, value in limits.items():
        if name not in allowed:
            raise ApiError(ErrorCode.invalid_request, f"Invalid configuration key {name}")
        if value is None:
            continue
        if not value > 0:  # also not a number
            raise ApiError(ErrorCode.invalid_request, f"Quota {name} must be greater than 0")
        if name in _WHOLE_NUMBERS:
            if value > _LONG_MAX:
                raise ApiError(
                    ErrorCode.invalid_request, f"Proposed value for {name} is too large for a LONG."
                )
            if math.fmod(value, 1) > _FRACTION_MAX:
                raise ApiError(ErrorCode.invalid_request, f"{name} cannot be a fractional value.")
        elif math.isinf(value):
            raise ApiError(ErrorCode.invalid_request, f"Quota {name} must be finite")


def _changes(
    present: Mapping[str, float], key: QuotaKey, limits: Mapping[str, float | None]
) -> Iterable[ClientQuotaRecord]:
    entity = tuple(QuotaEntity(entity_type=kind, entity_name=name) for kind, name in key)
    for name, value in limits.items():
        if value is None:
            if name in present:
                yield ClientQuotaRecord(entity=entity, key=name, value=0.0, remove=True)
        elif present.get(name) != value:
            yield ClientQuotaRecord(entity=entity, key=name, value=value, remove=False)
