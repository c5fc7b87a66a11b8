"""Scheduled delivery in a node: movers beside the partitions that records come from, shards where they are held."""
