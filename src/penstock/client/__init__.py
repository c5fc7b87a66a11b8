"""The client side: blocking connections to brokers of Penstock and Apache Kafka that move raw record batches.

Everything here belongs to one thread and one process, waits no longer than its deadline says, and imports neither a
broker nor a client library.
"""
