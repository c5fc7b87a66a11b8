"""Bytes <-> messages: framing, headers, record batches, compression, errors."""
