"""Callbacks, metrics and the user's own collectives under ``cann_ft`` as under ``ddp``: two ranks, equal results."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import mse_loss

from tests.lightning_face.sides import Observed, Side, assert_same, observe, run_ddp, run_ours, tensors_hash
from tests.support.training import loader


class Model(Observed):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.net(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.saw(self.loss(batch))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(side: Side, model: Model | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Trains four epochs of three batches a rank, with a validation in each."""
    model = model or Model()
    trainer = side.trainer(**{"max_epochs": 4, **options})
    trainer.fit(model, loader(24), loader(8))
    return trainer, observe(trainer, model)


def rows(side: Side, logger: CSVLogger) -> list[dict[str, str]]:
    """What the leader's CSV file holds, but for the engine's own metrics (which come in rows of their own)."""
    if side.rank:
        return []
    with open(f"{logger.log_dir}/metrics.csv") as file:
        table = [{k: v for k, v in row.items() if v and not k.startswith("ft_")} for row in csv.DictReader(file)]
    return [row for row in table if row.keys() - {"epoch", "step"}]


# ---------------------------------------------------------------------------------------------- callbacks
def early_stopping(side: Side) -> Any:
    return fit(side, callbacks=[EarlyStopping("val_loss", patience=0, min_delta=10.0)])[1]


def files(side: Side) -> list[str]:
    return sorted(str(path.relative_to(side.folder)) for path in side.folder.rglob("*.ckpt"))


def checkpoints(side: Side, **options: Any) -> Any:
    callback = ModelCheckpoint(side.folder, filename="{epoch}-{step}-{val_loss:.4f}", **options)
    trainer, seen = fit(side, callbacks=[callback], enable_checkpointing=True)
    best = torch.load(callback.best_model_path, weights_only=True) if callback.best_model_path else {"state_dict": {}}
    trainer.strategy.barrier()
    return {
        **seen,
        "files": files(side),
        "best": Path(callback.best_model_path).name,
        "last": Path(callback.last_model_path).name,
        "kept": {Path(path).name: float(score) for path, score in callback.best_k_models.items()},
        "best_weights": tensors_hash(best["state_dict"].values()),
    }


def checkpoint_top_k_and_last(side: Side) -> Any:
    return checkpoints(side, monitor="val_loss", save_top_k=2, save_last=True)


def checkpoint_every_n_train_steps(side: Side) -> Any:
    return checkpoints(side, every_n_train_steps=5, save_top_k=-1)


def checkpoint_by_time(side: Side) -> Any:
    return checkpoints(side, train_time_interval=timedelta(seconds=0), save_top_k=1)


def checkpoint_default(side: Side) -> Any:
    """No callback given: Lightning's own, below the logger's directory."""
    trainer, seen = fit(side, enable_checkpointing=True, logger=CSVLogger(side.folder, name="runs"))
    return {**seen, "files": files(side), "best": Path(trainer.checkpoint_callback.best_model_path).name}


def stochastic_weight_averaging(side: Side) -> Any:
    return fit(side, callbacks=[StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)])[1]


def exponential_moving_average(side: Side) -> Any:
    return fit(side, callbacks=[EMAWeightAveraging(decay=0.9)])[1]


def learning_rate_monitor(side: Side) -> Any:
    logger = CSVLogger(side.folder, name="rates")
    seen = fit(side, callbacks=[LearningRateMonitor()], logger=logger, log_every_n_steps=1)[1]
    return {**seen, "my_rows": rows(side, logger)}


# ---------------------------------------------------------------------------------------------- logs and metrics
def logs(side: Side) -> Any:
    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.saw(self.loss(batch))
            self.log("step", loss, on_step=True, on_epoch=False, sync_dist=True)
            self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
            self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log_dict({"max": loss, "plus": loss + 1}, reduce_fx="max", on_epoch=True, sync_dist=True)
            self.log("total", loss, reduce_fx="sum", on_epoch=True, sync_dist=True)
            self.log("own", loss, on_step=True, on_epoch=True)
            self.log("first", loss, rank_zero_only=True)
            return loss

    logger = CSVLogger(side.folder, name="logs")
    seen = fit(side, Logs(), logger=logger, log_every_n_steps=2)[1]
    return {**seen, "my_rows": rows(side, logger)}


