"""Group coordination as state machines: classic, consumer, share and streams groups, and committed offsets.

Pure: no I/O, no clock.
"""
