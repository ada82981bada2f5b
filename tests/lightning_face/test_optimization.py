"""Every way of optimizing that Lightning offers, under ``cann_ft`` as under ``ddp``: two ranks, results equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn.functional import mse_loss

from tests.lightning_face.sides import Observed, Side, assert_same, observe, run_ddp, run_ours
from tests.support.training import loader


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


class Automatic(Observed):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.net(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.saw(self.loss(batch))
        self.log("loss", loss)
        self.log("mean_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(side: Side, model: Observed, *, n: int = 24, val: bool = False, unused: bool = False, **options: Any) -> Any:
    """Trains two epochs of three batches a rank."""
    trainer = side.trainer(unused, **{"max_epochs": 2, **options})
    trainer.fit(model, loader(n), loader(8) if val else None)
    return observe(trainer, model)


# ---------------------------------------------------------------------------------------------- manual optimization
def manual(side: Side) -> Any:
    class Manual(Automatic):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.saw(self.loss(batch)))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    return fit(side, Manual())


def manual_accumulation(side: Side) -> Any:
    """Gradients of two batches, reduced with the second: ``toggle_model(sync_grad=...)``."""

    class Manual(Automatic):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, last = self.optimizers(), batch_idx % 2 == 1
            with optimizer.toggle_model(sync_grad=last):
                self.manual_backward(self.saw(self.loss(batch)) / 2)
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return fit(side, Manual(), n=32)


def gan(side: Side) -> Any:
    """Two optimizers take turns on each batch, with ``toggle_optimizer``."""

    class Gan(Observed):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.judge = torch.nn.Linear(8, 8), net()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_generator, of_judge = self.optimizers()
            self.toggle_optimizer(of_generator)
            loss = self.saw(-self.judge(self.generator(batch[1])).mean())
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
            self.untoggle_optimizer(of_generator)
            with of_judge.toggle_model():
                fake = self.judge(self.generator(batch[1]).detach())
                loss = self.saw((fake - self.judge(batch[1])).pow(2).mean())
                of_judge.zero_grad()
                self.manual_backward(loss)
                of_judge.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self) -> Any:
            both = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.generator, self.judge)]
            return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]

    return fit(side, Gan(), unused=True)


def two_backwards(side: Side) -> Any:
    """Two optimizers over all parameters: each optimizer step is a reduction of its own on the same batch."""

    class Two(Automatic):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.saw(self.loss(batch)))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.05), torch.optim.Adam(self.parameters(), 0.01)]

    return fit(side, Two())


def lbfgs(side: Side) -> Any:
    """The closure runs several times in one optimizer step."""

    class Lbfgs(Automatic):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    return fit(side, Lbfgs())


# ---------------------------------------------------------------------------------------------- precision, clipping
def half_with_scaler(side: Side) -> Any:
    """16-mixed: gradients of one rank overflow once, and all ranks skip that step."""

    class Overflow(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.saw(self.loss(batch))
            return loss * float("inf") if side.rank == 1 and self.global_step == 2 and batch_idx == 2 else loss

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    seen = fit(side, Overflow(), plugins=[plugin], gradient_clip_val=0.5)
    assert plugin.scaler is not None
    return {**seen, "scale": plugin.scaler.get_scale()}


def true_bf16(side: Side) -> Any:
    class Bf16(Automatic):
        def loss(self, batch: Any) -> torch.Tensor:
            return mse_loss(self.net(batch[1].bfloat16()), batch[2].bfloat16())

    return fit(side, Bf16(), precision="bf16-true")


def users_clipping(side: Side) -> Any:
    class Clips(Automatic):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val / 2)
            self.calls.append(f"{float(norm)}")

    model = Clips()
    seen = fit(side, model, gradient_clip_val=0.2)
    return {**seen, "calls": model.calls}


# ---------------------------------------------------------------------------------------------- schedulers
def scheduled(side: Side, make: Any, val: bool = False, **more: Any) -> Any:
    class Scheduled(Automatic):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer, self.trainer), **more}}

    return fit(side, Scheduled(), val=val, max_epochs=3)


def scheduler_by_step(side: Side) -> Any:
    """Its length comes from ``trainer.estimated_stepping_batches``."""

    def make(optimizer: Any, trainer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=trainer.estimated_stepping_batches)

    return scheduled(side, make, interval="step")


def scheduler_by_epoch(side: Side) -> Any:
    return scheduled(side, lambda o, _: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), interval="epoch")


def scheduler_on_plateau(side: Side) -> Any:
    def make(optimizer: Any, trainer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)

    return scheduled(side, make, val=True, monitor="val_loss")


def scheduler_on_plateau_by_step(side: Side) -> Any:
    def make(optimizer: Any, trainer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)

    return scheduled(side, make, monitor="mean_loss", interval="step", frequency=2)


# ---------------------------------------------------------------------------------------------- parameters
def shared_parameters(side: Side) -> Any:
    model = Automatic()
    model.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model.net[2].weight = model.net[0].weight
    return fit(side, model)


def parameter_groups(side: Side) -> Any:
    class Groups(Automatic):
        def configure_optimizers(self) -> Any:
            first, last = self.net[0], self.net[2]
            return torch.optim.AdamW([{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.1}], 0.01)

    return fit(side, Groups())


def compiled_submodule(side: Side) -> Any:
    class Compiled(Automatic):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(net(), backend="eager")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.saw(self.loss(batch))

    return fit(side, Compiled())


CASES = [
    manual, manual_accumulation, gan, two_backwards, lbfgs, half_with_scaler, true_bf16, users_clipping,
    scheduler_by_step, scheduler_by_epoch, scheduler_on_plateau, scheduler_on_plateau_by_step, shared_parameters,
    parameter_groups,
]  # fmt: skip


@pytest.fixture(scope="module")
def sides() -> tuple[dict[int, Any], dict[int, Any]]:
    return run_ours(2, CASES), run_ddp(2, CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_it_works_as_under_ddp(sides: Any, case: str) -> None:
    assert_same(*sides, case)


def test_the_step_that_overflowed_was_skipped_and_the_scale_halved(sides: Any) -> None:
    assert sides[0][0]["half_with_scaler"]["scale"] == 512.0


def test_schedulers_did_change_the_rate(sides: Any) -> None:
    for name in CASES:
        if name.__name__.startswith("scheduler"):
            assert len(set(sides[0][0][name.__name__]["rates"])) > 1, name.__name__


@pytest.mark.slow  # torch.compile takes many seconds to import
def test_a_compiled_submodule_works_as_under_ddp() -> None:
    cases = [compiled_submodule]
    assert_same(run_ours(2, cases), run_ddp(2, cases), "compiled_submodule")


def returns_none(side: Side) -> Any:
    class Nothing(Automatic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.loss(batch)

    return fit(side, Nothing())


def test_a_training_step_that_returns_none_is_refused_as_by_lightning() -> None:
    ours, theirs = run_ours(2, [returns_none]), run_ddp(2, [returns_none])
    last = {name: found[0]["returns_none"]["error"].strip().splitlines()[-1] for name, found in
            (("ours", ours), ("theirs", theirs))}  # fmt: skip
    assert last["ours"] == last["theirs"]
    assert "by returning None in distributed training is not supported" in last["ours"]
    assert "raised RuntimeError" in ours[0]["failure"]
