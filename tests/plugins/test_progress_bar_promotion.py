"""A promoted rank shows the progress bar at the right position, in every stage, in both namespaces."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cann.plugins import promote_progress_bar

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]
#: hook in which the rank is promoted -> the bar that must be enabled afterwards
HOOKS = {
    "on_sanity_check_start": None,
    "on_train_start": "train",
    "on_train_epoch_start": "train",
    "on_train_batch_start": "train",
    "on_train_batch_end": "train",
    "on_validation_start": "train",
    "on_validation_batch_start": "val",
    "on_validation_batch_end": "val",
    "on_validation_end": "train",
    "on_train_epoch_end": "train",
    "on_train_end": None,
}


def fit(namespace: str, tmp_path: Path, bar_name: str, callbacks: list[Any], fn: str = "fit") -> tuple[Any, Any]:
    pl = importlib.import_module(namespace)
    bar_class = getattr(importlib.import_module(f"{namespace}.callbacks"), bar_name)

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).mean()

        def validation_step(self, batch: torch.Tensor, _: int, dataloader_idx: int = 0) -> None:
            self.layer(batch)

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Disabled(bar_class):  # type: ignore[misc, valid-type]
        """As on a non-zero rank."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.disable()

    bar = Disabled(refresh_rate=1)
    loader = torch.utils.data.DataLoader(torch.zeros(6, 2), batch_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[*callbacks, bar],
    )
    if fn == "fit":
        trainer.fit(Model(), loader, [loader, loader])
    else:
        getattr(trainer, fn)(Model(), loader)
    return trainer, bar


def promoting(namespace: str, hook: str, at: int, seen: dict[str, Any]) -> Any:
    """A callback that promotes the rank at the ``at``-th call of this hook."""
    base = importlib.import_module(f"{namespace}.callbacks").Callback

    def on_hook(self: Any, trainer: Any, *args: Any) -> None:
        seen["calls"] = seen.get("calls", 0) + 1
        if seen["calls"] != at:
            return
        bar = trainer.progress_bar_callback
        assert promote_progress_bar(trainer)
        assert not promote_progress_bar(trainer), "it is shown already"
        seen["enabled"] = bar.is_enabled
        if hasattr(bar, "init_train_tqdm"):
            for what in ("train", "val", "test", "predict"):
                made = getattr(bar, f"_{what}_progress_bar")
                seen[what] = None if made is None or made.disable else (made.n, made.total)
        else:
            seen["train"] = None
            if bar.train_progress_bar_id is not None:
                seen["train"] = (bar.train_progress_bar.completed, bar.train_progress_bar.total)

    return type("Promoting", (base,), {hook: on_hook})()


@pytest.mark.parametrize("bar_name", ["TQDMProgressBar", "RichProgressBar"])
@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_promotion_in_any_hook(namespace: str, hook: str, bar_name: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    at = 1 if hook in ("on_train_start", "on_train_end", "on_sanity_check_start") else 2
    _, bar = fit(namespace, tmp_path, bar_name, [promoting(namespace, hook, at, seen)])
    assert seen["enabled"]
    if bar_name == "TQDMProgressBar" and HOOKS[hook] is not None:
        assert seen[HOOKS[hook]] is not None, seen
    if hook != "on_train_end":
        if bar_name == "TQDMProgressBar":
            assert bar.train_progress_bar.n == 6, "and it goes on to the end"
        else:
            assert bar.train_progress_bar.completed == 6


@pytest.mark.parametrize("bar_name", ["TQDMProgressBar", "RichProgressBar"])
def test_position_in_the_middle_of_an_epoch(bar_name: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    fit(NAMESPACES[0], tmp_path, bar_name, [promoting(NAMESPACES[0], "on_train_batch_start", 4, seen)])
    assert seen["train"] == (3, 6)


def test_position_in_the_middle_of_a_validation(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    # calls 1 to 4 are the sanity check: two batches of each of the two loaders
    fit(NAMESPACES[0], tmp_path, "TQDMProgressBar", [promoting(NAMESPACES[0], "on_validation_batch_end", 4 + 9, seen)])
    assert seen["val"] == (3 - 1, 6), "third batch of the second loader; it is not completed within its hook"
    assert seen["train"] == (6, 6)


@pytest.mark.parametrize("bar_name", ["TQDMProgressBar", "RichProgressBar"])
@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_promotion_outside_fit(fn: str, bar_name: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    hook = {"validate": "on_validation_batch_end", "test": "on_test_batch_end", "predict": "on_predict_batch_end"}[fn]
    fit(NAMESPACES[0], tmp_path, bar_name, [promoting(NAMESPACES[0], hook, 3, seen)], fn=fn)
    assert seen["enabled"]
    if bar_name == "TQDMProgressBar":
        what = {"validate": "val"}.get(fn, fn)
        assert seen[what] is not None and seen[what][1] == 6


def test_no_bar_and_refresh_rate_zero(tmp_path: Path) -> None:
    pl = importlib.import_module(NAMESPACES[0])
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    assert not promote_progress_bar(pl.Trainer(enable_progress_bar=False, **quiet))
    bar = pl.callbacks.TQDMProgressBar(refresh_rate=0)
    bar.disable()
    assert not promote_progress_bar(pl.Trainer(callbacks=[bar], **quiet))
