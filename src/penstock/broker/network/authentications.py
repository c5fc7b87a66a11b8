"""What the listeners of this node offer for SASL, from its settings and from the credentials in the metadata log."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Final

from penstock.broker.environment import StartFailed
from penstock.cluster.image import ClusterImage
from penstock.cluster.scram_secret import SCRAM_SECRET_BYTES, stored_scram_secret
from penstock.protocol.jaas import parse_jaas
from penstock.protocol.sasl_client import OAUTHBEARER, PLAIN
from penstock.protocol.scram import SCRAM_HASHES, SCRAM_MECHANISM_IDS, SCRAM_MECHANISMS_BY_ID
from penstock.security.authentication import Authentication, Authentications, TokenLogin
from penstock.security.delegation_tokens import TokenHmacs
from penstock.security.initial_credentials import InitialCredential, parse_initial_credentials
from penstock.security.plain import PlainUsers
from penstock.security.principal import Principal
from penstock.security.scram import ScramCredential

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import ImageView, Tasks
    from penstock.broker.network.key_sets import KeySetReader
    from penstock.broker.network.requests import RequestContext
    from penstock.cluster.rare_records import UserScramCredentialRecord

_SUPPORTED: Final = (PLAIN, *SCRAM_HASHES, OAUTHBEARER)
_NAME_CHARS_MAX: Final = 100


class ImageCredentials:
    """Credentials and delegation tokens in the metadata image that is published now."""

    def __init__(self, metadata: ImageView, token_hmacs: TokenHmacs) -> None:
        self._metadata = metadata
        self._token_hmacs = token_hmacs
        self._counted: Mapping[tuple[str, int], UserScramCredentialRecord] | None = None
        self._iterations_max: Mapping[str, int] = {}

    def scram(self, mechanism: str, user: str) -> ScramCredential | None:
        record = self._image.security.credentials.get((user, SCRAM_MECHANISM_IDS[mechanism]))
        if record is None:
            return None
        return ScramCredential(record.salt, record.stored_key, record.server_key, record.iterations)

    def iterations_max(self) -> Mapping[str, int]:
        credentials = self._image.security.credentials
        if credentials is not self._counted:
            most: dict[str, int] = {}
            for (user, number), record in credentials.items():
                if all((user, earlier) not in credentials for earlier in range(1, number)):
                    mechanism = SCRAM_MECHANISMS_BY_ID[number]
                    most[mechanism] = max(most.get(mechanism, 0), record.iterations)
            self._iterations_max, self._counted = most, credentials
        return self._iterations_max

    def token(self, token_id: str, now_ms: int) -> TokenLogin | None:
        record = self._image.security.tokens.get(token_id)
        if record is None or not self._token_hmacs.is_enabled:
            return None
        expires_ms = min(record.max_timestamp, record.expiration_timestamp)
        if expires_ms <= now_ms:
            return None
        return TokenLogin(Principal.parse(record.owner), self._token_hmacs.of(token_id), expires_ms)

    @property
    def _image(self) -> ClusterImage:
        return self._metadata.image


class InterBrokerCredentials(ImageCredentials):
    """Those in the metadata image and, where it cannot have them yet, the initial ones from the settings.

    A node that starts does not know the users of its cluster: the other nodes must log in to it before it can learn
    them. Neither do the nodes of a new cluster.
    """

    def __init__(
        self,
        metadata: ImageView,
        token_hmacs: TokenHmacs,
        initial: Iterable[InitialCredential],
        is_starting: Callable[[], bool],
    ) -> None:
        super().__init__(metadata, token_hmacs)
        self._initial = {
            (each.mechanism, each.user): each.salt_password(secrets.token_bytes).stored for each in initial
        }
        self._is_starting = is_starting

    def scram(self, mechanism: str, user: str) -> ScramCredential | None:
        if self._uses_initial and (initial := self._initial.get((mechanism, user))) is not None:
            return initial
        return super().scram(mechanism, user)

    def iterations_max(self) -> Mapping[str, int]:
        most = super().iterations_max()
        if not self._uses_initial:
            return most
        most = dict(most)
        for (mechanism, _), credential in self._initial.items():
            most[mechanism] = max(most.get(mechanism, 0), credential.iterations)
        return most

    @property
    def _uses_initial(self) -> bool:
        return not self._image.security.credentials or self._is_starting()


class ListenerAuthentications:
    """Makes the `Authentication` of each new connection. Raises StartFailed if a setting is missing or wrong."""

    def __init__(
        self, settings: NodeSettings, metadata: ImageView, *, is_starting: Callable[[], bool]
    ) -> None:
        token_secret = _text(settings["delegation.token.secret.key"])
        token_hmacs = TokenHmacs(token_secret)
        #: Of the first SCRAM users of a new cluster.
        self.initial_credentials = _initial_credentials(settings)
        self._credentials: ImageCredentials = ImageCredentials(metadata, token_hmacs)
        self._inter_broker_credentials = InterBrokerCredentials(
            metadata, token_hmacs, self.initial_credentials, is_starting
        )
        self._metadata = metadata
        self._own_secret = secrets.token_bytes(SCRAM_SECRET_BYTES)
        self._shared_secret = _text(settings["penstock.sasl.secret"]) or token_secret
        self._key_sets: dict[str, KeySetReader] = {}
        self._by_listener = {
            listener.name: self._listener(settings, listener.name)
            for listener in settings.listeners
            if settings.protocol(listener.name).uses_sasl
        }

    def start(self, tasks: Tasks) -> None:
        """Read the keys of tokens. Raises StartFailed."""
        for key_set in self._key_sets.values():
            key_set.start(tasks)

    def close(self) -> None:
        for key_set in self._key_sets.values():
            key_set.close()

    def new(self, listener: str) -> Authentication:
        return self._by_listener[listener].new()

    async def wait_for_newer_keys(self, listener: str) -> None:
        """Read the keys of tokens again for a login on this listener, unless that was done just now."""
        await self._key_sets[listener].wait_for_newer()

    def _unknown_users_secret(self) -> bytes:
        """All nodes have the same, and keep it when they restart.

        Before there are users, there is nothing to hide.
        """
        if self._shared_secret is not None:
            secret = self._shared_secret.encode()
        else:
            secret = stored_scram_secret(self._metadata.image) or self._own_secret
        return hmac.digest(secret, b"salts of unknown SCRAM users", "sha256")

    def _listener(self, settings: NodeSettings, name: str) -> Authentications:
        mechanisms = settings.listener_value(name, "sasl.enabled.mechanisms")
        assert isinstance(mechanisms, tuple)
        unknown = [each for each in mechanisms if each not in _SUPPORTED]
        if unknown:
            raise StartFailed(
                f"sasl.enabled.mechanisms of listener {name} has {', '.join(unknown)}",
                hint=f"these are supported: {', '.join(_SUPPORTED)}",
            )
        uses_scram = settings.boolean("penstock.sasl.plain.scram.credentials")
        users = _plain_users(settings, name) if PLAIN in mechanisms else PlainUsers({})
        if PLAIN in mechanisms and not users and not uses_scram:
            raise StartFailed(
                f"listener {name} offers PLAIN, and no user can log in",
                hint=f"set listener.name.{name.lower()}.plain.sasl.jaas.config, "
                "or penstock.sasl.plain.scram.credentials=true",
            )
        if OAUTHBEARER in mechanisms:
            self._key_sets[name] = _new_key_set(settings, name)
        session_ms_max = {
            each: int(str(settings.listener_value(name, "connections.max.reauth.ms", each)))
            for each in mechanisms
        }
        is_inter_broker = name in settings.node_listeners
        return Authentications(
            mechanisms,
            self._inter_broker_credentials if is_inter_broker else self._credentials,
            secret=self._unknown_users_secret,
            random=secrets.token_bytes,
            plain_users=users,
            plain_uses_scram=uses_scram,
            bearer=self._key_sets[name].verifier if name in self._key_sets else None,
            session_ms_max=session_ms_max,
        )


def _new_key_set(settings: NodeSettings, listener: str) -> KeySetReader:
    try:
        import cryptography  # noqa: F401  # optional dependencies

        from penstock.broker.network.key_sets import key_set_reader
    except ImportError:
        raise StartFailed(
            f"listener {listener} offers OAUTHBEARER, which needs the packages pyjwt and cryptography",
            hint="pip install 'penstock[security]'",
        ) from None
    return key_set_reader(settings, listener)


def _plain_users(settings: NodeSettings, listener: str) -> PlainUsers:
    text = _text(settings.listener_value(listener, "sasl.jaas.config", PLAIN))
    if text is None:
        return PlainUsers({})
    try:
        return PlainUsers.parse(text)
    except ValueError as error:
        raise StartFailed(f"listener.name.{listener.lower()}.plain.sasl.jaas.config {error}") from None


def _initial_credentials(settings: NodeSettings) -> tuple[InitialCredential, ...]:
    """Return those that the settings name, and that of this node itself if it logs in to others by SCRAM."""
    found = parse_initial_credentials(_text(settings["penstock.initial.scram.credentials"]) or "")
    for listener in settings.node_listeners:
        mechanism = settings.node_mechanism(listener) or ""
        if not settings.protocol(listener).uses_sasl or mechanism not in SCRAM_HASHES:
            continue
        options = parse_jaas(str(settings.listener_value(listener, "sasl.jaas.config", mechanism))).options
        own = InitialCredential(options["username"], mechanism, options["password"])
        if all((each.user, each.mechanism) != (own.user, own.mechanism) for each in found):
            found.append(own)
    return tuple(found)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def note_refusal(ctx: RequestContext, authentication: Authentication, reason: str) -> None:
    """Count and log a login that failed; the log is bounded."""
    assert ctx.connection is not None
    claimed = authentication.name[:_NAME_CHARS_MAX] or None
    ctx.services.audit.login_failed(
        ctx.services.now_ms(),
        principal=str(ctx.principal),
        host=ctx.client_host,
        listener=ctx.listener,
        client_id=ctx.client_id,
        mechanism=authentication.mechanism,
        user=claimed,
        reason=reason,
    )
    user = f"user {authentication.name[:_NAME_CHARS_MAX]!r}, " if authentication.name else ""
    mechanism = authentication.mechanism or "SASL"
    ctx.services.server.refusals.refuse(ctx.connection, "sasl", f"{mechanism}, {user}{reason}")
