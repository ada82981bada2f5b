"""What a replacement must get, and how it enters Lightning's loops with it.

The state is Lightning's own checkpoint (weights, optimizers, schedulers, loops, callbacks, precision), taken between two
steps, and what a checkpoint does not hold: data cursors, bucket layout, metrics that callbacks monitor, logger identity.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from lightning_cann.data.order import mix_seed

__all__ = ["dump_state", "keep_pace", "load_state", "seed_newcomer"]

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# What a ModelCheckpoint decides by but does not put into its state_dict.
_CHECKPOINTING = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved")


def _detached(value: Any) -> Any:
    """A copy that shares no storage with what the next steps change."""
    return tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x, value)


def dump_state(trainer: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The state of this member at a safe point, on the CPU, detached from the running training."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    metrics = {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS}
    checkpointing = {
        callback.state_key: {name: getattr(callback, name) for name in _CHECKPOINTING}
        for callback in trainer.checkpoint_callbacks
        if all(hasattr(callback, name) for name in _CHECKPOINTING)
    }
    parts = {"checkpoint": checkpoint, "metrics": metrics, "checkpointing": checkpointing, "extra": extra}
    extra["pacing"] = _pacing(trainer)
    return dict(_detached(parts))


def load_state(trainer: Any, state: dict[str, Any], namespace: SimpleNamespace) -> dict[str, Any]:
    """Puts a newcomer, set up but not yet training, where the donor was; returns what the donor added."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = state["checkpoint"]
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    for name, values in state["metrics"].items():
        getattr(trainer._logger_connector, name).update(values)
    for callback in trainer.checkpoint_callbacks:
        vars(callback).update(state["checkpointing"].get(callback.state_key, {}))
    trainer.num_sanity_val_steps = 0  # the others are past it
    _enter_mid_epoch(trainer)
    return dict(state["extra"])


def _pacing(trainer: Any) -> dict[str, Any]:
    fit_loop = trainer.fit_loop
    return {
        "val_check_batch": trainer.val_check_batch,
        "should_stop": trainer.should_stop,
        "train_reloaded": fit_loop._last_train_dl_reload_epoch,
        "val_reloaded": fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
    }


def keep_pace(trainer: Any, pacing: dict[str, Any]) -> None:
    """At a newcomer's first safe point: when to validate, reload and stop, as the others computed it when *their* loaders
    were made.  Its own set-up has just computed these from the epoch's present length."""
    trainer.val_check_batch = pacing["val_check_batch"]
    trainer.should_stop = pacing["should_stop"]
    trainer.fit_loop._last_train_dl_reload_epoch = pacing["train_reloaded"]
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = pacing["val_reloaded"]


def _enter_mid_epoch(trainer: Any) -> None:
    """The loops restart as from a checkpoint, but this state lies *between* two batches, after whatever validation was
    due: there is nothing to make up for, so the epoch loop must not look for it."""
    loop = trainer.fit_loop.epoch_loop
    original = loop.on_run_start

    def on_run_start(data_fetcher: Any) -> None:
        del loop.on_run_start  # this once only
        original(data_fetcher)
        loop._restarting = False
        if trainer.strategy._data.loader is None:  # data that only its owner can read: go on where that one was
            read = loop.batch_progress.current.ready
            data_fetcher.fetched -= read  # counted by Lightning, but this process has not read them
            for _ in range(read):
                next(data_fetcher, None)

    loop.on_run_start = on_run_start


def seed_newcomer(rank: int, view_number: int, seed: int) -> None:
    """A replacement's random numbers are its own, reproducible, and those of nobody else: the stream of the process it
    replaces died with it."""
    mixed = mix_seed(seed, rank, view_number)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
