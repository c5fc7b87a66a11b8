"""AlterUserScramCredentials: which credentials of users change. Each user of a request changes or not by itself."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import MetadataRecord
from penstock.cluster.rare_records import RemoveUserScramCredentialRecord, UserScramCredentialRecord
from penstock.cluster.scram_secret import missing_scram_secret
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.scram import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SCRAM_HASHES,
    SCRAM_MECHANISMS_BY_ID,
    scram_keys,
)
from penstock.protocol.steps import Steps

#: Every node keeps these in memory.
_NAME_BYTES_MAX: Final = 1_024
_SALT_BYTES_MAX: Final = 1_024
_SALTED_PASSWORD_BYTES_MAX: Final = 1_024


class ScramDeletion(NamedTuple):
    user: str
    mechanism: int


class ScramUpsertion(NamedTuple):
    user: str
    mechanism: int
    iterations: int
    salt: bytes
    salted_password: bytes

    def __repr__(self) -> str:
        return f"ScramUpsertion({self.user!r}, {self.mechanism}, {self.iterations} iterations)"


class ScramResult(NamedTuple):
    user: str
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def alter_scram_credentials(
    image: ClusterImage,
    deletions: Sequence[ScramDeletion],
    upsertions: Sequence[ScramUpsertion],
    *,
    new_secret: bytes,
) -> Steps[Decision[tuple[ScramResult, ...]]]:
    """`new_secret` becomes the secret of the cluster if it has none: users who do not exist must not be told apart."""
    records: dict[str, MetadataRecord] = {}
    refused: dict[str, ScramResult] = {}

    def decide(user: str, change: Callable[[], MetadataRecord]) -> None:
        if user in refused:
            return
        try:
            if records.pop(user, None) is not None:
                raise ApiError(
                    ErrorCode.duplicate_resource,
                    "A user credential cannot be altered twice in the same request",
                )
            records[user] = change()
        except ApiError as error:
            refused[user] = ScramResult(user, error.code, error.message)

    for deletion in deletions:
        decide(deletion.user, lambda deletion=deletion: _deleted(image, deletion))  # type: ignore[misc]
        yield
    for upsertion in upsertions:
        decide(upsertion.user, lambda upsertion=upsertion: _upserted(upsertion))  # type: ignore[misc]
        yield
    secret = missing_scram_secret(image, new_secret) if records else ()
    return Decision((*records.values(), *secret), (*map(ScramResult, records), *refused.values()))


def _deleted(image: ClusterImage, deletion: ScramDeletion) -> MetadataRecord:
    _check_name_and_mechanism(deletion.user, deletion.mechanism)
    if (deletion.user, deletion.mechanism) not in image.security.credentials:
        raise ApiError(
            ErrorCode.resource_not_found, "Attempt to delete a user credential that does not exist"
        )
    return RemoveUserScramCredentialRecord(name=deletion.user, mechanism=deletion.mechanism)


def _upserted(upsertion: ScramUpsertion) -> MetadataRecord:
    _check_name_and_mechanism(upsertion.user, upsertion.mechanism)
    if upsertion.iterations < ITERATIONS_MIN:
        raise _unacceptable("Too few iterations")
    if upsertion.iterations > ITERATIONS_MAX:
        raise _unacceptable("Too many iterations")
    if not 0 < len(upsertion.salt) <= _SALT_BYTES_MAX:
        raise _unacceptable(f"The salt must have 1 to {_SALT_BYTES_MAX} bytes")
    if not 0 < len(upsertion.salted_password) <= _SALTED_PASSWORD_BYTES_MAX:
        raise _unacceptable(f"The salted password must have 1 to {_SALTED_PASSWORD_BYTES_MAX} bytes")
    digest = SCRAM_HASHES[SCRAM_MECHANISMS_BY_ID[upsertion.mechanism]]
    keys = scram_keys(digest, upsertion.salted_password)
    return UserScramCredentialRecord(
        name=upsertion.user,
        mechanism=upsertion.mechanism,
        salt=upsertion.salt,
        stored_key=keys.stored_key,
        server_key=keys.server_key,
        iterations=upsertion.iterations,
    )


def _check_name_and_mechanism(user: str, mechanism: int) -> None:
    if not user:
        raise _unacceptable("Username must not be empty")
    if len(user.encode()) > _NAME_BYTES_MAX or "\0" in user:
        raise _unacceptable(f"Username must have at most {_NAME_BYTES_MAX} bytes, and none of them 0")
    if mechanism not in SCRAM_MECHANISMS_BY_ID:
        raise ApiError(ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism")


def _unacceptable(message: str) -> ApiError:
    return ApiError(ErrorCode.unacceptable_credential, message)
