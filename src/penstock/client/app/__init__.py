"""Delivery contracts for applications, on confluent-kafka: publish, subscribe, retry, dead letters."""
