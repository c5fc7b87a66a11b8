"""Bytes to messages and back: framing, message schemas, record batches, compression, errors."""

import sys

# kio imports Hypothesis wherever it is installed, only to register test strategies, which adds 0.15 s to every start.
# So Hypothesis is hidden while kio loads, unless the process has imported it already.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import kio.static.primitive  # noqa: F401
    finally:
        del sys.modules["hypothesis"]
