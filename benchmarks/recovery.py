"""From the death of a rank to the survivors' next committed step, and what a rejoin costs; against a torchrun restart.

    python -m benchmarks.recovery [--json] [--quick]

``cann_ft``: one job per model.  Cycle after cycle a rank (0 included, in turn) gets SIGKILL or SIGSTOP at a random
moment; its replacement joins; the next cycle begins.  Figures of a cycle, by CLOCK_MONOTONIC, which processes share:

* *recovery*: signal to the first step committed in a view without the victim, at the slowest survivor.  SIGSTOP
  includes the lease (``--lease``, 1 s here; the strategy's default is 2 s), after which a silent member is excluded.
* *rejoin*: signal to the first step that the replacement took part in.  Replacements are forked from a fork server
  that has imported everything: a script that is started anew needs its imports too (training goes on meanwhile).
* *stall*: longest step of a survivor from recovery to a little after the rejoin, less the median step before.

``torchrun``: the same model under DDP (gloo) in a plain loop, rank 0 saves with torch.save every 10 steps, all resume
from it after a restart (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: without it most restarts fail).  *Recovery* is signal
to the first step completed after the restart, redone or not; *progress* to the first step not done before.

``torchft``, if it can be imported: see :mod:`._torchft`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import _torchft
from benchmarks._common import JobFailed, Peer, Switchboard, arguments, emit, machine, median, percentile, progress, run

__all__ = ["cycle_figures", "main", "summarize"]

COLUMNS = (
    "system", "model", "processes", "signal", "cycles", "step_s", "recovery_p50_s", "recovery_p95_s", "recovery_max_s",
    "progress_p50_s", "rejoin_p50_s", "stall_p50_s", "stall_max_s",
)  # fmt: skip
# model -> cycles per signal of ours, kills of torchrun; full and quick
PLAN = {"mlp-85k": ((20, 6), (3, 1)), "mlp-25M": ((20, 4), (2, 1))}
PATIENCE_S = 180.0
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


class _Ranks:
    """The rank processes of a job as the driver knows them: who holds which rank now."""

    def __init__(self, board: Switchboard, world_size: int) -> None:
        self.board, self.world_size = board, world_size
        self.holders: dict[int, Peer] = {}
        self._told: dict[str, dict[int, tuple[int, Any]]] = {}

    def wait(self, kind: str, ranks: set[int], not_pids: set[int]) -> dict[int, Any]:
        """Until new processes (other than ``not_pids``) of all ``ranks`` have told ``kind``; what they told.

        Raises:
            JobFailed: they did not within PATIENCE_S.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            told = {r: m for r, (pid, m) in self._told.get(kind, {}).items() if r in ranks and pid not in not_pids}
            if len(told) == len(ranks):
                return told
            if not self._take(deadline):
                raise JobFailed(f"ranks {sorted(ranks - set(told))} did not come back within {PATIENCE_S:.0f} s")

    def run_on(self, seconds: float) -> None:
        """Lets the job run for a while."""
        deadline = time.monotonic() + seconds
        while self._take(deadline):
            pass

    def _take(self, deadline: float) -> bool:
        received = self.board.receive(max(0.0, deadline - time.monotonic()))
        if received is None:
            return False
        peer, message = received
        if message is not None:
            self.holders[peer.rank] = peer
            self._told.setdefault(message[0], {})[peer.rank] = (peer.pid, message[1:])
        return True

    def pids(self) -> set[int]:
        return {peer.pid for peer in self.holders.values()}


# ---------------------------------------------------------------------------------------------- cann_ft
def cycle_figures(
    survivors: dict[int, list[tuple[float, int]]], killed_at: float, joined_at: float, view: int
) -> dict[str, float]:
    """Figures of one cycle (seconds).

    Args:
        survivors: rank -> (time, view) of each of its committed steps, in order, some of them from before the signal.
        killed_at, joined_at: the signal; the end of the replacement's first step.
        view: the view that the signal broke.

    Raises:
        JobFailed: a survivor committed nothing in a later view.
    """
    recovered, steady, longest = [], [], []
    for rank, stamps in survivors.items():
        after = next((t for t, v in stamps if v > view and t > killed_at), None)
        if after is None:
            raise JobFailed(f"rank {rank} committed no step after view {view}")
        recovered.append(after - killed_at)
        gaps = [(a, b - a) for (a, _), (b, _) in itertools.pairwise(stamps)]
        steady += [gap for start, gap in gaps if start + gap <= killed_at]
        longest.append(max((gap for start, gap in gaps if start >= after), default=0.0))
    step = median(steady)
    return {
        "step": step,
        "recovery": max(recovered),
        "rejoin": joined_at - killed_at,
        "stall": max(0.0, max(longest) - step),
    }


