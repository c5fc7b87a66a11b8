"""The audit trail: who changed what, who was refused what, and which logins failed, as JSON lines of the logger
`penstock.audit` and, optionally, of a topic (`audit_topic`).

An attacker cannot flood it: each principal has a budget of lines, and all failed logins share one, because clients
choose the names in them. What exceeds a budget is counted, and the count is part of its next line.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.network.apis import APIS, PRIVATE_APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import Steps, finish

if TYPE_CHECKING:
    from penstock.broker.network.audit_topic import AuditTopicWriter
    from penstock.broker.network.requests import RequestContext

logger = logging.getLogger("penstock.audit")

#: A principal's lines: a burst, then so many per second.
BURST_LINES: Final = 50
LINES_PER_SECOND: Final = 5.0
#: Principals with a budget of their own; the one that was silent longest loses it first.
_PRINCIPALS_MAX: Final = 1000
#: Resources that one line names; a client may send thousands.
_RESOURCES_MAX: Final = 20
_NAME_CHARS_MAX: Final = 249
#: Attributes that may name a resource in a request, and what to write for each of them.
_NAMES: Final = (
    "name",
    "resource_name",
    "topic",
    "topic_name",
    "topic_id",
    "feature",
    "resource_name_filter",
    "path",
)
_DETAILS: Final = (
    "resource_type",
    "resource_type_filter",
    "resource_pattern_type",
    "pattern_type_filter",
    "principal",
    "principal_filter",
    "host",
    "host_filter",
    "operation",
    "permission_type",
    "mechanism",
    "producer_id",
    "transaction_result",
)
#: The budget of failed logins; no principal has this name.
_FAILED_LOGINS: Final = ""


class _Budget:
    __slots__ = ("left", "left_out", "since_ms")

    def __init__(self, now_ms: int) -> None:
        self.left, self.since_ms, self.left_out = float(BURST_LINES), now_ms, 0

    def take(self, now_ms: int) -> bool:
        refill = max(now_ms - self.since_ms, 0) / 1000 * LINES_PER_SECOND
        self.left, self.since_ms = min(self.left + refill, BURST_LINES), now_ms
        if self.left < 1:
            self.left_out += 1
            return False
        self.left -= 1
        return True


class AuditTrail:
    """Writes lines as long as the budgets last."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()
        #: Set if the lines are also written to a topic.
        self.topic: AuditTopicWriter | None = None
        #: Lines that were left out since the start.
        self.left_out = 0

    def login_failed(
        self, now_ms: int, *, principal: str, host: str, listener: str, **details: str | None
    ) -> None:
        """`principal` is whose connection it is, not who the client claims to be."""
        event = {"event": "login_failed", "host": host, "listener": listener, **details}
        self.write(principal, now_ms, event, budget_of=_FAILED_LOGINS)

    def write(
        self, principal: str, now_ms: int, event: dict[str, Any], *, budget_of: str | None = None
    ) -> None:
        """`budget_of` names the budget of the line, if it is not that of its principal."""
        key = principal if budget_of is None else budget_of
        budget = self._budgets.get(key)
        if budget is None:
            budget = self._budgets[key] = _Budget(now_ms)
            if len(self._budgets) > _PRINCIPALS_MAX:
                self._budgets.popitem(last=False)
        else:
            self._budgets.move_to_end(key)
        if not budget.take(now_ms):
            self.left_out += 1
            return
        if budget.left_out:
            event["left_out"] = budget.left_out
            budget.left_out = 0
        at = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": at, "principal": principal, **event}, ensure_ascii=True)
        logger.info(line)
        if self.topic is not None:
            self.topic.add(principal, line, now_ms)


def audit_refusal(ctx: RequestContext, operation: str, resource_type: str, name: str) -> None:
    _write(
        ctx, "refused", {"operation": operation, "resource": resource_type, "name": name[:_NAME_CHARS_MAX]}
    )


def audit_request(ctx: RequestContext, request: Any, changes: tuple[str, ...], response: Any) -> Steps[None]:
    """`changes` are the attributes of the request that name what it changes. The response may have many errors."""
    resources: list[Any] = []
    for attribute in changes:
        value = getattr(request, attribute, None)
        elements = value if isinstance(value, tuple) else () if value is None else (value,)
        described = [_described(element) for element in elements[:_RESOURCES_MAX]]
        if attribute == "deletions":
            described = [each | {"deleted": True} for each in described]
        resources += described + [None] * (
            len(elements) - len(described)
        )  # what is above the bound is counted
    details = {"validate_only": True} if getattr(request, "validate_only", False) else {}
    errors: set[str] = set()
    yield from _add_errors(errors, response)
    _write_change(ctx, resources, errors, details)


def audit_change(ctx: RequestContext, resources: Sequence[Any], response: Any) -> None:
    """`resources` name what was changed."""
    errors: set[str] = set()
    finish(_add_errors(errors, response))
    _write_change(ctx, resources, errors)


def _write_change(
    ctx: RequestContext,
    resources: Sequence[Any],
    errors: set[str],
    details: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    event: dict[str, Any] = {"resources": list(resources[:_RESOURCES_MAX])}
    if len(resources) > _RESOURCES_MAX:
        event["more_resources"] = len(resources) - _RESOURCES_MAX
    event.update(details)
    if errors:
        event["errors"] = sorted(errors)
    _write(ctx, "changed", event)


def _write(ctx: RequestContext, event: str, details: dict[str, Any]) -> None:
    api = APIS.get(ctx.api_key) or PRIVATE_APIS[ctx.api_key]
    facts = {"event": event, "api": api.name, "host": ctx.client_host, "client_id": ctx.client_id}
    ctx.services.audit.write(str(ctx.principal), ctx.services.now_ms(), facts | details)


def _described(element: Any) -> Any:
    """Return the names in an element of a request; values of settings are left out, because they may be secrets."""
    if not is_dataclass(element):
        return element if isinstance(element, int) else str(element)[:_NAME_CHARS_MAX]
    found: dict[str, Any] = {}
    for name in (*_NAMES, *_DETAILS):
        value = getattr(element, name, None)
        if value is not None:
            found[name] = value if isinstance(value, int) else str(value)[:_NAME_CHARS_MAX]
    settings = getattr(element, "configs", None)
    if settings:
        found["settings"] = [setting.name[:_NAME_CHARS_MAX] for setting in settings[:_RESOURCES_MAX]]
    if entity := getattr(element, "entity", None):  # whom a quota is for
        found["entity"] = {
            part.entity_type[:_NAME_CHARS_MAX]: part.entity_name and part.entity_name[:_NAME_CHARS_MAX]
            for part in entity[:_RESOURCES_MAX]
        }
        operations = getattr(element, "ops", ())
        found["settings"] = [op.key[:_NAME_CHARS_MAX] for op in operations[:_RESOURCES_MAX]]
    if topics := getattr(element, "topics", None):  # of the markers of a transaction
        found["topics"] = [topic.name[:_NAME_CHARS_MAX] for topic in topics[:_RESOURCES_MAX]]
    return found


def _add_errors(found: set[str], response: Any, depth: int = 3) -> Steps[None]:
    """Add the names of the errors in a response, each element of which is a step."""
    if not is_dataclass(response):
        return
    for field in fields(response):
        value = getattr(response, field.name)
        if isinstance(value, ErrorCode):
            if value is not ErrorCode.none:
                found.add(value.name)
        elif isinstance(value, tuple) and depth:
            for element in value:
                yield from _add_errors(found, element, depth - 1)
                yield