def metrics(side: Side) -> Any:
    class Metrics(Model):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.accuracy = torchmetrics.MeanMetric(), torchmetrics.Accuracy("binary")
            self.values: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.net(batch[1])
            loss = self.saw(mse_loss(output, batch[2]))
            self.mean.update(loss.detach())
            self.accuracy(output.sigmoid(), (batch[2] > 0).int())
            self.log("mean", self.mean)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.values.append(float(self.accuracy.compute()))

    model = Metrics()
    seen = fit(side, model)[1]
    return {**seen, "values": model.values}


# ---------------------------------------------------------------------------------------------- collectives of the user
def collectives(side: Side) -> Any:
    class Talks(Model):
        heard: dict[str, Any] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 0:
                rows = self.all_gather(loss.detach())
                nested = self.all_gather({"a": torch.ones(2) * side.rank, "b": loss.detach()})
                with_grad = self.all_gather(loss, sync_grads=True)
                self.heard = {"rows": rows.tolist(), "a": nested["a"].tolist(), "grad": with_grad.requires_grad}
                loss = with_grad.mean() if side.world_size > 1 else loss
            return loss

    model = Talks()
    trainer, seen = fit(side, model)
    strategy = trainer.strategy
    mine = torch.arange(3.0) + 10 * side.rank
    total, gathered = mine.clone(), [torch.zeros(3) for _ in range(side.world_size)]
    dist.all_reduce(total)
    dist.all_gather(gathered, mine)
    objects: list[Any] = [None] * side.world_size
    dist.all_gather_object(objects, {"rank": side.rank, "long": "x" * 5000})
    told = [f"from {side.rank}", side.rank]
    dist.broadcast_object_list(told, src=1)
    from_one = mine.clone()
    dist.broadcast(from_one, src=1)
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    work = dist.all_reduce(mine.clone(), async_op=True)
    work.wait()
    parts = torch.zeros(3 * side.world_size)
    dist.all_gather_into_tensor(parts, mine)
    part, swapped = torch.zeros(3), torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(3.0 * side.world_size) + side.rank)
    dist.all_to_all_single(swapped, torch.tensor([1.0, 2.0]) + 10 * side.rank)
    dist.barrier()
    to_root = mine.clone()
    dist.reduce(to_root, dst=0)
    return {
        **seen,
        **{f"heard_{key}": value for key, value in model.heard.items()},
        "strategy_broadcast": strategy.broadcast({"from": side.rank}, src=1),
        "strategy_reduce_mean": strategy.reduce(mine.clone(), reduce_op="mean").tolist(),
        "strategy_reduce_sum": strategy.reduce(mine.clone(), reduce_op="sum").tolist(),
        "strategy_all": strategy.reduce_boolean_decision(side.rank == 0),
        "strategy_any": strategy.reduce_boolean_decision(side.rank == 0, all=False),
        "all_reduce": total.tolist(),
        "all_gather": [row.tolist() for row in gathered],
        "all_gather_object": objects,
        "broadcast_object_list": told,
        "broadcast": from_one.tolist(),
        "max": largest.tolist(),
        "into_tensor": parts.tolist(),
        "my_parts": (part.tolist(), swapped.tolist()),
        "my_reduce": to_root.tolist() if side.rank == 0 else None,
        "my_rank": dist.get_rank(),
        "world": (dist.get_world_size(), trainer.world_size),
        "my_global_rank": (trainer.global_rank, trainer.is_global_zero),
    }


CASES = [
    early_stopping, checkpoint_top_k_and_last, checkpoint_every_n_train_steps, checkpoint_by_time, checkpoint_default,
    stochastic_weight_averaging, exponential_moving_average, learning_rate_monitor, logs, metrics, collectives,
]  # fmt: skip


@pytest.fixture(scope="module")
def sides() -> tuple[dict[int, Any], dict[int, Any]]:
    return run_ours(2, CASES), run_ddp(2, CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_it_works_as_under_ddp(sides: Any, case: str) -> None:
    assert_same(*sides, case)


def test_early_stopping_did_stop(sides: Any) -> None:
    assert sides[0][0]["early_stopping"]["steps"] == 6  # of 12
