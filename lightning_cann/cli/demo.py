"""``cann-train demo``: train with four processes, kill one on the way, and show that nothing was lost.

The training is a child process, an ordinary ``cann-train fit`` of ``configs/byte_lm.yaml`` with its output folder set.
This process only watches: it follows the event log, sends one SIGKILL, and at the end reads what the run left behind.
It needs a source checkout (the example is not part of the installed package).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from lightning_cann.cli.report import Run, plot, read_run, table
from lightning_cann.errors import ConfigurationError
from lightning_cann.metrics.events import EventTail

__all__ = ["main", "run_config", "verdict"]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "byte_lm.yaml"
POLL_S = 0.1  # how often the event log is looked at


def main(argv: Sequence[str]) -> int:
    """Entry point of ``cann-train demo``.

    Returns:
        0 if the failure was survived, the replacement joined, no sample was lost and all weights agree; else 1.
    """
    parser = argparse.ArgumentParser(prog="cann-train demo", description="Kill a rank of a running training.")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder for runs/<timestamp> (default: runs)")
    parser.add_argument("--kill-rank", type=int, default=2, help="logical rank to kill (default: 2)")
    parser.add_argument("--kill-step", type=int, default=60, help="optimizer step after which to kill it (default: 60)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until the demo gives up (default: 600)")
    parser.add_argument("overrides", nargs="*", help="after `--`: further arguments of `cann-train fit`")
    arguments = parser.parse_args(list(argv))
    if not CONFIG.is_file():
        raise ConfigurationError(f"the demo needs a source checkout: {CONFIG} is not there; clone it, `make demo`")

    folder = (arguments.output / time.strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(run_config(yaml.safe_load(CONFIG.read_text()), folder), sort_keys=False))

    _say(f"training with 4 processes; run folder {folder}")
    watch = _Watch(folder, kill_rank=arguments.kill_rank, kill_step=arguments.kill_step)
    code = _train(config, arguments.overrides, watch, deadline=time.monotonic() + arguments.timeout)
    if not watch.log.is_file():
        _say(f"the training ended with exit code {code} and wrote no event log")
        return 1
    run = read_run(watch.log)
    print(f"\n{table(run, _files(run, watch.log))}\n")
    problems = verdict(run, code)
    for problem in problems:
        _say(f"NOT as it should be: {problem}")
    return 1 if problems else 0


def run_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``config`` with every output folder inside ``folder``."""
    strategy = config["trainer"]["strategy"]
    log = {"event_log": str(folder / "events.jsonl")}
    trainer = {
        **config["trainer"],
        "default_root_dir": str(folder),
        "strategy": {**strategy, "init_args": {**strategy["init_args"], **log}},
    }
    for kind, key, place in (("logger", "save_dir", folder), ("callbacks", "dirpath", folder / "checkpoints")):
        trainer[kind] = [
            {**one, "init_args": {**one["init_args"], key: str(place)}} if key in one.get("init_args", {}) else one
            for one in trainer[kind]
        ]
    return {**config, "trainer": trainer}


def verdict(run: Run, exit_code: int) -> list[str]:
    """What the demo promised and the run did not keep; empty if all is well."""
    problems = []
    if exit_code:
        problems.append(f"the training ended with exit code {exit_code}")
    if not run.failures:
        problems.append("no failure was recorded")
    if sum(len(recovery.failures) for recovery in run.recoveries()) < len(run.failures):
        problems.append("a failure was not recovered from")
    lost = {failure["rank"] for failure in run.failures}
    first = min((failure["time"] for failure in run.failures), default=0.0)
    if lost - {joined["rank"] for joined in run.select("member_joined") if joined["time"] > first}:
        problems.append("a replacement did not join before the end")
    if run.weights_identical() is not True:
        problems.append("weights are not known to be identical on all ranks")
    audit = run.audit()
    if audit is None:
        problems.append("the samples were not audited")
    elif audit["missing"] or audit["duplicates"]:
        problems.append(f"{audit['missing']} samples lost, {audit['duplicates']} seen twice")
    return problems


