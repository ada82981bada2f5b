"""``cann-train report EVENTS.jsonl``: tells a run from what it left behind, without torch and without Lightning.

It reads the event log, the metrics of Lightning's CSVLogger and the ``weights-rank*.json`` files (see
``examples/byte_lm/callbacks.py``) in the same folder, prints a table, and draws the loss with the events marked.
What was not recorded is called so: the report claims nothing that it has not read.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_cann.errors import ConfigurationError
from lightning_cann.metrics.events import Event, describe, read_events

__all__ = ["Recovery", "Run", "main", "plot", "read_run", "table"]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Failures that one view answered."""

    failures: list[Event]
    view: int
    time: float
    """Unix seconds at which the last survivor reported."""
    latency_s: float
    """Longest latency that a survivor measured, in seconds."""


@dataclass(kw_only=True)
class Run:
    """Everything that was read of one run."""

    folder: Path
    events: list[dict[str, Any]]
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Rows of metrics.csv; each holds only the columns that have a value."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """Contents of weights-rank*.json, by rank."""

    def select(self, kind: str) -> list[dict[str, Any]]:
        """All events called ``kind``, in order."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def failures(self) -> list[dict[str, Any]]:
        return self.select("member_failed")

    def recoveries(self) -> list[Recovery]:
        """Recoveries in order; failures that nothing answered are in none."""
        pending: list[Event] = []
        found: list[Recovery] = []
        for event in self.events:
            if event["event"] == "member_failed":
                pending.append(event)
            elif event["event"] == "recovered":
                mine, time, latency = pending, event["time"], float(event["latency_s"])
                if not pending:  # a further survivor reports the same view, or a view that answers no failure
                    if not found or found[-1].view != event["view"]:
                        continue
                    last = found.pop()
                    mine, latency = last.failures, max(latency, last.latency_s)
                found.append(Recovery(failures=mine, view=event["view"], time=time, latency_s=latency))
                pending = []
        return found

    def world_size(self) -> int | None:
        """Ranks of the job; where the log does not say it, the size of the largest view."""
        told = [event["world_size"] for event in self.select("job_started")]
        return max(told or [event["size"] for event in self.select("view_installed")], default=None)

    def steps(self) -> int | None:
        """Optimizer steps of the run, from the best source there is."""
        counts = [result["step"] for result in self.results]
        counts += [event["steps"] for event in self.select("job_finished") if "steps" in event]
        counts = counts or [int(row["step"]) + 1 for row in self.metrics if "step" in row]
        return max(counts, default=None)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric."""
        rows = [(row["step"], row[name]) for row in self.metrics if name in row and "step" in row]
        return [step for step, _ in rows], [value for _, value in rows]

    def step_at(self, time: float) -> float | None:
        """The step that ran at a unix time, from the ``unix_time`` column; None without one."""
        steps, times = self.curve("unix_time")
        points = sorted(zip(times, steps, strict=True))
        if not points:
            return None
        before = [point for point in points if point[0] <= time]
        after = [point for point in points if point[0] > time]
        if not before or not after:
            return after[0][1] if after else before[-1][1]
        (t0, s0), (t1, s1) = before[-1], after[0]
        return s0 + (s1 - s0) * (time - t0) / (t1 - t0)

    def weights_identical(self) -> bool | None:
        """Whether every rank of the world recorded the same hash; None if none recorded any."""
        if not self.results:
            return None
        everyone = self.world_size() or len(self.results)
        return len(self.results) == everyone and len({result["sha256"] for result in self.results}) == 1

    def audit(self) -> dict[str, int] | None:
        """Samples ``expected, consumed, missing, duplicates`` over all epochs (None: the strategy kept no account)."""
        accounts = [list(result["data_audit"].values()) for result in self.results if result.get("data_audit")]
        keys = ("expected", "consumed", "missing", "duplicates")
        counts = [{key: sum(epoch[key] for epoch in epochs) for key in keys} for epochs in accounts]
        # Each rank works the account out for itself; the worst one is the honest answer.
        return max(counts, key=lambda audit: audit["missing"] + audit["duplicates"], default=None)


def read_run(events: Path, metrics: Path | None = None) -> Run:
    """Read a run from its event log and the files beside it.

    Raises:
        ConfigurationError: The event log or the given metrics file does not exist.
        ValueError: A file is damaged.
    """
    if not events.is_file():
        raise ConfigurationError(f"no event log at {events}: give the events.jsonl of a run")
    if metrics is not None and not metrics.is_file():
        raise ConfigurationError(f"--metrics {metrics}: no such file; leave it out to look beside the event log")
    folder = events.parent
    metrics = metrics or next(iter(sorted(folder.rglob("metrics.csv"))), None)
    return Run(
        folder=folder,
        events=read_events(events),
        metrics=list(_read_csv(metrics)) if metrics else [],
        results=sorted(
            (json.loads(file.read_text()) for file in folder.glob("weights-rank*.json")), key=lambda one: one["rank"]
        ),
    )


def _read_csv(path: Path) -> Iterator[dict[str, float]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield {key: float(value) for key, value in row.items() if key and value}


def table(run: Run, files: Mapping[str, Path] | None = None) -> str:
    """The run as aligned text; ``files`` are shown at the end (label to path)."""
    recoveries = run.recoveries()
    answered = sum(len(recovery.failures) for recovery in recoveries)
    rows: list[tuple[str, str]] = [("ranks", _say(run.world_size())), ("optimizer steps", _say(run.steps()))]
    rows.append(("failures survived", f"{answered} of {len(run.failures)}" if run.failures else "0 (none happened)"))
    for recovery in recoveries:
        causes = ", ".join(describe(failure) for failure in recovery.failures)
        rows.append((f"recovery, view {recovery.view}", f"{recovery.latency_s:.3f} s ({causes})"))
    for joined in run.select("member_joined"):
        before = [one["time"] for one in run.failures if one["rank"] == joined["rank"] and one["time"] < joined["time"]]
        if before:  # else it is there from the start
            rows.append(("replacement", f"{describe(joined)}, {joined['time'] - before[-1]:.1f} s after the failure"))
    audit = run.audit()
    if audit is None:
        rows.append(("samples lost", "not audited: the strategy kept no account"))
    else:
        rows.append(("samples lost", f"{audit['missing']} of {audit['expected']}"))
        rows.append(("samples seen twice", str(audit["duplicates"])))
    told = f"{len(run.results)} of {run.world_size() or len(run.results)} ranks compared"
    identical = {True: f"yes ({told})", False: f"NO ({told})", None: "not recorded"}[run.weights_identical()]
    rows.append(("weights identical", identical))
    for name in ("train_loss", "val_loss"):
        values = run.curve(name)[1]
        if values:
            rows.append((name, f"{values[0]:.3f} -> {values[-1]:.3f}"))
    rows += [(label, str(path)) for label, path in (files or {}).items()]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


MARKS = {"member_failed": "tab:red", "member_joined": "tab:green"}
"""Events drawn into the picture, with their colours."""


def plot(run: Run, path: Path) -> Path:
    """Draw loss and number of members over steps into a PNG; returns ``path``.

    Raises:
        ConfigurationError: matplotlib is missing, or there are no metrics to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("the picture needs matplotlib: pip install 'lightning-cann[demo]'") from error
    if not run.curve("train_loss")[0]:
        raise ConfigurationError(f"no train_loss in a metrics.csv under {run.folder}: give the file with --metrics")

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, members = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for name, style in (("train_loss", {"linewidth": 1.0}), ("val_loss", {"marker": "o", "linestyle": "--"})):
        steps, values = run.curve(name)
        if steps:
            loss.plot(steps, values, label=name, **style)
    for event in run.events:
        step = run.step_at(event["time"]) if event["event"] in MARKS else None
        if step is not None:
            colour = MARKS[event["event"]]
            loss.axvline(step, color=colour, linewidth=1.2, alpha=0.8, label=describe(event))
    loss.set_ylabel("loss (nats per byte)")
    loss.legend(fontsize=8)
    _draw_members(run, members)
    members.set_xlabel("optimizer step")
    figure.suptitle("Training through failures")
    figure.savefig(path, dpi=120)
    return path


