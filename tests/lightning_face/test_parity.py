"""While nobody fails, ``cann_ft`` is Lightning's ``ddp``: losses, weights and optimizer states of 50 steps, bit for bit.

gloo's sum depends on the bucket layout, on where the mean is taken and on the order of samples: all three must be DDP's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.lightning_face.sides import Observed, Side, assert_same, observe, run_ddp, run_ours
from tests.support.training import Points

BATCH, STEPS, EPOCHS = 4, 50, 2


class Net(Observed):
    """A regression whose body a case chooses."""

    def __init__(self, net: torch.nn.Module, lr: float = 1e-2) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.saw(torch.nn.functional.mse_loss(self.net(batch[1]), batch[2]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Branches(torch.nn.Module):
    """One of its branches is used in each forward, in turn; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 16)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 1) for _ in range(3))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return self.heads[self.turn % 2](self.body(x).relu())


def mlp(*inner: torch.nn.Module, width: int = 16) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, width), *inner, torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
    )


def points(side: Side) -> Points:
    return Points(STEPS // EPOCHS * BATCH * side.world_size)


def train(side: Side, net: torch.nn.Module, *, loader: dict[str, Any] | None = None, unused: bool = False,
          **options: Any) -> dict[str, Any]:  # fmt: skip
    data = DataLoader(points(side), batch_size=BATCH, **(loader or {}))
    model = Net(net)
    trainer = side.trainer(unused, max_epochs=EPOCHS, **options)
    trainer.fit(model, data)
    assert len(model.losses) == STEPS
    return observe(trainer, model)


def plain(side: Side) -> dict[str, Any]:
    """Lightning shuffles the training data of distributed runs unless the user brings a DistributedSampler."""
    return train(side, mlp())


def unshuffled(side: Side) -> dict[str, Any]:
    sampler = DistributedSampler(points(side), side.world_size, side.rank, shuffle=False)
    return train(side, mlp(), loader={"sampler": sampler}, use_distributed_sampler=False)


def shuffled(side: Side) -> dict[str, Any]:
    return train(side, mlp(), loader={"shuffle": True})


def dropout(side: Side) -> dict[str, Any]:
    """Random numbers too are drawn as under DDP."""
    return train(side, mlp(torch.nn.Dropout(0.3)))


def accumulated(side: Side) -> dict[str, Any]:
    return train(side, mlp(), accumulate_grad_batches=2)


def accumulated_uneven(side: Side) -> dict[str, Any]:
    """25 batches an epoch in windows of 4: the last window has one."""
    return train(side, mlp(), accumulate_grad_batches=4)


def bf16(side: Side) -> dict[str, Any]:
    return train(side, mlp(), precision="bf16-mixed")


def clipped_by_norm(side: Side) -> dict[str, Any]:
    return train(side, mlp(), gradient_clip_val=0.1)


def clipped_by_value(side: Side) -> dict[str, Any]:
    return train(side, mlp(), gradient_clip_val=0.01, gradient_clip_algorithm="value")


def batch_norm(side: Side) -> dict[str, Any]:
    return train(side, mlp(torch.nn.BatchNorm1d(16)))


def batch_norm_accumulated(side: Side) -> dict[str, Any]:
    return train(side, mlp(torch.nn.BatchNorm1d(16)), accumulate_grad_batches=2)


def unused(side: Side) -> dict[str, Any]:
    return train(side, Branches(), unused=True)


def unused_accumulated(side: Side) -> dict[str, Any]:
    return train(side, Branches(), unused=True, accumulate_grad_batches=2)


def several_buckets(side: Side) -> dict[str, Any]:
    """2.8 MiB of parameters: two buckets at first, others after DDP's rebuild."""
    return train(side, mlp(torch.nn.Linear(600, 600), width=600))


def frozen(side: Side) -> dict[str, Any]:
    net = mlp()
    net[0].requires_grad_(False)
    return train(side, net)


def worker_processes(side: Side) -> dict[str, Any]:
    """Forked, as Python does it on Linux in a script; these test processes themselves come from a fork server."""
    return train(side, mlp(), loader={"num_workers": 2, "multiprocessing_context": "fork"})


CASES = [
    plain, unshuffled, shuffled, dropout, accumulated, accumulated_uneven, bf16, clipped_by_norm, clipped_by_value, batch_norm,
    batch_norm_accumulated, unused, unused_accumulated, several_buckets, frozen, worker_processes,
]  # fmt: skip
WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=WORLDS)
def sides(request: pytest.FixtureRequest) -> tuple[dict[int, Any], dict[int, Any]]:
    return run_ours(request.param, CASES), run_ddp(request.param, CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_losses_weights_and_optimizer_equal_those_of_ddp_to_the_bit(sides: Any, case: str) -> None:
    ours, theirs = sides
    assert_same(ours, theirs, case)


def test_the_comparison_would_notice_another_sample_order(sides: Any) -> None:
    ours, theirs = sides
    assert ours[0]["plain"]["weights"] != theirs[0]["unshuffled"]["weights"]
