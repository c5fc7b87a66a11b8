"""Times as people write them. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from penstock.spark.option_values import wrong


def moment_ms(name: str, text: str) -> int | None:
    """Milliseconds since 1970, or a date with or without a time, which is of UTC where it does not say.

    None where nothing is given. Raises OptionError, which names the setting.
    """
    if not text:
        return None
    if re.fullmatch(r"\d{1,15}", text):
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise wrong(name, text, "must be a time such as 2026-03-01T12:00:00Z, or milliseconds") from None
    aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)
