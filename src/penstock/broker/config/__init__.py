"""Settings of a node: their declarations, the values given at start, and the values changed at run time."""
