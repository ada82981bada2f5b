"""From the kill to the next committed step of every survivor: within one second and one step."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from typing import Any

import pytest

from tests.support.job import is_replacement, record, run_job
from tests.support.training import Regression, loader, pl, quiet_trainer, weights_hash

KILL_AT = 40


def target() -> None:
    pl.seed_everything(1, verbose=False)
    commits: list[float] = []

    class Hook(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            transport = trainer.strategy._transport
            committed = transport._on_commit

            def stamp(ranks: tuple[int, ...]) -> None:
                commits.append(time.clock_gettime(time.CLOCK_MONOTONIC))
                committed(ranks)

            transport._on_commit = stamp

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 1 and trainer.global_step == KILL_AT and not is_replacement():
                record(("killed", time.clock_gettime(time.CLOCK_MONOTONIC)))
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = quiet_trainer(max_steps=90, max_epochs=-1, callbacks=[Hook()])
    model = Regression()
    trainer.fit(model, loader(4000))
    record(("survived", commits, weights_hash(model)))


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_survivor_commits_within_a_second_and_a_step(world_size: int) -> None:
    result = run_job(target, world_size, replace=False)
    assert result.code == 0, result.failure
    (killed,) = [value[1] for _, _, value in result.all_values if value[0] == "killed"]
    survivors = [value for _, _, value in result.all_values if value[0] == "survived"]
    assert len(survivors) == world_size - 1 and len({value[2] for value in survivors}) == 1
    for _, commits, _ in survivors:
        step = statistics.median(b - a for a, b in itertools.pairwise(commits))
        assert min(t for t in commits if t > killed) - killed < 1.0 + step
