"""Bytes to messages and back: framing, message schemas, record batches, compression, errors."""

import sys

# kio imports Hypothesis wherever it is installed, only to register test strategies: 0.15 s of a start that
# should take a blink. It is hidden while kio loads, unless the process uses it already.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
