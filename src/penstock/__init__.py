"""Penstock: a durable, Kafka-compatible message queue in Python."""

__version__ = "0.6.0"
