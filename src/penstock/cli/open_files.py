"""As many open files as the system lets us have: a partition has several, and shells allow 1,024."""

import resource

__all__ = ["raise_limit"]


def raise_limit() -> None:
    """For this process and those that it starts."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
