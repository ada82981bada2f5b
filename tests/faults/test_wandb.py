"""After the death of rank 0 the same W&B run goes on, without a gap or a duplicated step (offline)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_cann.plugins.wandb_sink import _wandb_history
from tests.support.job import record, run_job
from tests.support.training import Fault, Regression, loader, pl, quiet_trainer, weights_hash

STEPS = 30


def target(fault: Fault, folder: str) -> None:
    from lightning.pytorch.loggers import WandbLogger

    pl.seed_everything(1, verbose=False)

    class Hook(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            fault.at("batch", trainer.global_step)

    logger = WandbLogger(project="test", save_dir=folder, offline=True)
    trainer = quiet_trainer(max_epochs=3, logger=logger, log_every_n_steps=1, callbacks=[Hook()])
    model = Regression()
    trainer.fit(model, loader(80, drop_last=True))
    record((trainer.global_step, weights_hash(model)))


@pytest.mark.slow
def test_the_run_goes_on_when_rank_0_dies(tmp_path: Path) -> None:
    result = run_job(target, 2, (Fault(0, "batch", STEPS // 2), str(tmp_path)), replace=False)
    assert result.code == 0, result.failure
    (said,) = result.values.values()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({os.path.basename(path) for path in files}) == 1, "two directories of one run ID"
    rows, steps = Counter(), Counter()
    for path in files:
        for row, step, columns in _wandb_history(str(path)):
            rows[row] += 1
            if "train_loss" in columns:
                steps[step] += 1
    assert sorted(steps) == list(range(said[0])) and set(steps.values()) == {1}
    assert set(rows.values()) == {1}
