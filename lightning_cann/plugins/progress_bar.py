"""Lightning's progress bars (tqdm, rich) on a rank that was not rank zero when they were set up.

    promote_progress_bar(trainer)       # on a new leader, in the main thread
    set_train_total(trainer, batches)   # the epoch has become longer or shorter
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["promote_progress_bar", "set_train_total"]


def promote_progress_bar(trainer: Any) -> bool:
    """On the new leader: switch the trainer's progress bar on, at the position where training is.

    ``ProgressBar.setup`` disables the bar on every rank but zero, and its tqdm or rich objects were made disabled.

    Args:
        trainer: a Trainer of either namespace, in any stage.

    Returns:
        True if a bar is shown now that was not shown before.
    """
    bar = getattr(trainer, "progress_bar_callback", None)
    if bar is None or getattr(bar, "is_enabled", False) or not hasattr(bar, "enable"):
        return False
    bar.enable()
    if not getattr(bar, "is_enabled", True):  # refresh_rate=0
        return False
    if hasattr(bar, "init_train_tqdm"):
        _promote_tqdm(bar, trainer)
    elif hasattr(bar, "_init_progress"):
        _promote_rich(bar, trainer)
    return True


def _finite(total: float) -> float | None:
    return None if math.isinf(total) else total


def _train_position(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)


def _promote_tqdm(bar: Any, trainer: Any) -> None:
    # The bars that exist were made by hooks that ran while the bar was disabled; those to come are made by hooks again.
    if bar._train_progress_bar is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
        bar._train_progress_bar.close()
        bar.train_progress_bar = bar.init_train_tqdm()
        _place(bar.train_progress_bar, bar.total_train_batches, _train_position(trainer))
        bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
    if not (trainer.evaluating or trainer.sanity_checking or trainer.predicting):
        return
    fn = trainer.state.fn
    loop = trainer.fit_loop.epoch_loop.val_loop if fn == "fit" else getattr(trainer, f"{fn.value}_loop")
    if trainer.sanity_checking:
        what, new = "val", bar.init_sanity_tqdm
    elif fn in ("fit", "validate"):
        what, new = "val", bar.init_validation_tqdm
    elif fn == "test":
        what, new = "test", bar.init_test_tqdm
    else:
        what, new = "predict", bar.init_predict_tqdm
    if (old := getattr(bar, f"_{what}_progress_bar")) is None:
        return
    old.close()
    made = new()
    setattr(bar, f"{what}_progress_bar", made)
    if (index := bar._current_eval_dataloader_idx) is None:  # the next batch's hook knows it, and the total
        _place(made, math.inf, 0)
        return
    done = loop.batch_progress.current.completed - sum(loop.max_batches[:index])  # it counts across data loaders
    _place(made, getattr(bar, f"total_{what}_batches_current_dataloader"), int(done))


def _place(bar: Any, total: float, done: int) -> None:
    """Like tqdm(total, initial): the rate counts from here, the time from the promotion."""
    bar.total, bar.initial, bar.n = _finite(total), done, done
    bar.refresh()


def _promote_rich(bar: Any, trainer: Any) -> None:
    bar._init_progress(trainer)
    # Evaluation tasks are made by the next batch's hook: a disabled bar did not note the data loader either.
    started = trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.fit_loop._data_source is not None
    if started and trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
        bar._initialize_train_progress_bar_id()
        # `update` would take the batches done so far for this second's speed
        total = bar.total_train_batches
        bar.progress.reset(bar.train_progress_bar_id, total=total, completed=_train_position(trainer))
        bar.refresh(hard=True)


def set_train_total(trainer: Any, batches: int) -> None:
    """Shows the epoch's new length, where a bar shows one."""
    bar = getattr(trainer, "progress_bar_callback", None)
    if bar is None or not getattr(bar, "is_enabled", False):
        return
    if getattr(bar, "_train_progress_bar", None) is not None:
        bar._train_progress_bar.total = batches
    elif getattr(bar, "train_progress_bar_id", None) is not None and bar.progress is not None:
        bar.progress.update(bar.train_progress_bar_id, total=batches)
