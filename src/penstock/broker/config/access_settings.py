"""Who may do what: the authorizer, `super.users`, the principals of nodes, and the audit topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting
from penstock.security.authorizer import Authorizer
from penstock.security.principal import Principal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.broker.config.node_settings import NodeSettings

#: Kafka's authorizer, whose rules are the only ones here, and its short name.
STANDARD_AUTHORIZERS: Final = (
    "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "StandardAuthorizer",
)


def parse_principals(text: str) -> list[Principal]:
    """Parse principals with semicolons between them. Raises ValueError."""
    return [Principal.parse(part) for part in map(str.strip, text.split(";")) if part]


def _principals(value: SettingValue) -> str | None:
    assert isinstance(value, str)
    try:
        parse_principals(value)
    except ValueError as error:
        return str(error)
    return None


ACCESS_SETTINGS: Final = (
    static_setting(
        "authorizer.class.name",
        SettingType.STRING,
        "",
        "What decides which operations a client may perform: StandardAuthorizer checks access rules (ACLs); without a "
        "value every client may do everything. Apache Kafka's full class name is accepted. The same on all nodes.",
        choices=("", *STANDARD_AUTHORIZERS),
    ),
    Setting(
        name="super.users",
        type=SettingType.STRING,
        default="",
        doc="Principals that may do everything whatever the rules say, as in `User:admin;User:broker`. The principals "
        "of the nodes belong here: nodes talk to each other before they know the rules.",
        check=_principals,
        read_only=True,
    ),
    Setting(
        name="penstock.node.principals",
        type=SettingType.STRING,
        default="",
        doc="The principals of the nodes, as in `User:node-1;User:node-2`. On a listener that authenticates its "
        "clients, only these may send requests between nodes. Empty: the principal as which this node itself logs in, "
        "or that of its certificate; with an authorizer also super.users and principals with CLUSTER_ACTION.",
        check=_principals,
        read_only=True,
    ),
    static_setting(
        "allow.everyone.if.no.acl.found",
        SettingType.BOOLEAN,
        False,
        "Whether everybody may use a resource that no access rule covers.",
    ),
    static_setting(
        "penstock.audit.topic.enable",
        SettingType.BOOLEAN,
        False,
        "Whether this node also writes its audit trail to the internal topic __penstock_audit. Readers need an access "
        "rule for it.",
    ),
    static_setting(
        "penstock.audit.topic.num.partitions",
        SettingType.INT,
        1,
        "Partitions of the audit topic when it is created; a node writes to one of them.",
        1,
    ),
    static_setting(
        "penstock.audit.topic.replication.factor",
        SettingType.SHORT,
        3,
        "Replicas of the audit topic; fewer while there are fewer brokers, and raised later.",
        1,
    ),
    static_setting(
        "penstock.audit.topic.segment.bytes",
        SettingType.INT,
        100 << 20,
        "Segment size of the audit topic.",
        1,
    ),
)


def audit_topic_flaw(values: Mapping[str, SettingValue]) -> str | None:
    """Return why the audit topic cannot be written with these settings, because everybody could read it."""
    if not values["penstock.audit.topic.enable"]:
        return None
    if not values["authorizer.class.name"]:
        return "penstock.audit.topic.enable needs authorizer.class.name: otherwise everybody could read the topic"
    if values["allow.everyone.if.no.acl.found"]:
        return "penstock.audit.topic.enable and allow.everyone.if.no.acl.found would let everybody read the topic"
    return None


def new_authorizer(settings: NodeSettings) -> Authorizer | None:
    """Return the authorizer, which does not know the rules yet; None if none is set."""
    if not settings.string("authorizer.class.name"):
        return None
    return Authorizer(
        super_users=parse_principals(settings.string("super.users")),
        allow_everyone_if_no_acl_found=settings.boolean("allow.everyone.if.no.acl.found"),
    )
