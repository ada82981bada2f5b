"""``fit(ckpt_path=...)`` under ``cann_ft``: what was interrupted and resumed ends like what was not, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss

from tests.lightning_face.sides import Observed, Side, assert_ranks_agree, assert_same, observe, run_ddp, run_ours
from tests.support.training import loader


class Model(Observed):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.samples: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[0].tolist())
        return self.saw(mse_loss(self.net(batch[1]), batch[2]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def interrupted(side: Side, stop: int | None, accumulate: int = 1) -> dict[str, Any]:
    """Three epochs of five batches a rank: whole, and in two parts, cut at step ``stop`` or after the first epoch."""

    def trainer(**options: Any) -> Any:
        return side.trainer(**{"max_epochs": 3, "accumulate_grad_batches": accumulate, **options})

    torch.manual_seed(3)
    whole, complete = Model(), trainer()
    start = {name: value.clone() for name, value in whole.state_dict().items()}
    complete.fit(whole, loader(40))

    saves = ModelCheckpoint(side.folder, filename="part", every_n_train_steps=stop)
    limit = {"max_steps": stop} if stop else {"max_epochs": 1}
    first, broken = Model(), trainer(callbacks=[saves], enable_checkpointing=True, **limit)
    first.load_state_dict(start)
    broken.fit(first, loader(40))
    path = str(side.folder / "part.ckpt")

    second, rest = Model(), trainer()
    rest.fit(second, loader(40), ckpt_path=path)
    return {
        **observe(rest, second),
        "my_whole": observe(complete, whole, samples=whole.samples),
        "my_parts": (first.samples + second.samples, first.losses + second.losses),
    }


def at_the_last_batch_of_an_epoch(side: Side) -> Any:
    return interrupted(side, 5)


def inside_an_epoch(side: Side) -> Any:
    return interrupted(side, 7)


def inside_an_epoch_accumulated(side: Side) -> Any:
    return interrupted(side, 4, accumulate=2)


def after_an_epoch(side: Side) -> Any:
    return interrupted(side, None)


CASES = [after_an_epoch, at_the_last_batch_of_an_epoch, inside_an_epoch, inside_an_epoch_accumulated]


@pytest.fixture(scope="module")
def ours() -> dict[int, Any]:
    return run_ours(2, CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_a_resumed_run_ends_as_an_uninterrupted_one(ours: dict[int, Any], case: str) -> None:
    assert_ranks_agree(ours, case)
    for found in ours.values():
        whole = found[case]["my_whole"]
        assert found[case]["my_parts"] == (whole["samples"], whole["my_losses"])
        for key in ("weights", "optimizers", "steps", "epochs"):
            assert found[case][key] == whole[key]


# ---------------------------------------------------------------------------------------------- another world size
def writes(side: Side, folder: str) -> dict[str, Any]:
    model, trainer = Model(), side.trainer(max_epochs=1)
    trainer.fit(model, loader(48))
    trainer.save_checkpoint(f"{folder}/whole.ckpt")
    saves = ModelCheckpoint(folder, filename="inside", every_n_train_steps=3)
    short = side.trainer(max_steps=3, callbacks=[saves], enable_checkpointing=True)
    short.fit(Model(), loader(48))
    return observe(trainer, model)


def reads(side: Side, folder: str, name: str) -> dict[str, Any]:
    model, trainer = Model(), side.trainer(max_epochs=2)
    trainer.fit(model, loader(48), ckpt_path=f"{folder}/{name}.ckpt")
    return observe(trainer, model, my_samples=model.samples)


class Bound:
    """A case with arguments, picklable and with a name of its own."""

    def __init__(self, function: Any, **arguments: Any) -> None:
        self.function, self.arguments, self.__name__ = function, arguments, function.__name__

    def __call__(self, side: Side) -> dict[str, Any]:
        result: dict[str, Any] = self.function(side, **self.arguments)
        return result


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_resumes_at_another_world_size_as_under_ddp(tmp_path: Any, world_size: int) -> None:
    """From an epoch's end: the next epoch is cut into other shards."""
    run_ours(2, [Bound(writes, folder=str(tmp_path))])
    case = [Bound(reads, folder=str(tmp_path), name="whole")]
    found = run_ours(world_size, case)
    assert_same(found, run_ddp(world_size, case), "reads")
    used = [i for rank in found.values() for batch in rank["reads"]["my_samples"] for i in batch]
    assert sorted(used) == list(range(48))


def test_a_checkpoint_inside_an_epoch_is_refused_at_another_world_size(tmp_path: Any) -> None:
    """DDP would go on from the start of the epoch's data; what is exactly-once cannot, and says so."""
    run_ours(2, [Bound(writes, folder=str(tmp_path))])
    found = run_ours(3, [Bound(reads, folder=str(tmp_path), name="inside")])
    error = found[0]["reads"]["error"]
    assert "ConfigurationError" in error and "cut into 2 shards, but there are 3 ranks" in error


def checkpoint_by_callback(side: Side) -> dict[str, Any]:
    """As a user does it: ModelCheckpoint in the first run, ``ckpt_path="last"`` in the second."""
    callback = ModelCheckpoint(side.folder, save_last=True, every_n_train_steps=2)
    model = Model()
    side.trainer(max_steps=4, callbacks=[callback], enable_checkpointing=True).fit(model, loader(40))
    second = Model()
    trainer = side.trainer(
        max_epochs=2, callbacks=[ModelCheckpoint(side.folder, save_last=True)], enable_checkpointing=True
    )
    trainer.fit(second, loader(40), ckpt_path="last")
    return observe(trainer, second, resumed_at=10 - len(second.losses))


def test_ckpt_path_last_finds_the_checkpoint_of_the_run_before() -> None:
    found = run_ours(2, [checkpoint_by_callback])
    assert_ranks_agree(found, "checkpoint_by_callback")
    assert found[0]["checkpoint_by_callback"]["resumed_at"] == 4
    assert found[0]["checkpoint_by_callback"]["steps"] == 10


def test_a_damaged_checkpoint_is_named(tmp_path: Any) -> None:
    from lightning_cann.errors import ConfigurationError
    from lightning_cann.strategies import FaultTolerantStrategy

    whole = tmp_path / "whole.ckpt"
    torch.save({"state_dict": {"x": torch.ones(1000)}}, whole)
    for name, data in (("cut", whole.read_bytes()[:900]), ("empty", b""), ("text", b"not a checkpoint")):
        path = tmp_path / f"{name}.ckpt"
        path.write_bytes(data)
        with pytest.raises(ConfigurationError, match=rf"{name}\.ckpt.*cannot be read"):
            FaultTolerantStrategy().load_checkpoint(str(path))
    with pytest.raises(FileNotFoundError):
        FaultTolerantStrategy().load_checkpoint(str(tmp_path / "absent.ckpt"))
