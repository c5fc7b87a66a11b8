"""SCRAM users of a new cluster, as settings name them."""

import base64

import pytest

from penstock.broker.config.node_settings import load_settings
from penstock.protocol.config_def import InvalidSetting
from penstock.protocol.scram import salted_password
from penstock.security.initial_credentials import InitialCredential, parse_initial_credentials
from penstock.security.scram import password_matches


def random(count: int) -> bytes:
    return b"r" * count


def test_the_form_is_that_of_kafka_storage() -> None:
    text = (
        'SCRAM-SHA-256=[name="alice",password="a;b]=,\\"c"]; '
        "SCRAM-SHA-512=[name=bob,iterations=8192,password=plain];"
    )
    assert parse_initial_credentials(text) == [
        InitialCredential("alice", "SCRAM-SHA-256", 'a;b]=,"c'),
        InitialCredential("bob", "SCRAM-SHA-512", "plain", 8192),
    ]
    assert parse_initial_credentials(" ") == []
    assert "plain" not in repr(parse_initial_credentials(text))


def test_a_credential_is_that_of_its_password() -> None:
    (given,) = parse_initial_credentials("SCRAM-SHA-512=[name=bob,password=pw]")
    salted = given.salt_password(random)
    assert password_matches("SCRAM-SHA-512", "pw", salted.stored)
    assert not password_matches("SCRAM-SHA-512", "other", salted.stored)


def test_a_password_may_be_salted_already() -> None:
    salt, salted = (
        base64.b64encode(part).decode() for part in (b"salt", salted_password("sha256", "pw", b"salt", 5000))
    )
    text = f'SCRAM-SHA-256=[name=bob,iterations=5000,salt="{salt}",saltedpassword="{salted}"]'
    (given,) = parse_initial_credentials(text)
    assert password_matches("SCRAM-SHA-256", "pw", given.salt_password(random).stored)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("planted", "not of the form"),
        ("SCRAM-SHA-256=[name=a,password=planted", "not of the form"),
        ("PLAIN=[name=a,password=planted]", "for none of SCRAM-SHA-256, SCRAM-SHA-512"),
        ("SCRAM-SHA-256=[password=planted]", "part 1 has no name"),
        ("SCRAM-SHA-256=[name=a,password=planted,salt=,user=b]", "nothing else"),
        ("SCRAM-SHA-256=[name=a,name=b,password=planted]", "once"),
        ("SCRAM-SHA-256=[name=a]", "either a password or a saltedpassword"),
        ('SCRAM-SHA-256=[name=a,saltedpassword="cGxhbnRlZA=="]', "needs its salt"),
        ("SCRAM-SHA-256=[name=a,password=planted,iterations=100]", "4096 to 16384 iterations"),
        ("SCRAM-SHA-256=[name=a,password=planted];SCRAM-SHA-256=[name=a,password=x]", "twice"),
    ],
)
def test_a_mistake_is_refused_without_showing_the_text(text: str, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason) as refused:
        load_settings({"penstock.initial.scram.credentials": text}, {})
    assert "planted" not in str(refused.value)
