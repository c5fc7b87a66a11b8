"""The brokers that are measured, in processes of their own: Penstock, Apache Kafka and nats-server."""
