"""What only the leader does goes on when it dies: logs without a gap or a duplicate, and the best k checkpoints."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults.scenario import Scenario, check_equal, run
from tests.support.training import Fault


def csv_steps(folder: Path, name: str) -> list[int]:
    (path,) = folder.glob("csv/*/metrics.csv")
    with path.open(newline="") as stream:
        return [int(row["step"]) for row in csv.DictReader(stream) if row.get(name)]


def tensorboard_steps(folder: Path, name: str) -> list[int]:
    (run_folder,) = folder.glob("tb/*")
    steps: list[int] = []
    for path in run_folder.glob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        if name in events.Tags()["scalars"]:
            steps += [event.step for event in events.Scalars(name)]
    return steps


def check_logs(folder: Path, said: Any) -> None:
    """``train_loss`` of every step exactly once, ``val_loss`` once per epoch, in one run each."""
    for steps in (csv_steps, tensorboard_steps):
        for name, expected in (("train_loss", said.step), ("val_loss", said.epoch)):
            counts = Counter(steps(folder, name))
            assert not {step: n for step, n in counts.items() if n > 1}, (steps.__name__, name)
            assert len(counts) == expected, (steps.__name__, name, sorted(counts))
        assert sorted(steps(folder, "train_loss")) == list(range(said.step)), steps.__name__


OPTIONS: dict[str, Any] = {"validate": True, "checkpoint": True, "trainer": {"log_every_n_steps": 1}}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, "forward", 10),
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in [
                Fault(0, "committed", armed_at=("batch_start", 10)),
                Fault(0, "batch_end", 10),
                Fault(0, "validation", 1),
                Fault(0, "epoch_end", 1),
                Fault(0, "launch", 1, armed_at=("checkpoint", 1)),
                Fault(0, "launch", 0, armed_at=("sync_log", 1)),
            ]
        ),
    ],
    ids=lambda fault: f"{fault.point} {fault.step}",
)
def test_rank_0_dies_for_good(fault: Fault, tmp_path: Path) -> None:
    result = run(Scenario(faults=(fault,), epochs=3, loggers=str(tmp_path), **OPTIONS), replace=False)
    check_equal(result, 2)
    for said in result.values.values():
        assert len(said.extra["best"]) == 2
        assert said.extra["best"] == said.extra["on_disk"]
    check_logs(tmp_path, result.values[1])


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Fault(0, "forward", 10),), id="once"),
        pytest.param((Fault(0, "forward", 10), Fault(1, "forward", 100)), id="then rank 1", marks=pytest.mark.slow),
        pytest.param((Fault(0, "forward", 10), Fault(0, "forward", 100, generation=2)), id="twice", marks=pytest.mark.slow),
    ],
)
def test_rank_0_comes_back_and_leads_again(faults: tuple[Fault, ...], tmp_path: Path) -> None:
    scenario = Scenario(faults=faults, rejoins=len(faults), pace_s=0.01, loggers=str(tmp_path), **OPTIONS)
    result = run(scenario)
    check_equal(result, 3, replaced=len({fault.rank for fault in faults}))
    assert result.values[0].replacement
    for said in result.values.values():
        assert len(said.extra["best"]) == 2
        assert said.extra["best"] == said.extra["on_disk"]
    check_logs(tmp_path, result.values[1])
