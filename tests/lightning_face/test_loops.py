"""Loops, limits and loaders under ``cann_ft`` as under ``ddp``: the same batches, validations, stops and results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from tests.lightning_face.sides import Observed, Side, assert_ranks_agree, assert_same, observe, run_ddp, run_ours
from tests.support.training import Points, loader


class Calls(Observed):
    """Notes each hook with the step and epoch at which it ran, and which samples each batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.samples: list[list[int]] = []

    def note(self, what: str) -> None:
        self.calls.append(f"{what} step {self.trainer.global_step} epoch {self.trainer.current_epoch}")

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.net(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[0].tolist())
        return self.saw(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"validation {batch_idx} of {dataloader_idx}")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].tolist(), self.net(batch[1]).flatten().tolist()

    def on_train_epoch_start(self) -> None:
        self.note("epoch start")

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(side: Side, n: int = 40, train: Any = None, model: Calls | None = None, **options: Any) -> dict[str, Any]:
    """Trains two epochs of five batches a rank, with two of validation."""
    model = model or Calls()
    trainer = side.trainer(**{"max_epochs": 2, **options})
    trainer.fit(model, loader(n) if train is None else train, loader(16))
    return observe(trainer, model, calls=model.calls, my_samples=model.samples, batches=trainer.num_training_batches)


# name -> arguments of the Trainer; each runs on both sides
LOOPS: dict[str, dict[str, Any]] = {
    "default": {},
    "val_check_interval_int": {"val_check_interval": 2},
    "val_check_interval_float": {"val_check_interval": 0.4},
    "val_check_interval_across_epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "limit_train_batches_int": {"limit_train_batches": 3},
    "limit_train_batches_float": {"limit_train_batches": 0.4},
    "limit_train_batches_more_than_there_are": {"limit_train_batches": 50},
    "limit_train_batches_zero": {"limit_train_batches": 0},
    "limit_val_batches_int": {"limit_val_batches": 1},
    "limit_val_batches_float": {"limit_val_batches": 0.5},
    "limit_val_batches_zero": {"limit_val_batches": 0},
    "limits_and_interval": {"limit_train_batches": 4, "val_check_interval": 0.5, "accumulate_grad_batches": 2},
    "overfit_batches_int": {"overfit_batches": 2},
    "overfit_batches_float": {"overfit_batches": 0.6},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run_3": {"fast_dev_run": 3},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
    "max_steps_accumulated": {"max_steps": 4, "max_epochs": -1, "accumulate_grad_batches": 2},
    "min_epochs": {"min_epochs": 2, "max_epochs": 3},
    "sanity_validation": {"num_sanity_val_steps": 2},
    "accumulated_last_window_is_short": {"accumulate_grad_batches": 3},
    "accumulation_scheduler": {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
    "max_epochs_zero": {"max_epochs": 0},
}


def loops(side: Side) -> dict[str, Any]:
    results = {}
    for name, options in LOOPS.items():
        pl.seed_everything(2, verbose=False)
        results["my_" + name] = fit(side, **options)  # one key a rank: all keys of it are compared between sides
    return results


def evaluation(side: Side) -> dict[str, Any]:
    """validate, test and predict: alone, and after a fit with the same Trainer."""
    results: dict[str, Any] = {}
    model, trainer = Calls(), side.trainer()
    results["validate"] = trainer.validate(model, loader(16), verbose=False)
    results["test"] = trainer.test(model, loader(16), verbose=False)
    results["my_predict"] = trainer.predict(model, loader(16))
    results["two_loaders"] = trainer.validate(model, [loader(8), loader(16)], verbose=False)
    trainer.fit(model, loader(16), loader(8))
    results["fit"] = observe(trainer, model)["weights"]
    results["validate_after"] = trainer.validate(model, loader(16), verbose=False)
    results["test_after"] = trainer.test(model, loader(16), verbose=False)
    results["my_predict_after"] = trainer.predict(model, loader(16))
    return results


def fit_again(side: Side) -> dict[str, Any]:
    """One Trainer fits twice, then a second Trainer goes on with the model."""
    model, trainer = Calls(), side.trainer(max_epochs=1)
    trainer.fit(model, loader(40))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(40))
    first = observe(trainer, model, my_samples=list(model.samples))
    other = side.trainer(max_epochs=1)
    other.fit(model, loader(40))
    return {"my_first": first, **observe(other, model, my_samples=model.samples)}


