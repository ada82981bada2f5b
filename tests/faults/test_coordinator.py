"""The coordinator frozen: the agent ends it, and what happened meanwhile is recovered from."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.support.job import record, run_job
from tests.support.training import Fault, Regression, loader, pl, quiet_trainer, weights_hash


def target() -> None:
    pl.seed_everything(1, verbose=False)
    fault = Fault(1, "batch", 60)

    class Hook(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.02)  # the death falls into the freeze
            fault.at("batch", trainer.global_step)

    trainer = quiet_trainer(max_steps=120, max_epochs=-1, callbacks=[Hook()])
    model = Regression()
    trainer.fit(model, loader(240, shuffle=True))
    record((trainer.global_step, weights_hash(model)))


@pytest.mark.slow
def test_a_death_while_the_coordinator_is_frozen() -> None:
    agents: list[Any] = []
    frozen: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "view_installed" and not frozen:
            frozen.append(agents[0]._coordinator.pid)
            os.kill(frozen[0], signal.SIGSTOP)

    result = run_job(target, 3, on_event=on_event, on_agent=agents.append, replace=False, lease_s=1.0)
    assert result.code == 0, result.failure
    assert len(set(result.values.values())) == 1 and len(result.values) == 2
    assert [e["cause"] for e in result.named("member_failed")] == ["SIGKILL"]
