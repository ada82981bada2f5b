"""What the benchmarks share: statistics, output, the machine's description, and the line between driver and ranks.

Imports neither torch nor lightning, so that ``--help`` is quick and the driver (which sends the signals) stays small.
What runs in the rank processes is in :mod:`._ranks`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import multiprocessing.connection
import os
import platform
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "JobFailed",
    "Peer",
    "Switchboard",
    "arguments",
    "dial",
    "emit",
    "free_port",
    "machine",
    "median_interval",
    "percentile",
    "progress",
    "run",
    "table",
]


# ---------------------------------------------------------------------------------------------- statistics
def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile (0..100) with linear interpolation; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """About 95 % confidence interval of the median, from order statistics (no distribution assumed)."""
    ordered = sorted(values)
    n = len(ordered)
    k = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return ordered[k], ordered[n - 1 - k]


# ---------------------------------------------------------------------------------------------- output
def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks have: ``--json`` and ``--quick``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of tables")
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it works, not how fast")
    return parser


def progress(text: str) -> None:
    """One line on stderr."""
    print(f"[{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where the figures come from: processor, cores, memory (GiB), versions, and the load before the run."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    versions = {}
    for package in ("torch", "lightning", "torchft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "load_average_before": [round(x, 2) for x in os.getloadavg()],
    }


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as a Markdown table; floats with four significant digits."""
    cells = [[_cell(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) if cells else len(c) for i, c in enumerate(columns)]
    lines = [columns, ["-" * w for w in widths], *cells]
    return "\n".join("| " + " | ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def emit(
    name: str,
    rows: Sequence[dict[str, Any]],
    summary: dict[str, Any],
    *,
    columns: Sequence[str],
    as_json: bool,
    where: dict[str, Any],
) -> None:
    """Prints the result on stdout: one JSON object (NaN becomes null), or a table and the summary."""
    if as_json:
        print(json.dumps(_plain({"name": name, "machine": where, "rows": list(rows), "summary": summary})))
        return
    print(f"{name} on {where['cores']} cores of {where['processor']}, load before {where['load_average_before'][0]}\n")
    print(table(rows, columns))
    print()
    for key, value in summary.items():
        print(f"{key}: {_cell(value)}")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark as a program; SIGTERM ends it like Ctrl-C, so that its jobs go with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def median(values: Iterable[float]) -> float:
    """The median; NaN of nothing."""
    found = list(values)
    return statistics.median(found) if found else math.nan


# ---------------------------------------------------------------------------------------------- driver and ranks
class JobFailed(RuntimeError):
    """The job under test ended or hung in the middle of the benchmark."""


@dataclasses.dataclass(eq=False)
class Peer:
    """A rank process at the other end of the line."""

    connection: Any
    job: str = ""
    rank: int = -1
    pid: int = 0

    def send(self, message: Any) -> None:
        self.connection.send(message)


class Switchboard:
    """The driver's end: ranks dial in, messages of all of them come out of one place; nobody ever polls.

    Args:
        folder: where the socket is made (``folder/line``).
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "line")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._peers: dict[Any, Peer] = {}
        self._watched: dict[int, str] = {}

    def watch(self, sentinel: int, name: str) -> None:
        """A process (its ``sentinel``, or a pidfd) that must not end while messages are awaited."""
        self._watched[sentinel] = name

    def receive(self, timeout: float) -> tuple[Peer, Any] | None:
        """The next message; message None: that process has gone.  None after ``timeout`` seconds of silence.

        Raises:
            JobFailed: a watched process has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([self._listener, *self._peers, *self._watched], left)
            if not ready:
                return None
            if ready[0] is self._listener:
                connection = multiprocessing.connection.Connection(self._listener.accept()[0].detach())
                self._peers[connection] = Peer(connection)
                continue
            if (ended := next((self._watched[x] for x in ready if x in self._watched), None)) is not None:
                raise JobFailed(f"{ended} ended in the middle of the benchmark")
            peer = self._peers[ready[0]]
            try:
                message = peer.connection.recv()
            except (EOFError, ConnectionResetError):
                del self._peers[peer.connection]
                peer.connection.close()
                return peer, None
            if peer.rank < 0:
                peer.job, peer.rank, peer.pid = message
                continue
            return peer, message

    def close(self) -> None:
        for connection in self._peers:
            connection.close()
        self._peers.clear()
        self._listener.close()


def dial(path: str, job: str, rank: int) -> Any:
    """A rank's end of the line: a connection with ``send`` and (blocking) ``recv``."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    connection = multiprocessing.connection.Connection(line.detach())
    connection.send((job, rank, os.getpid()))
    return connection
