"""Which clients of an inter-broker listener are nodes of the cluster, by their principals.

Without this, every user who can log in on that listener could send what only nodes may send.
"""

from __future__ import annotations

import binascii
import logging
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.config.access_settings import parse_principals
from penstock.broker.config.security_definitions import CLIENT_AUTH_NONE
from penstock.protocol.jaas import parse_jaas
from penstock.security.principal import (
    RESERVED_NAMES,
    USER,
    DistinguishedNameRules,
    Principal,
    certificate_subject,
)

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings

logger = logging.getLogger("penstock.server")

_CERTIFICATE: Final = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)


class NodePrincipals:
    """The principals of nodes on one listener.

    `penstock.node.principals` names them. Without it, they are the principal of this node itself and, with an
    authorizer, `super.users`. A listener that does not authenticate its clients takes all of them for nodes.
    """

    def __init__(self, settings: NodeSettings, listener: str) -> None:
        self._settings = settings
        self._listener = listener
        self._named = frozenset(parse_principals(settings.string("penstock.node.principals")))
        #: Whether requests between nodes are also served to other principals to whom access rules give CLUSTER_ACTION.
        self.follows_rules = bool(settings.string("authorizer.class.name")) and not self._named
        super_users = settings.string("super.users") if self.follows_rules else ""
        self._super_users = frozenset(parse_principals(super_users))
        #: Whether requests to the controller are served there, and not only requests between brokers.
        self.serves_controller = listener in settings.controller_listeners
        protocol = settings.protocol(listener)
        asks_for_certificates = settings.listener_value(listener, "ssl.client.auth") != CLIENT_AUTH_NONE
        self.authenticates = protocol.uses_sasl or (protocol.uses_tls and asks_for_certificates)
        self._principals: frozenset[Principal] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Find out the principal of this node again, because its certificate may have another subject."""
        if self.authenticates:
            self._principals = self._named or self._own_principals()

    def includes(self, principal: Principal) -> bool:
        return self.names(principal) or principal in self._super_users

    def names(self, principal: Principal) -> bool:
        """Like `includes`, without super users, who may be people."""
        return not self.authenticates or principal in self._principals

    def _own_principals(self) -> frozenset[Principal]:
        settings, listener = self._settings, self._listener
        if settings.protocol(listener).uses_sasl:
            name = login_name(settings, listener)
        else:
            rules = str(settings.listener_value(listener, "ssl.principal.mapping.rules"))
            try:
                name = DistinguishedNameRules(rules).name(certificate_subject(self._own_certificate()))
            except (OSError, ValueError) as error:
                logger.error(
                    "the subject of this node's own certificate is unknown: set penstock.node.principals",
                    extra={"listener": listener, "reason": str(error)},
                )
                return frozenset()
            if name in RESERVED_NAMES:
                # Every client without a certificate would be a node.
                logger.error(
                    "ssl.principal.mapping.rules gives this node's own certificate a name that no user can have",
                    extra={"listener": listener, "name_given": name},
                )
                return frozenset()
        return frozenset() if name is None else frozenset((Principal(USER, name),))

    def _own_certificate(self) -> bytes:
        """Return the first certificate of the key store in DER. Raises OSError or ValueError."""
        value = partial(self._settings.listener_value, self._listener)
        location = value("ssl.keystore.location")
        if location is None:
            text = str(value("ssl.keystore.certificate.chain")).replace("\\n", "")
        else:
            with open(os.path.expanduser(str(location)), encoding="utf-8", errors="replace") as file:
                text = file.read()
        found = _CERTIFICATE.search(text)
        if found is None:
            raise ValueError("the key store has no certificate")
        return binascii.a2b_base64(found[1])


def login_name(settings: NodeSettings, listener: str) -> str | None:
    """Return the user as whom this node logs in to others; None if it does not, or if a token names the user."""
    mechanism = settings.node_mechanism(listener)
    text = None if mechanism is None else settings.listener_value(listener, "sasl.jaas.config", mechanism)
    return None if text is None else parse_jaas(str(text)).options.get("username")
