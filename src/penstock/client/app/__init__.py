"""The application layer: publish and subscribe under a delivery contract, on confluent-kafka."""
