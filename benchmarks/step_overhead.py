"""Healthy step time of ``strategy="cann_ft"`` against Lightning's ``ddp`` (gloo): what fault tolerance costs.

    python -m benchmarks.step_overhead [--json] [--quick]

Both jobs are alive at once, with the same model, data and seed, one torch thread per process.  They run short blocks of
steps in turns (A B, B A, ...), the idle one blocked on a socket: whatever else the machine does meets both alike.
A row is one cell (model, processes): the median of the paired ratios of the blocks' median step times, its 95 %
confidence interval and its quartiles; and the same for processor time per step, which is steadier on a busy machine.
``--control`` compares ``ddp`` with itself: how far from 1 the machine alone gets.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from benchmarks._common import (
    JobFailed,
    Peer,
    Switchboard,
    arguments,
    emit,
    free_port,
    machine,
    median,
    median_interval,
    percentile,
    progress,
    run,
)

__all__ = ["main", "summarize"]

COLUMNS = (
    "model", "processes", "pairs", "ddp_step_ms", "cann_ft_step_ms", "ratio", "ratio_low", "ratio_high",
    "ratio_p25", "ratio_p75", "cpu_ratio",
)  # fmt: skip
# model -> (pairs of blocks, measured steps per block), full and quick
PLAN = {"gpt-1M": ((60, 15), (8, 8)), "mlp-25M": ((24, 4), (3, 2))}
WARM_UP = 6
PATIENCE_S = 300.0


class _Cell:
    """Two jobs side by side, in turns."""

    def __init__(self, folder: str, model: str, world_size: int, steps: int, jobs: tuple[str, str]) -> None:
        from benchmarks import _ranks

        self.jobs, self.world_size = jobs, world_size
        self.board = Switchboard(folder)
        self.peers: dict[str, dict[int, Peer]] = {job: {} for job in jobs}
        self.processes: list[Any] = []
        try:
            for job in jobs:
                args = (job, self.board.path, model, world_size, WARM_UP, steps)
                if job == "cann_ft":
                    self.processes.append(_ranks.start_agent(world_size, {}, _ranks.blocks_rank, args))
                else:
                    self.processes += _ranks.start_ddp(world_size, free_port(), _ranks.blocks_rank, args)
                for process in self.processes:
                    self.board.watch(process.sentinel, process.name)
                self.collect(job)  # one starts after the other: its warm-up is not measured, but let it be quiet
        except BaseException:
            self.abort()
            raise

    def collect(self, job: str) -> list[Any]:
        """What all ranks of ``job`` report next."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < self.world_size:
            received = self.board.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                raise JobFailed(f"{job}: only {len(found)} of {self.world_size} ranks answered in {PATIENCE_S} s")
            peer, message = received
            if message is None:
                raise JobFailed(f"{peer.job}: rank {peer.rank} ended in the middle of the benchmark")
            self.peers[peer.job][peer.rank] = peer
            found[peer.rank] = message
        return list(found.values())

    def block(self, job: str, steps: int) -> tuple[float, float]:
        """Median step time (seconds, of the ranks' mean) and processor seconds per step and rank."""
        for peer in self.peers[job].values():
            peer.send(steps + 2)  # the first interval begins with the wake-up of the processes
        reports = self.collect(job)
        each = [sum(times) / len(times) for times in zip(*(r[0][1:] for r in reports), strict=True)]
        return median(each), sum(r[1] for r in reports) / len(reports)

    def finish(self) -> None:
        for job in self.jobs:
            for peer in self.peers[job].values():
                peer.send(0)
        for process in self.processes:
            process.join(60)
        self.abort()

    def abort(self) -> None:
        """Ends what is still there; the agent's end takes its ranks along."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.board.close()


def measure(model: str, world_size: int, pairs: int, steps: int, jobs: tuple[str, str]) -> dict[str, Any]:
    """One row.  ``jobs``: the baseline and what is compared with it."""
    with tempfile.TemporaryDirectory(prefix="cann-bench-") as folder:
        cell = _Cell(folder, model, world_size, WARM_UP + (pairs + 2) * (steps + 3), jobs)
        times: dict[str, list[tuple[float, float]]] = {job: [] for job in jobs}
        try:
            for number in range(pairs + 1):
                for job in jobs if number % 2 else jobs[::-1]:
                    result = cell.block(job, steps)
                    if number:  # the first pair warms up
                        times[job].append(result)
                if number % max(1, pairs // 4) == 0:
                    progress(f"{model}, {world_size} processes: {number} of {pairs} pairs")
            cell.finish()
        except BaseException:
            cell.abort()
            raise
    base, ours = times[jobs[0]], times[jobs[1]]
    ratios = [b[0] / a[0] for a, b in zip(base, ours, strict=True)]
    low, high = median_interval(ratios)
    return {
        "model": model,
        "processes": world_size,
        "pairs": pairs,
        "steps_per_block": steps,
        "compared": f"{jobs[1]} / {jobs[0]}",
        "ddp_step_ms": median(a for a, _ in base) * 1e3,
        "cann_ft_step_ms": median(b for b, _ in ours) * 1e3,
        "ratio": median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "ratio_p25": percentile(ratios, 25),
        "ratio_p75": percentile(ratios, 75),
        "cpu_ratio": median(b[1] / a[1] for a, b in zip(base, ours, strict=True)),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """``worst_median_ratio`` over the cells; the goal is at most 1.00, the limit 1.03."""
    worst = max(row["ratio"] for row in rows)
    return {
        "worst_median_ratio": worst,
        "worst_cpu_ratio": max(row["cpu_ratio"] for row in rows),
        "goal_met": worst <= 1.00,
        "limit_met": worst <= 1.03,
    }


def main(argv: list[str] | None = None) -> int:
    parser = arguments("step_overhead", "Healthy step time of strategy='cann_ft' against Lightning ddp (gloo).")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--models", nargs="+", choices=list(PLAN), default=list(PLAN), help="models (default: all)")
    parser.add_argument("--control", action="store_true", help="compare ddp with ddp: what the machine's noise does")
    options = parser.parse_args(argv)
    where = machine()
    jobs = ("ddp", "ddp again" if options.control else "cann_ft")
    rows = []
    for model in options.models:
        pairs, steps = PLAN[model][1 if options.quick else 0]
        for world_size in options.processes:
            rows.append(measure(model, world_size, pairs, steps, jobs))
            progress(f"{model}, {world_size} processes: ratio {rows[-1]['ratio']:.3f}")
    summary = summarize(rows)
    emit("step_overhead", rows, summary, columns=COLUMNS, as_json=options.json, where=where)
    return 0


if __name__ == "__main__":
    run(main)
