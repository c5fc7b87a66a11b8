"""The secret of the cluster from which the salts of SCRAM users who do not exist follow.

It is made with the first credential and stays. It is kept like a setting, of a kind of resource that no request can
name: nodes of older versions keep such a setting, too, where a record of a new kind would stop them.
"""

from __future__ import annotations

from typing import Final

from penstock.cluster.image import ClusterImage, ConfigResource
from penstock.cluster.metadata_records import ConfigRecord

SCRAM_SECRET_BYTES: Final = 32
#: The kinds that requests name are powers of two.
_RESOURCE: Final = ConfigResource(127, "scram")
_NAME: Final = "secret"


def stored_scram_secret(image: ClusterImage) -> bytes | None:
    text = image.configs.get(_RESOURCE, {}).get(_NAME)
    return None if text is None else bytes.fromhex(text)


def missing_scram_secret(image: ClusterImage, random: bytes) -> tuple[ConfigRecord, ...]:
    """Return the record that makes the secret, unless there is one."""
    if stored_scram_secret(image) is not None:
        return ()
    kind, name = _RESOURCE
    return (ConfigRecord(resource_type=kind, resource_name=name, name=_NAME, value=random.hex()),)
