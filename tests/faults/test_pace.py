"""Members and replacements validate, end epochs and stop at the same batches, though epochs change their length."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.job import record, run_job
from tests.support.training import Fault, Regression, loader, pl, quiet_trainer, weights_hash


def target(faults: tuple[Fault, ...], interval: float | int, limit: float | int) -> None:
    pl.seed_everything(1, verbose=False)
    validated: list[int] = []

    class Hook(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)  # a step that takes some time, so that the replacement is back in the middle of an epoch
            for fault in faults:
                fault.at("batch", trainer.global_step)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            validated.append(trainer.global_step)

    options = {"val_check_interval": interval, "limit_train_batches": limit, "max_epochs": 4}
    trainer = quiet_trainer(callbacks=[Hook()], **options)
    model = Regression()
    trainer.fit(model, loader(600, shuffle=True), loader(24))
    record((trainer.global_step, trainer.current_epoch, weights_hash(model), validated, trainer.val_check_batch))


CASES = [
    pytest.param(0.5, 1.0, id="half epochs"),
    pytest.param(1.0, 1.0, id="epochs", marks=pytest.mark.slow),
    pytest.param(7, 1.0, id="every 7 batches", marks=pytest.mark.slow),
    pytest.param(0.25, 40, id="quarters of a limited epoch", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("interval", "limit"), CASES)
def test_validation_stays_in_step(interval: float | int, limit: float | int) -> None:
    faults = (Fault(1, "batch", 20), Fault(0, "batch", 70))
    result = run_job(target, 3, (faults, interval, limit))
    assert result.code == 0, result.failure
    assert len(result.named("member_joined")) == 2
    assert not [e for e in result.named("member_failed") if "SIGABRT" in e["cause"]]
    values = list(result.values.values())
    assert len({value[:3] for value in values}) == 1
    longest = max((value[3] for value in values), key=len)
    for value in values:  # a replacement has seen the last of them
        assert not value[3] or longest[-len(value[3]) :] == value[3]
    assert len({value[4] for value in values}) == 1


def by_the_clock() -> None:
    pl.seed_everything(1, verbose=False)
    validated: list[int] = []

    class Hook(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.03 + 0.005 * trainer.global_rank)  # ranks whose clocks alone would disagree

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            validated.append(trainer.global_step)

    trainer = quiet_trainer(callbacks=[Hook()], val_check_interval="00:00:00:01")
    model = Regression()
    trainer.fit(model, loader(480, shuffle=True), loader(24))
    record((trainer.global_step, weights_hash(model), tuple(validated)))


@pytest.mark.slow
def test_validation_by_the_clock_is_at_the_same_step_everywhere() -> None:
    result = run_job(by_the_clock, 2)
    assert result.code == 0, result.failure
    (said,) = set(result.values.values())
    assert len(said[2]) >= 1
