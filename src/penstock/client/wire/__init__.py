"""The raw client: blocking connections that move record batches, without any third-party library."""
