"""Side-by-side measurements of Penstock and, when its jars can be had, Apache Kafka."""
