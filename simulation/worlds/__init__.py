"""The workloads that run in a simulated cluster, one module each."""
