"""What an operation hands back."""

from collections.abc import Hashable
from typing import NamedTuple

KeyValue = tuple[bytes, bytes | None]

#: Whatever the caller wants back beside the reply; a waiting request keeps it in the shard meanwhile.
Token = Hashable


class Work(NamedTuple):
    """Append the records as one, replay them, and give out the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[Token, object], ...] = ()
