"""``cann_ft-final.ckpt``: a job that had to stop goes on from it without losing or repeating a sample."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lightning_cann.errors import FaultToleranceError
from tests.support.job import record, run_job
from tests.support.training import Regression, die, loader, quiet_trainer

SAMPLES = 80


class Watched(Regression):
    """Keeps the samples of the batches that were completed, as ``training_step`` saw them."""

    def __init__(self, dies_at: int | None) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.used: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.used += batch[0].tolist()
        record(self.used)
        if self.trainer.global_step == self.dies_at and os.environ["CANN_FT_RANK"] == "1":
            die(signal.SIGKILL)


def train(folder: str, dies_at: int | None, resume: bool) -> None:
    torch.manual_seed(0)
    trainer = quiet_trainer(default_root_dir=folder)
    try:
        trainer.fit(Watched(dies_at), loader(SAMPLES), ckpt_path=f"{folder}/cann_ft-final.ckpt" if resume else None)
    except FaultToleranceError:
        assert dies_at is not None
        raise


def fail_in_setup(folder: str) -> None:
    trainer = quiet_trainer(default_root_dir=folder, sync_batchnorm=True)
    trainer.fit(Regression(), loader(SAMPLES))


def test_a_stopped_job_resumes_with_every_sample_used_once(tmp_path: Path) -> None:
    first = run_job(train, 2, (str(tmp_path), 3, False), max_failures=0)
    assert first.code == 1 and "max_failures=0" in first.failure
    second = run_job(train, 2, (str(tmp_path), None, True))
    assert second.code == 0, second.failure
    used = Counter(sample for result in (first, second) for _, _, value in result.all_values for sample in value)
    assert used == Counter(range(SAMPLES))


def test_a_job_that_fails_before_its_first_step_leaves_an_earlier_file_alone(tmp_path: Path) -> None:
    final = tmp_path / "cann_ft-final.ckpt"
    final.write_bytes(b"of an earlier job")
    result = run_job(fail_in_setup, 2, (str(tmp_path),))
    assert result.code == 1 and "SyncBatchNorm" in result.failure
    assert final.read_bytes() == b"of an earlier job"
