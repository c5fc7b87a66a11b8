"""Load generators: what clients do, in which processes, and whether the broker kept what it acknowledged."""