# ---------------------------------------------------------------------------------------------- loaders
class Stream(IterableDataset):
    """Each rank's part of a stream of points, with or without a length."""

    def __init__(self, n: int, rank: int, world_size: int) -> None:
        self.points, self.rank, self.world_size = Points(n), rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return (self.points[i] for i in range(self.rank, len(self.points), self.world_size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.points) // self.world_size


class Pairs(Calls):
    """Trains on two loaders at once: batches come as a dict of batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        self.samples.append([i for part in parts for i in part[0].tolist()])
        return self.saw(torch.stack([self.loss(part) for part in parts]).mean())


class Reloads(Calls):
    def train_dataloader(self) -> Any:
        self.note("loader made")
        return loader(8 * (1 + self.trainer.current_epoch))


class Module(pl.LightningDataModule):
    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        self.stage = stage

    def train_dataloader(self) -> Any:
        return loader(40, drop_last=True)

    def val_dataloader(self) -> Any:
        return [loader(8), loader(16)]


def stream_with_length(side: Side) -> dict[str, Any]:
    return fit(side, train=DataLoader(SizedStream(40, side.rank, side.world_size), batch_size=4))


def stream_without_length(side: Side) -> dict[str, Any]:
    return fit(side, train=DataLoader(Stream(40, side.rank, side.world_size), batch_size=4), val_check_interval=2)


def combined_min_size(side: Side) -> dict[str, Any]:
    pair = CombinedLoader({"a": loader(40), "b": loader(24)}, mode="min_size")
    return fit(side, train=pair, model=Pairs())


def combined_max_size(side: Side) -> dict[str, Any]:
    pair = CombinedLoader({"a": loader(40), "b": loader(24)}, mode="max_size_cycle")
    return fit(side, train=pair, model=Pairs(), accumulate_grad_batches=2)


def loaders_made_anew(side: Side) -> dict[str, Any]:
    model = Reloads()
    trainer = side.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model)
    return observe(trainer, model, calls=model.calls, my_samples=model.samples)


def data_module(side: Side) -> dict[str, Any]:
    model, trainer, data = Calls(), side.trainer(max_epochs=2), Module()
    trainer.fit(model, datamodule=data)
    return observe(trainer, model, calls=model.calls, my_samples=model.samples, stage=data.stage)


def users_batch_sampler(side: Side) -> dict[str, Any]:
    data = Points(40)
    shard = DistributedSampler(data, side.world_size, side.rank, shuffle=True, seed=5)
    train = DataLoader(data, batch_sampler=BatchSampler(shard, 4, drop_last=False))
    return fit(side, train=train, use_distributed_sampler=False)


SAME = [
    loops, evaluation, fit_again, stream_with_length, stream_without_length, combined_min_size, combined_max_size,
    loaders_made_anew, data_module, users_batch_sampler,
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- not to be compared
def uneven(side: Side, n: int, batch_size: int, **options: Any) -> dict[str, Any]:
    """DDP pads such data with repeated samples; here each sample is used once."""
    model = Calls()
    trainer = side.trainer(max_epochs=2, **options)
    trainer.fit(model, loader(n, batch_size))
    return observe(trainer, model, my_samples=model.samples)


def uneven_rest(side: Side) -> dict[str, Any]:
    return uneven(side, 37, 4)


def uneven_by_a_batch(side: Side) -> dict[str, Any]:
    return uneven(side, 33, 8)


def uneven_accumulated(side: Side) -> dict[str, Any]:
    return uneven(side, 37, 4, accumulate_grad_batches=3)


def fewer_samples_than_ranks(side: Side) -> dict[str, Any]:
    return uneven(side, 1, 4)


def max_time(side: Side) -> dict[str, Any]:
    model, trainer = Calls(), side.trainer(max_epochs=-1, max_time=timedelta(seconds=0.5))
    trainer.fit(model, loader(40))
    return observe(trainer, model)


def timer(side: Side) -> dict[str, Any]:
    model, trainer = Calls(), side.trainer(max_epochs=-1, callbacks=[Timer(timedelta(seconds=0.5), interval="epoch")])
    trainer.fit(model, loader(40))
    return observe(trainer, model)


ALONE = [uneven_rest, uneven_by_a_batch, uneven_accumulated, fewer_samples_than_ranks, max_time, timer]


@pytest.fixture(scope="module")
def sides() -> tuple[dict[int, Any], dict[int, Any]]:
    return run_ours(2, [*SAME, *ALONE]), run_ddp(2, SAME)


@pytest.mark.parametrize("name", list(LOOPS))
def test_the_fit_loop_does_what_it_does_under_ddp(sides: Any, name: str) -> None:
    ours, theirs = sides
    runs = [{rank: {name: found["loops"]["my_" + name]} for rank, found in side.items()} for side in (ours, theirs)]
    assert_same(*runs, name)


@pytest.mark.parametrize("case", [case.__name__ for case in SAME[1:]])
def test_it_works_as_under_ddp(sides: Any, case: str) -> None:
    assert_same(*sides, case)


@pytest.mark.parametrize("case", [case.__name__ for case in ALONE])
def test_it_ends_with_equal_ranks(sides: Any, case: str) -> None:
    assert_ranks_agree(sides[0], case)


@pytest.mark.parametrize(("case", "n"), [("uneven_rest", 37), ("uneven_by_a_batch", 33), ("uneven_accumulated", 37)])
def test_uneven_data_is_used_completely_in_each_epoch(sides: Any, case: str, n: int) -> None:
    """A rank that has nothing left repeats a batch, which does not count; the others are each sample once."""
    batches = [batch for rank in sides[0].values() for batch in rank[case]["my_samples"]]
    assert {i for batch in batches for i in batch} == set(range(n))


def test_a_time_limit_ends_the_fit(sides: Any) -> None:
    for case in ("max_time", "timer"):
        assert sides[0][0][case]["stopped"] and sides[0][0][case]["steps"] > 0
