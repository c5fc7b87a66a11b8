"""Partition replicas on this node: leading, following, appends, fetches, and the upkeep of their logs."""
