"""Scheduled delivery on a broker: movers on the leaders of source partitions, and schedule shards that store held
records and release them when they are due.
"""
