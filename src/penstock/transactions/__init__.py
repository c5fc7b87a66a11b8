"""The rules of the transaction coordinator, free of I/O."""
