"""The settings of OAUTHBEARER: how a listener checks tokens, and how this node gets its own for other nodes.

All may differ between listeners, as `listener.name.NAME.oauthbearer.SETTING`.
"""

from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting

_INT, _LONG, _STRING, _LIST = SettingType.INT, SettingType.LONG, SettingType.STRING, SettingType.LIST
_PASSWORD = SettingType.PASSWORD


def _url(value: SettingValue) -> str | None:
    if value is None:
        return None
    from penstock.protocol.url_reader import (
        url_flaw,  # imports take 10 ms, which a node without OAUTHBEARER saves
    )

    return url_flaw(str(value))


_TOKENS_OF_CLIENTS = (
    Setting(
        name="sasl.oauthbearer.jwks.endpoint.url",
        type=_STRING,
        default=None,
        doc="The key set (JWKS) with the public keys of the issuer of tokens: https://HOST/PATH, http://HOST/PATH or "
        "file:///PATH. A listener with OAUTHBEARER does not start without it.",
        check=_url,
        read_only=True,
    ),
    static_setting(
        "sasl.oauthbearer.jwks.endpoint.refresh.ms",
        _LONG,
        3_600_000,
        "How often the key set is read again. Keys that it no longer has are no longer accepted after that.",
        1000,
    ),
    static_setting(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms",
        _LONG,
        100,
        "The pause after a key set could not be read, which doubles with each further failure.",
        1,
    ),
    static_setting(
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms",
        _LONG,
        10_000,
        "The longest such pause. Also how often, at most, the key set is read because a token has an unknown key.",
        1,
    ),
    static_setting(
        "sasl.oauthbearer.expected.audience",
        _LIST,
        (),
        "A token must be for one of these audiences (aud). If not set, tokens for any audience are refused: they are "
        "for another service.",
    ),
    static_setting(
        "sasl.oauthbearer.expected.issuer",
        _STRING,
        None,
        "The issuer (iss) that a token must have; any if not set.",
    ),
    static_setting(
        "sasl.oauthbearer.clock.skew.seconds",
        _INT,
        30,
        "How far the clocks of this node and of the issuer may differ.",
        0,
        3600,
    ),
    static_setting(
        "sasl.oauthbearer.scope.claim.name", _STRING, "scope", "The claim with the scope of a token."
    ),
    static_setting(
        "sasl.oauthbearer.sub.claim.name",
        _STRING,
        "sub",
        "The claim that names the user: the principal is User:NAME.",
    ),
    static_setting(
        "penstock.sasl.oauthbearer.token.bytes.max",
        _INT,
        16_384,
        "Largest token. Larger ones are refused before they are decoded.",
        256,
        262_144,
    ),
)

_TOKENS_OF_NODES = (
    Setting(
        name="sasl.oauthbearer.token.endpoint.url",
        type=_STRING,
        default=None,
        doc="Where this node gets the token with which it logs in to other nodes: an endpoint for client credentials "
        "(https:// or http://), or a file with a token (file:///PATH), which is read for every connection.",
        check=_url,
        read_only=True,
    ),
    static_setting(
        "sasl.oauthbearer.client.credentials.client.id",
        _STRING,
        None,
        "The client id of this node; or clientId in sasl.jaas.config.",
    ),
    static_setting(
        "sasl.oauthbearer.client.credentials.client.secret",
        _PASSWORD,
        None,
        "The client secret of this node; or clientSecret in sasl.jaas.config.",
    ),
    static_setting(
        "sasl.oauthbearer.scope",
        _STRING,
        None,
        "The scope that this node asks for; or scope in sasl.jaas.config.",
    ),
)

OAUTHBEARER_SETTINGS = (*_TOKENS_OF_CLIENTS, *_TOKENS_OF_NODES)
