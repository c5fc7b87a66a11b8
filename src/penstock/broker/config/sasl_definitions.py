"""The settings of SASL that belong to the whole node: PLAIN, unknown users, delegation tokens."""

from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting

_BOOLEAN, _PASSWORD, _INT, _LONG = (
    SettingType.BOOLEAN,
    SettingType.PASSWORD,
    SettingType.INT,
    SettingType.LONG,
)
_DAY_MS = 24 * 60 * 60 * 1000


def _initial_credentials(value: SettingValue) -> str | None:
    if value is None:
        return None
    # Imported here, because most nodes have no such setting.
    from penstock.security.initial_credentials import parse_initial_credentials

    try:
        parse_initial_credentials(str(value))
    except ValueError as error:
        return str(error)
    return None


SASL_SETTINGS = (
    Setting(
        name="penstock.initial.scram.credentials",
        type=_PASSWORD,
        default=None,
        doc="SCRAM users of a new cluster, as for `kafka-storage format --add-scram`: "
        "SCRAM-SHA-512=[name=admin,password=...], with semicolons between them. They are created if the cluster has "
        "no other SCRAM users. A node that starts also accepts them, and the user as which it logs in itself, from "
        "other nodes before it knows the cluster's users.",
        check=_initial_credentials,
        read_only=True,
    ),
    static_setting(
        "penstock.sasl.plain.scram.credentials",
        _BOOLEAN,
        False,
        "Whether PLAIN also accepts users with a SCRAM credential. Their password then reaches this node: use TLS.",
    ),
    static_setting(
        "penstock.sasl.secret",
        _PASSWORD,
        None,
        "The secret from which SCRAM derives the salt of a user that does not exist. It must be the same on all nodes: "
        "if two nodes sent different salts, a client would see that the user does not exist. Default: "
        "delegation.token.secret.key, or else a random value that the metadata log keeps.",
    ),
    static_setting(
        "delegation.token.secret.key",
        _PASSWORD,
        None,
        "From this follow the passwords of delegation tokens in the metadata log; the same on all nodes. Without it, "
        "delegation tokens are disabled.",
    ),
    static_setting(
        "delegation.token.max.lifetime.ms",
        _LONG,
        7 * _DAY_MS,
        "How long a delegation token can be renewed at most.",
        1,
    ),
    static_setting(
        "delegation.token.expiry.time.ms",
        _LONG,
        _DAY_MS,
        "How long a delegation token is valid before it must be renewed.",
        1,
    ),
    static_setting(
        "delegation.token.expiry.check.interval.ms",
        _LONG,
        _DAY_MS // 24,
        "How often the active controller removes delegation tokens that have expired. No client can log in with such a "
        "token, whether or not it is removed already.",
        1,
    ),
    static_setting(
        "penstock.delegation.tokens.max",
        _INT,
        10_000,
        "Delegation tokens of the cluster; every node keeps them in memory. Above it, no further one is created "
        "(POLICY_VIOLATION).",
        1,
    ),
    static_setting(
        "penstock.delegation.tokens.per.owner.max",
        _INT,
        1_000,
        "Delegation tokens of one owner, including those that others created for it. Above it, no further one is "
        "created for this owner (POLICY_VIOLATION).",
        1,
    ),
)
