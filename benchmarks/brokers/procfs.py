"""What a broker costs, from /proc: CPU time and memory of a process and everything below it."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_tree(root_pid: int) -> list[int]:
    pids, waiting = [], [root_pid]
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        waiting += _children(pid)
    return pids


def cpu_seconds(root_pid: int) -> float:
    """User plus system time of the tree, children that have ended and were waited for included."""
    return sum(_stat_ticks(pid) for pid in process_tree(root_pid)) / _TICKS_PER_S


def machine_cpu_seconds() -> float:
    """Everything that any process or interrupt has run for; idle, waiting and stolen time left out."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, _first_line(Path("/proc/stat")).split()[1:]
    )
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def memory_bytes(root_pid: int) -> tuple[int, int]:
    """Resident and proportional set size of the tree."""
    rollups = [_rollup(pid) for pid in process_tree(root_pid)]
    return sum(r["Rss"] for r in rollups), sum(r["Pss"] for r in rollups)


def _first_line(path: Path) -> str:
    return path.read_text().partition("\n")[0]


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, task.read_text().split())
    return children


def _stat_ticks(pid: int) -> int:
    # The command name may hold spaces and parentheses, so count the fields after the last one.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def _rollup(pid: int) -> dict[str, int]:
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes
