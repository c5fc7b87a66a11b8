"""`penstock delegation-token`: a user creates a token, a program logs in with it, and the user ends it."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.brokers import BrokerProcess

from penstock.cli import main

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with(
        {
            "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.plaintext.plain.sasl.jaas.config": (
                f'{MODULE} required user_carol="pw" user_dave="pw";'
            ),
            "delegation.token.secret.key": "planted key",
            "penstock.delegation.tokens.per.owner.max": "2",
            "authorizer.class.name": "StandardAuthorizer",
        }
    )


def as_user(name: str) -> tuple[str, ...]:
    given = {"sasl.mechanism": "PLAIN", "sasl.username": name, "sasl.password": "pw"}
    return properties(given)


def properties(given: dict[str, str]) -> tuple[str, ...]:
    settings = {"security.protocol": "SASL_PLAINTEXT", **given}
    return tuple(part for item in settings.items() for part in ("-X", "=".join(item)))


CAROL, DAVE = as_user("carol"), as_user("dave")


def test_from_its_creation_to_its_end(penstock: Any, answer: Any) -> None:
    assert "no delegation tokens" in penstock("delegation-token", "list", *CAROL)[1]
    token = answer("delegation-token", "create", *CAROL, "--renewer", "User:dave", "--max-lifetime", "2d")
    assert (token["owner"], token["requester"], token["renewers"]) == (
        "User:carol",
        "User:carol",
        ["User:dave"],
    )
    (listed,) = answer("delegation-token", "list", *CAROL)
    assert listed == {name: value for name, value in token.items() if name != "hmac"}
    shown = "".join(penstock("delegation-token", "list", *CAROL))
    assert token["hmac"] not in shown
    assert token["expires"].replace("+00:00", "Z") in shown

    login = {
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required "
            f'username="{token["token_id"]}" password="{token["hmac"]}" tokenauth="true";'
        ),
    }
    assert "no topics" in "".join(penstock("topic", "list", *properties(login)))
    for words in (("list",), ("create",)):
        refused = penstock("delegation-token", *words, *properties(login), code=1)[1]
        assert "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED" in refused.upper().replace(" ", "_")

    token_id = token["token_id"]
    assert "expires at" in penstock("delegation-token", "renew", token_id, "--period", "5m", *DAVE)[1]
    assert (
        "expires at" in penstock("delegation-token", "expire", token_id, "--after", "1m", *DAVE, "--yes")[1]
    )
    (listed,) = answer("delegation-token", "list", "--owner", "User:carol", *DAVE)
    assert listed["expires"] < token["expires"]
    assert "removed" in penstock("delegation-token", "expire", token_id, *CAROL, "--yes")[1]
    assert "credentials" in penstock("topic", "list", *properties(login), code=1)[1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("renew", "nothing"), 1, "there is no token nothing"),
        (("expire", "nothing", "--yes"), 1, "there is no token nothing"),
        (("create", "--owner", "dave"), 2, "'dave' is no principal"),
        (("create", "--renewer", "User:"), 2, "'User:' is no principal"),
        (("list", "--owner", ":x"), 2, "':x' is no principal"),
        (("create", "--max-lifetime", "soon"), 2, "--max-lifetime"),
        (("create", "--max-lifetime", "0s"), 2, "more than 0"),
        (("create", "--owner", "User:dave"), 1, "User:dave"),
        (("create", "--renewer", "Group:x"), 1, "invalid principal type"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], code: int, message: str, penstock: Any) -> None:
    shown = penstock("delegation-token", *words, *CAROL, code=code)[1]
    assert message.lower() in shown.lower()
    assert "Traceback" not in shown


def test_the_bound_of_tokens_is_named(penstock: Any, answer: Any) -> None:
    made = [answer("delegation-token", "create", *DAVE)["token_id"] for _ in range(2)]
    shown = penstock("delegation-token", "create", *DAVE, code=1)[1]
    assert "there are as many delegation tokens as the cluster allows, in all or of this client" in shown
    assert "penstock.delegation.tokens.per.owner.max" in shown
    for token_id in made:
        penstock("delegation-token", "expire", token_id, "--yes", *DAVE)


def test_words_that_are_wrong_need_no_cluster() -> None:
    assert main(("delegation-token", "create", "--owner", "x", "-b", "localhost:1")) == 2
