"""Fixtures of the partition tests."""

from tests.unit.broker.partition.full_disks import disk

__all__ = ["disk"]
