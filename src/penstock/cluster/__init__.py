"""Metadata records, the cluster image that they build, and the controller's decisions. Pure: no I/O, no clock."""
