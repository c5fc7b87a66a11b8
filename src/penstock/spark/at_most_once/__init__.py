"""At-most-once delivery: the driver claims offsets before tasks read them, and each task runs at most once."""
