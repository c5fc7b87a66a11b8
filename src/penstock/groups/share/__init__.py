"""Groups whose members share partitions: who is in one, what each reads, and which share partitions exist (KIP-932)."""
