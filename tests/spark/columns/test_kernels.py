"""Kernels compile without a cache, and are ready in processes that are forked after a preload."""

import os

import pytest
from numba.core.caching import CacheImpl

from penstock.spark import columns
from penstock.spark.columns import kernels


def test_kernels_compile_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @kernels.kernel
    def double(number: int) -> int:
        return number * 2

    assert double(21) == 42


def test_after_a_preload_everything_is_compiled() -> None:
    columns.preload()
    compiled = [kernels.scan, kernels.read_headers, kernels.measure, kernels.gather]
    compiled += [kernels.split_batches, kernels.write, kernels.partition]
    for kernel in compiled:
        # There is one signature each. A second one would be compiled in the middle of a query.
        assert len(kernel.signatures) == 1, kernel  # type: ignore[attr-defined]


def test_a_forked_process_uses_preloaded_kernels() -> None:
    columns.preload()
    child = os.fork()
    if child == 0:
        columns.preload()
        os._exit(0 if len(kernels.scan.signatures) == 1 else 1)  # type: ignore[attr-defined]
    assert os.waitpid(child, 0)[1] == 0
