"""Requests over plain sockets: frames that are encoded once and patched, connections, and payloads."""
