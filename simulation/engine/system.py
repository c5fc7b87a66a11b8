"""Virtual system calls: in a simulated process, time, chance, threads, syncs and the end of a process are virtual.

The shipped code calls `time.monotonic`, `uuid4` or `os.fdatasync` as always. While a simulation runs, these names lead
to functions that look up the simulated process which is running. Outside of simulated processes they do what they
always do.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import pkgutil
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, cast

import penstock
import penstock.broker.controller.topic_creation
import penstock.broker.environment
import penstock.log.data_directory
import penstock.log.flush
import penstock.log.log_manager
from penstock.cluster.controller.create_topics import Randomness
from penstock.log import data_directory
from simulation.engine.loop import CURRENT, Process, ProcessEnded, VirtualLoop
from simulation.engine.network import Network

#: Wall clocks begin here, in seconds since the epoch.
WALL_EPOCH_S: Final = 1_750_000_000
_THREAD_S: Final = (0.000_1, 0.002)
_BROKER_PACKAGES: Final = (
    "broker", "cluster", "groups", "log", "protocol", "raft", "replication", "scheduling", "transactions",
)  # fmt: skip


def preload() -> None:
    """Import all that a node may import later, so that no import takes part in a run."""
    for package in _BROKER_PACKAGES:
        found = importlib.import_module(f"penstock.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)


class ThreadPool:
    """Runs calls one by one on the event loop, after a moment; their results arrive another moment later."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        loop = _loop()
        process = CURRENT.get()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except ProcessEnded:
                raise
            except BaseException as error:
                loop.call_later(loop.between(*_THREAD_S), future.set_exception, error)
            else:
                loop.call_later(loop.between(*_THREAD_S), future.set_result, result)

        disk = None if process is None else process.machine.disk
        loop.call_later(loop.between(*_THREAD_S) if disk is None else disk.sync_seconds(), run)
        return future

    def shutdown(self, wait: bool = True) -> None: ...


