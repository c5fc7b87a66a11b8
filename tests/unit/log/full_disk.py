"""Runs in a process of its own, where a limit on file sizes simulates a full disk."""

import resource
import sys
from pathlib import Path

import pytest
from tests.unit.log.helpers import append, fill, open_log, values_in

from penstock.protocol.errors import ApiError, ErrorCode


def main(folder: Path) -> None:
    log = open_log(folder / "t-0")
    fill(log, 10)
    limit = log.size_bytes + 50
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for _ in range(3):
        with pytest.raises(ApiError) as refused:
            append(log, bytes(100))
        assert refused.value.code is ErrorCode.kafka_storage_error
    assert log.active_segment.path.stat().st_size == log.size_bytes
    assert len(values_in(log)) == 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    append(log, b"space again")
    log.abandon()
    assert values_in(open_log(folder / "t-0"))[10:] == [b"space again"]
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