def measure_ours(model: str, world_size: int, cycles: int, lease_s: float, seed: int) -> list[dict[str, Any]]:
    """Two rows: SIGKILL and SIGSTOP, in turns within one job."""
    from benchmarks import _ranks

    draw = random.Random(seed)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIGNALS}
    failure = ""
    with tempfile.TemporaryDirectory(prefix="cann-bench-") as folder:
        with contextlib.closing(Switchboard(folder)) as board:
            path = os.path.join(folder, "ours.stamps")
            stamps = _ranks.Stamps(path, world_size)
            args = (board.path, path, model, world_size, lease_s)
            agent = _ranks.start_agent(world_size, {"lease_s": lease_s}, _ranks.recovery_rank, args)
            board.watch(agent.sentinel, "the agent")
            try:
                ranks = _Ranks(board, world_size)
                ranks.wait("first", set(range(world_size)), set())
                ranks.run_on(3.0)
                for number in range(2 * cycles):
                    name = list(SIGNALS)[number % 2]
                    figures = _cycle(ranks, stamps, number // 2 % world_size, SIGNALS[name], draw)
                    found[name].append(figures)
                    text = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
                    progress(f"cann_ft, {model}, {name} {number // 2 + 1} of {cycles}: {text}")
                stamps.stop[0] = stamps.latest.max() + 100
                agent.join(60)
            except JobFailed as error:
                failure = str(error)
                progress(f"cann_ft, {model}: {failure}")
            finally:
                agent.kill()  # its end takes the ranks along
                agent.join()
    return [
        {
            "system": "cann_ft",
            "model": model,
            "processes": world_size,
            "signal": name,
            "lease_s": lease_s,
            **_statistics(figures),
            **({"failure": failure} if failure else {}),
        }
        for name, figures in found.items()
    ]


def _cycle(ranks: _Ranks, stamps: Any, victim: int, number: int, draw: random.Random) -> dict[str, float]:
    step = _recent_step(stamps, (victim + 1) % ranks.world_size)
    ranks.run_on(max(0.3, 6 * step) + draw.random() * step)  # the signal falls anywhere in a step
    first = {r: int(stamps.latest[r]) for r in range(ranks.world_size)}
    view, pids = int(stamps.view[victim, first[victim]]), ranks.pids()
    killed_at = time.monotonic()
    os.kill(ranks.holders[victim].pid, number)
    _, joined_at, _ = ranks.wait("first", {victim}, pids)[victim]
    ranks.run_on(max(0.3, 4 * step))
    survivors = {}
    for rank in set(range(ranks.world_size)) - {victim}:
        span = slice(max(1, first[rank] - 30), int(stamps.latest[rank]) + 1)
        pairs = zip(stamps.time[rank, span].tolist(), stamps.view[rank, span].tolist(), strict=True)
        # what a rank wrote at these steps before it died and came back is not there: it has written since
        survivors[rank] = [(t, v) for t, v in pairs if v >= view]
    return cycle_figures(survivors, killed_at, joined_at, view)


def _recent_step(stamps: Any, rank: int) -> float:
    last = int(stamps.latest[rank])
    times = stamps.time[rank, max(1, last - 10) : last + 1].tolist()
    return median(b - a for a, b in itertools.pairwise(times))


# ---------------------------------------------------------------------------------------------- torchrun
def measure_torchrun(model: str, world_size: int, kills: int, seed: int) -> dict[str, Any]:
    """One row: SIGKILL of one rank after the other under ``torchrun --max-restarts``."""
    from benchmarks import _ranks

    draw = random.Random(seed)
    found: list[dict[str, float]] = []
    failure = ""
    with tempfile.TemporaryDirectory(prefix="cann-bench-") as folder:
        with contextlib.closing(Switchboard(folder)) as board:
            stamps = _ranks.Stamps(os.path.join(folder, "torchrun.stamps"), world_size)
            ranks, everyone = _Ranks(board, world_size), set(range(world_size))
            job = _start_torchrun(folder, model, world_size, kills)
            pidfd = os.pidfd_open(job.pid)
            board.watch(pidfd, "torchrun")
            try:
                ranks.wait("first", everyone, set())
                for number in range(kills):
                    ranks.run_on(2.0)
                    step = _recent_step(stamps, 0)
                    ranks.run_on((13 + 10 * draw.random()) * step)  # a checkpoint is there; anywhere between two
                    pids, killed_at = ranks.pids(), time.monotonic()
                    os.kill(ranks.holders[number % world_size].pid, signal.SIGKILL)
                    firsts = ranks.wait("first", everyone, pids)
                    pasts = ranks.wait("past", everyone, pids)
                    figures = {
                        "step": step,
                        "recovery": max(m[1] for m in firsts.values()) - killed_at,
                        "progress": max(m[1] for m in pasts.values()) - killed_at,
                    }
                    found.append(figures)
                    text = ", ".join(f"{key} {value:.3f}" for key, value in figures.items())
                    progress(f"torchrun, {model}, SIGKILL {number + 1} of {kills}: {text}")
            except JobFailed as error:
                failure = str(error)
                tail = Path(folder, "torchrun.log").read_text(errors="replace").splitlines()[-5:]
                progress(f"torchrun, {model}: {failure}; its last words: {' / '.join(tail)}")
            finally:
                os.close(pidfd)
                _end_session(job, ranks.pids())
    return {
        "system": "torchrun",
        "model": model,
        "processes": world_size,
        "signal": "SIGKILL",
        **_statistics(found),
        **({"failure": failure} if failure else {}),
    }


def _start_torchrun(folder: str, model: str, world_size: int, restarts: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(world_size)),
        *("--max-restarts", str(restarts + 2), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("--local-addr", "127.0.0.1", "-m", "benchmarks._ranks", folder, model),
    ]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with open(os.path.join(folder, "torchrun.log"), "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _end_session(job: subprocess.Popen[bytes], workers: set[int]) -> None:
    """Nothing is measured any more: torchrun ends its workers when it is asked to; what is left then is killed."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- figures
def _statistics(cycles: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"cycles": len(cycles), "step_s": median(c["step"] for c in cycles)}
    for key in ("recovery", "progress", "rejoin", "stall"):
        values = [c[key] for c in cycles if key in c]
        if values:
            row[f"{key}_p50_s"], row[f"{key}_p95_s"] = percentile(values, 50), percentile(values, 95)
            row[f"{key}_max_s"] = max(values)
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the first (smallest) model, the same with a suffix for the others, and whether the goals are met."""
    summary: dict[str, Any] = {}
    models = list(dict.fromkeys(row["model"] for row in rows))
    met = []
    for model in models:
        suffix = "" if model == models[0] else f"_{model.rpartition('-')[2].lower()}"
        row = {(r["system"], r["signal"]): r for r in rows if r["model"] == model}
        kill, freeze, peer = (
            row.get(key, {}) for key in (("cann_ft", "SIGKILL"), ("cann_ft", "SIGSTOP"), ("torchrun", "SIGKILL"))
        )
        nan = float("nan")
        step = kill.get("step_s", nan)
        p50, p95 = kill.get("recovery_p50_s", nan), kill.get("recovery_p95_s", nan)
        theirs = peer.get("recovery_p50_s", nan)
        speedup = theirs / p50
        summary |= {
            f"kill_p50_s{suffix}": p50,
            f"kill_p95_s{suffix}": p95,
            f"freeze_p50_s{suffix}": freeze.get("recovery_p50_s", nan),
            f"step_s{suffix}": step,
            f"rejoin_p50_s{suffix}": kill.get("rejoin_p50_s", nan),
            f"rejoin_stall_s{suffix}": kill.get("stall_p50_s", nan),
            f"torchrun_kill_p50_s{suffix}": theirs,
            f"torchrun_progress_p50_s{suffix}": peer.get("progress_p50_s", nan),
            f"speedup_vs_torchrun{suffix}": speedup,
        }
        met.append(p50 <= 0.1 + step and p95 <= 0.3 + step and not speedup < 20)
    summary["goals_met"] = all(met)
    summary["failures"] = sum("failure" in row for row in rows)
    return summary


def main(argv: list[str] | None = None) -> int:
    parser = arguments("recovery", "Death of a rank to the survivors' next committed step; rejoin; against torchrun.")
    parser.add_argument("--models", nargs="+", choices=list(PLAN), default=list(PLAN), help="models (default: all)")
    parser.add_argument("--processes", type=int, default=3, help="ranks of a job (default: 3)")
    parser.add_argument("--cycles", type=int, help="cycles per signal (default: 20)")
    parser.add_argument("--torchrun-kills", type=int, help="kills under torchrun; 0: leave it out")
    parser.add_argument("--lease", type=float, default=1.0, help="lease of the job under test (seconds; default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the signals")
    options = parser.parse_args(argv)
    where, rows = machine(), []
    for model in options.models:
        cycles, kills = PLAN[model][1 if options.quick else 0]
        cycles = cycles if options.cycles is None else options.cycles
        kills = kills if options.torchrun_kills is None else options.torchrun_kills
        if cycles:
            rows += measure_ours(model, options.processes, cycles, options.lease, options.seed)
        if kills:
            rows.append(measure_torchrun(model, options.processes, kills, options.seed))
            if _torchft.available():
                outcome = _torchft.measure_torchft(model, options.processes, kills, options.seed)
                rows.append(
                    {
                        "system": "torchft",
                        "model": model,
                        "processes": options.processes,
                        "signal": "SIGKILL",
                        **(_statistics(outcome["found"]) if outcome["found"] else {"cycles": 0}),
                        **({"failure": f"{outcome['failed']} of {kills} jobs"} if outcome["failed"] else {}),
                    }
                )
    emit("recovery", rows, summarize(rows), columns=COLUMNS, as_json=options.json, where=where)
    return 0


if __name__ == "__main__":
    run(main)
