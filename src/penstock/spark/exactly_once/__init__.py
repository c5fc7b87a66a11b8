"""Exactly-once writes: tasks prepare transactions, and the driver decides once which of them to commit."""
