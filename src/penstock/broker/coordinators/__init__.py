"""The coordinators of a broker: groups, transactions, share groups and the schedule, on one runtime."""
