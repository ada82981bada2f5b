"""What a run leaves behind so that a report can check its claims: step times, weights, the audit of samples."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

__all__ = ["StepClock", "WriteResult", "fingerprint"]


class StepClock(Callback):
    """Logs ``unix_time`` beside the training metrics, so that events (which carry times) can be drawn over steps.

    It goes to the loggers directly: ``self.log`` would keep it as float32, which cannot tell one minute from the next.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step and step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"unix_time": time.time()}, step=step - 1)


class WriteResult(Callback):
    """Every rank writes ``weights-rank{r}.json`` when training ends.

    The file holds ``rank``, ``pid``, ``step``, ``sha256`` of all parameters and buffers, and ``data_audit``: for each
    epoch, how many samples the strategy expected, consumed, saw twice and missed; null where it keeps no such account.

    Args:
        dirpath: Folder for the files; None takes the trainer's ``default_root_dir``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        audit = getattr(trainer.strategy, "data_audit", None)
        result = {
            "rank": trainer.global_rank,
            "pid": os.getpid(),
            "step": trainer.global_step,
            "sha256": fingerprint(pl_module),
            "data_audit": audit() if audit is not None else None,
        }
        folder = Path(self.dirpath or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"weights-rank{trainer.global_rank}.json"
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(result) + "\n")
        partial.replace(target)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and raw bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