class ImmediateThreadPool:
    """Runs calls at once, for code that waits for the results of its threads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> ImmediateThreadPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, call: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
        return [call(*each) for each in zip(*arguments, strict=False)]


# -- the simulation that runs now ----------------------------------------------------------------------

_running: VirtualLoop | None = None
_thread: int | None = None


def _loop() -> VirtualLoop:
    assert _running is not None
    return _running


def _process() -> Process | None:
    """Return the simulated process that is running; None outside of simulations."""
    return CURRENT.get() if _running is not None and threading.get_ident() == _thread else None


def _require_life(process: Process) -> None:
    if process.is_over:
        raise ProcessEnded


# -- virtual system calls ------------------------------------------------------------------------------


def _monotonic() -> float:
    return _real_monotonic() if _process() is None else _loop().now


def _monotonic_ns() -> int:
    return _real_monotonic_ns() if _process() is None else int(_loop().now * 1e9)


def _perf_counter() -> float:
    return _real_perf_counter() if _process() is None else _loop().now


def _time() -> float:
    process = _process()
    return _real_time() if process is None else _loop().now + WALL_EPOCH_S + process.machine.clock_skew_s


def _time_ns() -> int:
    return _real_time_ns() if _process() is None else int(_time() * 1e9)


def _uuid4() -> uuid.UUID:
    if _process() is None:
        return _real_uuid4()
    return uuid.UUID(int=random.getrandbits(128), version=4)


def _sync(real: Callable[[int], None], descriptor: int) -> None:
    process = _process()
    if process is None:
        real(descriptor)
        return
    _require_life(process)
    process.machine.disk.synced(descriptor)


def _fsync(descriptor: Any) -> None:
    _sync(_real_fsync, descriptor)


def _fdatasync(descriptor: Any) -> None:
    _sync(_real_fdatasync, descriptor)


def _pwrite(descriptor: int, data: Any, offset: int) -> int:
    process = _process()
    if process is not None:
        _require_life(process)
        process.machine.disk.require_space()
    return _real_pwrite(descriptor, data, offset)


def _open(*args: Any, **kwargs: Any) -> int:
    process = _process()
    if process is None:
        return _real_open(*args, **kwargs)
    _require_life(process)
    descriptor = _real_open(*args, **kwargs)
    process.descriptors.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    process = _process()
    if process is not None:
        _require_life(process)
        process.descriptors.discard(descriptor)
    _real_close(descriptor)


def _exit(status: int) -> None:
    process = _process()
    if process is None:
        _real_exit(status)
    else:
        process.on_exit()
        raise ProcessEnded


def _boot_id(source: Any = None) -> str | None:
    process = _process()
    if process is None:
        return _real_boot_id() if source is None else _real_boot_id(source)
    return f"boot-{process.machine.disk.boots}"


def _begin_writeback(descriptor: int) -> None: ...


_real_monotonic, _real_monotonic_ns = time.monotonic, time.monotonic_ns
_real_perf_counter, _real_time, _real_time_ns = time.perf_counter, time.time, time.time_ns
_real_uuid4 = uuid.uuid4
_real_fsync, _real_fdatasync, _real_pwrite = os.fsync, os.fdatasync, os.pwrite
_real_open, _real_close, _real_exit = os.open, os.close, os._exit
_real_boot_id = data_directory.current_boot_id

#: Modules, the name of what is replaced there, and the replacement.
_SYSTEM: Final[tuple[tuple[Any, str, Any], ...]] = (
    (time, "monotonic", _monotonic),
    (time, "monotonic_ns", _monotonic_ns),
    (time, "perf_counter", _perf_counter),
    (time, "time", _time),
    (time, "time_ns", _time_ns),
    (uuid, "uuid4", _uuid4),
    (os, "fsync", _fsync),
    (os, "fdatasync", _fdatasync),
    (os, "pwrite", _pwrite),
    (os, "open", _open),
    (os, "close", _close),
    (os, "_exit", _exit),
    (data_directory, "current_boot_id", _boot_id),
    (penstock.broker.controller.topic_creation, "_RANDOMNESS", Randomness(random.randrange, _uuid4)),
    (penstock.log.flush, "begin_writeback", _begin_writeback),
    (penstock.broker.environment, "ThreadPoolExecutor", ThreadPool),
    (penstock.log.log_manager, "ThreadPoolExecutor", ImmediateThreadPool),
)


@contextmanager
def simulated(loop: VirtualLoop, network: Network, seed: int) -> Iterator[None]:
    """Replace system calls while a simulation runs in this thread."""
    global _running, _thread
    assert _running is None, "one simulation at a time"
    gc.disable()  # collecting what a killed process left behind would run its `finally` blocks
    chance = random.getstate()
    replaced = list(_replacements())
    for owner, name, _, replacement in replaced:
        setattr(owner, name, replacement)
    _running, _thread = loop, threading.get_ident()
    random.seed(seed)
    asyncio.set_event_loop(loop)
    vars(loop).update(create_server=_create_server(network), create_connection=_create_connection(network))
    try:
        yield
    finally:
        _running = _thread = None
        random.setstate(chance)
        asyncio.set_event_loop(None)
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)


def _replacements() -> Iterator[tuple[Any, str, Any, Any]]:
    """Modules that have imported a function by name have a reference of their own."""
    by_original: dict[int, Any] = {}
    for owner, name, replacement in _SYSTEM:
        original = getattr(owner, name)
        yield owner, name, original, replacement
        if owner not in (penstock.broker.environment, penstock.log.log_manager):
            by_original[id(original)] = replacement
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("penstock."):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_original and callable(value):
                yield module, name, value, by_original[id(value)]


def _create_server(network: Network) -> Callable[..., Any]:
    async def create_server(factory: Any, host: Any = None, port: int = 0, **_: Any) -> Any:
        found = host if isinstance(host, str) else next(iter(cast("Iterable[str | bytes]", host)))
        name = found.decode() if isinstance(found, bytes) else found
        return network.listen(factory, (name, port))

    return create_server


def _create_connection(network: Network) -> Callable[..., Any]:
    async def create_connection(factory: Any, host: str, port: int, **_: Any) -> Any:
        return await network.connect(factory, (host, port))

    return create_connection


def close_descriptors(process: Process) -> None:
    """What the kernel does when a process ends."""
    descriptors, process.descriptors = process.descriptors, set()
    for descriptor in descriptors:
        _real_close(descriptor)
