"""How a field of a metadata record is declared for kio's serializers."""

from dataclasses import MISSING, field
from typing import Any, ClassVar


class MetadataRecord:
    """What kio needs to know of a record; all of them have been flexible from their first version."""

    __slots__ = ()
    __api_key__: ClassVar[int]
    __version__: ClassVar[int] = 0
    #: The oldest version with the same layout, tagged fields aside.
    __readable_from__: ClassVar[int] = 0
    __flexible__: ClassVar[bool] = True


class Struct:
    """A structure inside a record."""

    __slots__ = ()
    __version__: ClassVar[int] = 0
    __flexible__: ClassVar[bool] = True


def wire(kafka_type: str, *, default: object = MISSING, tag: int | None = None) -> Any:
    """A dataclass field with its type on the wire; a tagged one is written only when not its default."""
    assert tag is None or default is not MISSING
    metadata = {"kafka_type": kafka_type} if tag is None else {"kafka_type": kafka_type, "tag": tag}
    return field(default=default, metadata=metadata)
