"""The Spark side under measurement: our source and sinks beside Spark's own Kafka connector and Parquet."""
