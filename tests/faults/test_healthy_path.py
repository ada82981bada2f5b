"""Vote-free: while nobody fails, a step costs its gradient buckets and not one message more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cann.membership import messages as m
from lightning_cann.strategies import FaultTolerantStrategy
from tests.support.job import record, run_job
from tests.support.training import Regression, loader, quiet_trainer

STEPS = 50


class Counting(Regression):
    """Counts what goes over the wire between batch 5 and batch 5 + STEPS."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        if buffers:
            self.net.insert(1, torch.nn.BatchNorm1d(16))
        self.counts: dict[str, int] = {}
        self.heard: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        group, link = strategy._group, strategy._group._link
        now = {"collectives": group.collectives, "sent": group.messages_sent, "transactions": group.state.done}
        if batch_idx == 5:
            self.counts = {name: -n for name, n in now.items()}
            handle, send = link._handle, link.send
            self.wire: list[str] = []

            def handled(message: m.Message) -> None:
                self.heard.append(type(message).__name__)
                handle(message)

            def sent(message: m.Message) -> bool:
                self.wire.append(type(message).__name__)
                return send(message)

            link._handle, link.send = handled, sent
        elif batch_idx == 5 + STEPS:
            self.counts = {name: n + now[name] for name, n in self.counts.items()}
            self.counts["buckets"] = len(strategy._reducer.layout.buckets)
            record({**self.counts, "heard": list(self.heard), "wire": sorted(set(self.wire))})


def train(buffers: bool, options: dict[str, Any]) -> None:
    strategy = FaultTolerantStrategy(**{"divergence_every_n_steps": 0, "bucket_cap_mb": 0.0005, **options})
    trainer = quiet_trainer(strategy=strategy, max_steps=STEPS + 8)
    trainer.fit(Counting(buffers), loader(3 * 4 * (STEPS + 10)))


@pytest.mark.parametrize(
    ("buffers", "options", "more"),
    [
        pytest.param(False, {}, 0, id="nothing switched on"),
        pytest.param(True, {}, STEPS, id="buffers: one broadcast per step", marks=pytest.mark.slow),
        pytest.param(True, {"broadcast_buffers": False}, 0, id="buffers not synchronised", marks=pytest.mark.slow),
        pytest.param(False, {"divergence_every_n_steps": 10}, STEPS // 10, id="weights compared", marks=pytest.mark.slow),
    ],
)
def test_messages_of_a_healthy_step(buffers: bool, options: dict[str, Any], more: int) -> None:
    result = run_job(train, 3, (buffers, options))
    assert result.code == 0, result.failure
    assert sorted(result.values) == [0, 1, 2]
    for rank, counts in result.values.items():
        assert counts["buckets"] > 1
        assert counts["collectives"] == STEPS * counts["buckets"] + more, (rank, counts)
        broadcasts = more if buffers else 0  # of buffers: they are no transactions, for they are never redone
        assert counts["transactions"] == STEPS + more - broadcasts, (rank, counts)
        assert counts["sent"] == 0, (rank, counts)
        assert counts["heard"] == [], (rank, counts)
        assert counts["wire"] in ([], ["Beat"]), (rank, counts)