class _Watch:
    """Follows a run's files and kills one rank once training is under way.  (The agent tells the events.)"""

    def __init__(self, folder: Path, *, kill_rank: int, kill_step: int) -> None:
        self.log = folder / "events.jsonl"
        self.metrics = folder / "csv" / "metrics.csv"
        self.kill_rank, self.kill_step = kill_rank, kill_step
        self.killed = False
        self._tail = EventTail(self.log)
        self._pids: dict[int, int] = {}
        self._start = time.monotonic()

    def look(self) -> None:
        """Read what is new; kill if it is time."""
        for event in self._tail.read():
            if event["event"] == "member_started":
                self._pids[event["rank"]] = event["pid"]
            elif event["event"] == "member_failed":
                self._pids.pop(event["rank"], None)
        pid = self._pids.get(self.kill_rank)
        if not self.killed and pid is not None and self._step() >= self.kill_step:
            self.killed = True
            _say(f"kill -9 {pid} (rank {self.kill_rank}, {time.monotonic() - self._start:.0f} s after the start)")
            with suppress(ProcessLookupError):  # it ended by itself in this moment: its event will tell
                os.kill(pid, signal.SIGKILL)

    def _step(self) -> int:
        """Last step in metrics.csv; -1 before there is one."""
        try:
            lines = self.metrics.read_text().split("\n")[:-1]  # a line that is being written is left out
        except FileNotFoundError:
            return -1
        if len(lines) < 2:
            return -1
        cells = lines[-1].split(",")
        column = lines[0].split(",").index("step")
        return int(float(cells[column])) if len(cells) > column and cells[column] else -1


def _train(config: Path, overrides: Sequence[str], watch: _Watch, *, deadline: float) -> int:
    """Run the training to its end, looking on; returns its exit code.  The child never outlives this call."""
    previous = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    child = subprocess.Popen([*_command(config), *overrides], cwd=ROOT, env=_child_environment())
    try:
        while True:
            try:
                code = child.wait(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                watch.look()
                if time.monotonic() > deadline:
                    _say("the time given with --timeout is over; stopping the training")
                    return _stop(child)
            else:
                watch.look()
                return code
    finally:
        _stop(child)
        signal.signal(signal.SIGTERM, previous)


def _command(config: Path) -> list[str]:
    return [sys.executable, "-m", "lightning_cann.cli", "fit", "--config", str(config)]


def _child_environment() -> Mapping[str, str]:
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 4)),  # four ranks share the cores
        "PYTHONUNBUFFERED": "1",
        "WANDB_SILENT": "true",
        "PYTHONWARNINGS": "ignore:`isinstance(treespec",  # Lightning 2.6 with torch 2.13: nothing a user can do
    }
    return {**defaults, **os.environ}


def _stop(child: subprocess.Popen[bytes]) -> int:
    """End the child if it still runs: asked first, forced after 40 seconds (the agent takes up to 30)."""
    if child.poll() is None:
        child.terminate()
        try:
            return child.wait(timeout=40)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait()


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _files(run: Run, log: Path) -> dict[str, Path]:
    files = {"event log": log}
    wandb = sorted(run.folder.glob("wandb/offline-run-*"))
    if wandb:
        files["W&B (offline)"] = wandb[-1]
    if run.metrics:
        files["metrics"] = next(iter(sorted(run.folder.rglob("metrics.csv"))))
    if run.curve("train_loss")[0]:
        files["picture"] = plot(run, run.folder / "loss.png")
    return files


def _say(line: str) -> None:
    """Print a line of its own, also while a progress bar owns the current one."""
    clear = "\r\x1b[K" if sys.stdout.isatty() else ""
    print(f"{clear}demo: {line}", flush=True)
