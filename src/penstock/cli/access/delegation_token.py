"""`penstock delegation-token`: create, list, renew and expire delegation tokens.

Renewing and expiring name a token by its id, so that no password stands among the words of a command.
"""

from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options
from penstock.cli.output import confirm, note, print_facts, print_json, print_table
from penstock.client.admin.tokens import (
    AT_ONCE,
    LONGEST,
    DelegationToken,
    create_token,
    expire_token,
    list_tokens,
    renew_token,
)
from penstock.client.errors import Refused
from penstock.client.retry import DurationError, duration_s
from penstock.client.wire.cluster import Cluster
from penstock.protocol.errors import ErrorCode

app = typer.Typer(
    help="Delegation tokens: logins with SCRAM for programs that must not have a user's password.",
    no_args_is_help=True,
)

TokenId = Annotated[str, typer.Argument(metavar="TOKEN_ID", show_default=False)]
Owners = Annotated[
    list[str] | None,
    typer.Option(
        "--owner",
        metavar="PRINCIPAL",
        help="Only tokens that User:NAME owns or may renew. Repeatable.",
        show_default=False,
    ),
]


@app.command()
@expand_options
def create(
    connection: ConnectionOptions,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner",
            metavar="PRINCIPAL",
            help="User:NAME. Default: this client itself; others need CreateTokens on that user.",
            show_default=False,
        ),
    ] = None,
    renewer: Annotated[
        list[str] | None,
        typer.Option(
            "--renewer",
            metavar="PRINCIPAL",
            help="Who else may renew and expire it. Repeatable.",
            show_default=False,
        ),
    ] = None,
    max_lifetime: Annotated[
        str | None,
        typer.Option(
            "--max-lifetime",
            metavar="TIME",
            help="How long it can be renewed at most, as in 12h or 3d. Default: delegation.token.max.lifetime.ms.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token, and print its id and its HMAC: the user name and the password of a SCRAM login."""
    lifetime_ms = LONGEST if max_lifetime is None else _period_ms(max_lifetime, "--max-lifetime")
    for principal in (*(renewer or ()), *((owner,) if owner is not None else ())):
        _check_principal(principal)
    with open_cluster(connection) as cluster:
        try:
            token = create_token(cluster, owner=owner, renewers=renewer or (), max_lifetime_ms=lifetime_ms)
        except Refused as error:
            if error.code is not ErrorCode.policy_violation:
                raise
            raise CommandError(
                f"there are as many delegation tokens as the cluster allows, in all or of {owner or 'this client'}",
                hint="expire some, or raise penstock.delegation.tokens.per.owner.max or penstock.delegation.tokens.max",
            ) from None
    if as_json:
        print_json(_document(token) | {"hmac": token.hmac})
        return
    print_facts(
        [
            ("token id", token.token_id),
            ("hmac", token.hmac),
            ("owner", token.owner),
            ("expires", _shown_time(token.expires_ms)),
            ("can be renewed until", _shown_time(token.max_ms)),
        ]
    )


@app.command("list")
@expand_options
def list_all(connection: ConnectionOptions, owner: Owners = None, as_json: AsJson = False) -> None:
    """List the tokens that this client may see, without their HMACs."""
    for principal in owner or ():
        _check_principal(principal)
    with open_cluster(connection) as cluster:
        tokens = list_tokens(cluster, owner or None)
    if as_json:
        print_json([_document(token) for token in tokens])
    elif tokens:
        print_table(
            ["token id", "owner", "requester", "renewers", "issued", "expires", "renewable until"],
            [
                [
                    token.token_id,
                    token.owner,
                    token.requester,
                    ", ".join(token.renewers) or None,
                    *map(_shown_time, (token.issued_ms, token.expires_ms, token.max_ms)),
                ]
                for token in tokens
            ],
            unfolded=["token id"],
        )
    else:
        note("no delegation tokens")


@app.command()
@expand_options
def renew(
    token_id: TokenId,
    connection: ConnectionOptions,
    period: Annotated[
        str | None,
        typer.Option(
            "--period",
            metavar="TIME",
            help="How long it shall be valid from now on. Default: delegation.token.expiry.time.ms.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Let a token be valid for longer."""
    period_ms = LONGEST if period is None else _period_ms(period, "--period")
    with open_cluster(connection) as cluster:
        expires_ms = renew_token(cluster, _existing(cluster, token_id).hmac, period_ms)
    note(f"token {token_id} expires at {_shown_time(expires_ms)}")


@app.command()
@expand_options
def expire(
    token_id: TokenId,
    connection: ConnectionOptions,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="TIME",
            help="The token expires after this time, such as 12h. Default: at once.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """End a token. Connections that were opened with it stay until their session ends."""
    period_ms = AT_ONCE if after is None else _period_ms(after, "--after")
    with open_cluster(connection) as cluster:
        token = _existing(cluster, token_id)
        confirm(f"Expire token {token_id} of {token.owner}?", yes=yes)
        expires_ms = expire_token(cluster, token.hmac, period_ms)
    if after is None:
        note(f"token {token_id} removed")
    else:
        note(f"token {token_id} expires at {_shown_time(expires_ms)}")


def _existing(cluster: Cluster, token_id: str) -> DelegationToken:
    for token in list_tokens(cluster):
        if token.token_id == token_id:
            return token
    raise CommandError(
        f"there is no token {token_id} that this client may see",
        hint="`penstock delegation-token list` shows all of them",
    )


def _check_principal(text: str) -> None:
    kind, _, name = text.partition(":")
    if not kind or not name:
        raise CommandError(f"{text!r} is no principal", hint="write User:NAME", exit_code=EXIT_USAGE)


def _period_ms(text: str, option: str) -> int:
    try:
        milliseconds = round(duration_s(text) * 1000)
    except DurationError as error:
        raise CommandError(f"{option}: {error}", exit_code=EXIT_USAGE) from None
    if milliseconds < 1:
        raise CommandError(f"{option} must be more than 0", exit_code=EXIT_USAGE)
    return milliseconds


def _shown_time(milliseconds: int) -> str:
    return f"{_time(milliseconds).removesuffix('+00:00')}Z"


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(sep=" ", timespec="seconds")


def _document(token: DelegationToken) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "owner": token.owner,
        "requester": token.requester,
        "renewers": list(token.renewers),
        "issued": _time(token.issued_ms),
        "expires": _time(token.expires_ms),
        "max": _time(token.max_ms),
    }