def _draw_members(run: Run, axes: Any) -> None:
    views = [(run.step_at(event["time"]), event["size"]) for event in run.select("view_installed")]
    points = [(step, size) for step, size in views if step is not None]
    if points:
        last = run.curve("train_loss")[0][-1]
        points.append((max(last, points[-1][0]), points[-1][1]))
        axes.step([step for step, _ in points], [size for _, size in points], where="post", color="black")
        most = run.world_size() or max(size for _, size in points)
        axes.set_ylim(0, most + 0.5)
        axes.set_yticks(range(0, most + 1, max(1, most // 4)))
    axes.set_ylabel("members")


def main(argv: Sequence[str]) -> int:
    """Entry point of ``cann-train report``."""
    parser = argparse.ArgumentParser(prog="cann-train report", description="Tell a run from its event log.")
    parser.add_argument("events", type=Path, metavar="EVENTS.jsonl", help="event log of the run")
    parser.add_argument("--metrics", type=Path, help="metrics.csv (default: the first one beside the event log)")
    parser.add_argument("--png", type=Path, help="where to draw (default: loss.png beside the event log)")
    arguments = parser.parse_args(list(argv))
    run = read_run(arguments.events, arguments.metrics)
    files = {}
    if run.curve("train_loss")[0]:
        files["picture"] = plot(run, arguments.png or run.folder / "loss.png")
    print(table(run, files))
    return 0


def _say(value: Any) -> str:
    return "not recorded" if value is None else str(value)
