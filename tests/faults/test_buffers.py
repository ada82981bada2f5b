"""BatchNorm buffers follow the leader; a death in the middle of that leaves all survivors in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.job import record, run_job
from tests.support.training import Fault, Regression, loader, pl, quiet_trainer


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(16))


def target(fault: Fault) -> None:
    pl.seed_everything(1, verbose=False)

    class Hook(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 8 and fault.mine():
                fault.arm(trainer.strategy._runtime.group)  # the next launch is that of the buffers

    trainer = quiet_trainer(max_epochs=2, callbacks=[Hook()])
    model = Normed()
    trainer.fit(model, loader(240, shuffle=True), loader(24))
    record((trainer.global_step, [p.detach().clone() for p in model.parameters()]))


@pytest.mark.parametrize("launch", [0, 1], ids=["in the broadcast", "in the first bucket"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_around_the_broadcast_of_buffers(rank: int, launch: int) -> None:
    result = run_job(target, 3, (Fault(rank, "launch", launch),), replace=False)
    assert result.code == 0, result.failure
    (one, other) = result.values.values()
    assert one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
