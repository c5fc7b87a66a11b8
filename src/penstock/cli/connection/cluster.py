"""Opens the client of `penstock.client` for a verb, and explains its errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.connection.options import ConnectionOptions
from penstock.cli.errors import CommandError
from penstock.client.errors import AuthenticationFailed, ClientError, Refused, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.protocol.errors import ErrorCode

HINTS = {
    ErrorCode.unknown_topic_or_partition: "`penstock topic list` shows all topics",
    ErrorCode.group_id_not_found: "`penstock group list` shows all groups",
    ErrorCode.non_empty_group: "stop the members of the group first",
    ErrorCode.unknown_member_id: "stop the members of the group first",
    ErrorCode.cluster_authorization_failed: "this principal may not do that",
    ErrorCode.delegation_token_auth_disabled: "delegation tokens need delegation.token.secret.key on all nodes",
    ErrorCode.delegation_token_request_not_allowed: (
        "log in with SASL or a client certificate, and not with a delegation token"
    ),
    ErrorCode.security_disabled: "access rules need authorizer.class.name on all nodes",
}


@contextmanager
def open_cluster(options: ConnectionOptions) -> Iterator[Cluster]:
    """Connects, and raises every client error as a CommandError. Fails at once if no broker answers."""
    with errors_explained(), Cluster(options.connection_settings()) as cluster:
        require_broker(cluster)
        yield cluster


@contextmanager
def errors_explained() -> Iterator[None]:
    """Raises every client error as a CommandError."""
    try:
        yield
    except ClientError as error:
        raise explain_client_error(error) from None


def check_reachable(options: ConnectionOptions) -> None:
    """Raises CommandError with the reason, where confluent-kafka would retry for minutes."""
    with open_cluster(options):
        pass


def require_broker(cluster: Cluster) -> None:
    try:
        _ = cluster.cluster_id  # asks each address once
    except Unavailable as error:
        # The client's sentence ends with the reason for each address, which is all that is new here.
        raise CommandError(
            f"no broker at {str(error).partition(': ')[2] or error}",
            hint="start one with `penstock serve`, or name another with --bootstrap, --context or PENSTOCK_BOOTSTRAP",
        ) from None


def explain_client_error(error: ClientError) -> CommandError:
    match error:
        case Refused():
            return CommandError(str(error), hint=HINTS.get(error.code))
        case AuthenticationFailed():
            return CommandError(
                str(error),
                hint="check security.protocol, sasl.* and ssl.* in --command-config, --property or the context",
            )
        case _:
            return CommandError(str(error))
