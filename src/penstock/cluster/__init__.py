"""Metadata records, the image built from them, and controller decisions. Pure: no I/O, no clock."""
