"""The facts about the machine that a reader needs to judge the figures."""

import os
import platform
from pathlib import Path

import confluent_kafka


def machine_facts(data_dir: Path) -> dict[str, str | int]:
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores": os.cpu_count() or 0,
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "librdkafka": confluent_kafka.libversion()[0],
        "filesystem": _filesystem(data_dir),
    }


def _first_value(path: Path, key: str) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")


def _filesystem(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(inside)[1] if inside else "unknown"
