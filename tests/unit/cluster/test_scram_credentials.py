"""SCRAM credentials: what AlterUserScramCredentials changes and refuses, with Kafka's errors."""

from itertools import count

import pytest

from penstock.cluster.controller.scram_credentials import (
    ScramDeletion,
    ScramResult,
    ScramUpsertion,
    alter_scram_credentials,
)
from penstock.cluster.image import ClusterImage
from penstock.cluster.image_snapshot import snapshot_records
from penstock.cluster.scram_secret import stored_scram_secret
from penstock.protocol.errors import ErrorCode
from penstock.protocol.scram import salted_password, scram_keys
from penstock.protocol.steps import finish

SHA_256, SHA_512 = 1, 2
SECRETS = (bytes((number,)) * 32 for number in count())
SALTED = salted_password("sha256", "pw", b"salt", 4096)
ALICE = ScramUpsertion("alice", SHA_256, 4096, b"salt", SALTED)


def changed(
    image: ClusterImage, deletions: list[ScramDeletion], upsertions: list[ScramUpsertion]
) -> tuple[ScramResult, ...]:
    decision = finish(alter_scram_credentials(image, deletions, upsertions, new_secret=next(SECRETS)))
    image.apply(decision.records)
    return decision.reply


def test_the_first_credential_makes_the_secret_of_the_cluster_which_stays() -> None:
    """Of users who do not exist, the salts follow from it: a change would show who they are."""
    image = ClusterImage()
    changed(image, [], [ALICE._replace(iterations=1)])
    assert stored_scram_secret(image) is None, "no user, no secret"
    changed(image, [], [ALICE])
    secret = stored_scram_secret(image)
    assert secret is not None
    changed(image, [], [ALICE._replace(user="bob")])
    changed(image, [ScramDeletion("alice", SHA_256), ScramDeletion("bob", SHA_256)], [])
    changed(image, [], [ALICE])
    assert stored_scram_secret(image) == secret
    loaded = ClusterImage()
    for batch in snapshot_records(image):
        loaded.apply(batch)
    assert stored_scram_secret(loaded) == secret


def test_set_replace_and_delete() -> None:
    image = ClusterImage()
    assert changed(image, [], [ALICE, ALICE._replace(user="bob")]) == (
        ScramResult("alice"),
        ScramResult("bob"),
    )
    stored = image.security.credentials["alice", SHA_256]
    keys = scram_keys("sha256", SALTED)
    assert (stored.stored_key, stored.server_key) == (keys.stored_key, keys.server_key)
    assert (stored.salt, stored.iterations) == (b"salt", 4096)
    changed(image, [], [ALICE._replace(iterations=8192), ALICE._replace(user="bob", mechanism=SHA_512)])
    assert image.security.credentials["alice", SHA_256].iterations == 8192
    assert changed(image, [ScramDeletion("alice", SHA_256)], []) == (ScramResult("alice"),)
    assert set(image.security.credentials) == {("bob", SHA_256), ("bob", SHA_512)}


@pytest.mark.parametrize(
    ("upsertion", "error", "message"),
    [
        (ALICE._replace(user=""), "unacceptable_credential", "Username must not be empty"),
        (ALICE._replace(user="x" * 1025), "unacceptable_credential", "at most 1024 bytes"),
        (ALICE._replace(user="a\0b"), "unacceptable_credential", "none of them 0"),
        (ALICE._replace(mechanism=0), "unsupported_sasl_mechanism", "Unknown SCRAM mechanism"),
        (ALICE._replace(mechanism=3), "unsupported_sasl_mechanism", "Unknown SCRAM mechanism"),
        (ALICE._replace(iterations=4095), "unacceptable_credential", "Too few iterations"),
        (ALICE._replace(iterations=-1), "unacceptable_credential", "Too few iterations"),
        (ALICE._replace(iterations=16_385), "unacceptable_credential", "Too many iterations"),
        (ALICE._replace(salt=b""), "unacceptable_credential", "salt"),
        (ALICE._replace(salt=b"x" * 1025), "unacceptable_credential", "salt"),
        (ALICE._replace(salted_password=b""), "unacceptable_credential", "salted password"),
        (ALICE._replace(salted_password=b"x" * 1025), "unacceptable_credential", "salted password"),
    ],
)
def test_what_is_refused(upsertion: ScramUpsertion, error: str, message: str) -> None:
    image = ClusterImage()
    carol = ALICE._replace(user="carol")
    good, refused = changed(image, [], [upsertion, carol])
    assert good == ScramResult("carol")
    assert (refused.user, refused.error) == (upsertion.user, ErrorCode[error])
    assert message in (refused.message or "")
    assert set(image.security.credentials) == {("carol", SHA_256)}


def test_deleting_what_does_not_exist() -> None:
    (refused,) = changed(ClusterImage(), [ScramDeletion("alice", SHA_256)], [])
    assert refused.error is ErrorCode.resource_not_found


@pytest.mark.parametrize("times", [2, 3])
def test_a_user_changes_once_in_a_request(times: int) -> None:
    image = ClusterImage()
    changed(image, [], [ALICE])
    deletion = ScramDeletion("alice", SHA_256)
    for deletions, upsertions in (
        ([deletion] * times, []),
        ([], [ALICE._replace(iterations=5000)] * times),
        ([deletion], [ALICE._replace(mechanism=SHA_512)] * (times - 1)),
    ):
        (refused,) = changed(image, deletions, upsertions)
        assert refused.error is ErrorCode.duplicate_resource
    assert image.security.credentials["alice", SHA_256].iterations == 4096


def test_a_credential_is_not_shown() -> None:
    assert "secret" not in repr(ALICE._replace(salted_password=b"secret"))
