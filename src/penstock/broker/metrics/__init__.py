"""Metrics of a node: its counters, the Prometheus exposition, and the metrics that clients push."""
