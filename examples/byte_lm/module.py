"""The LightningModule around :class:`~examples.byte_lm.model.GPT`: an ordinary one, it knows nothing of failures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from examples.byte_lm.model import GPT

__all__ = ["ByteLM"]

Batch = tuple[Tensor, Tensor]


class ByteLM(LightningModule):
    """Predicts the next byte; logs ``train_loss``, ``val_loss`` (nats a byte) and ``val_bpb`` (bits a byte).

    Args:
        n_layer: Number of decoder blocks.
        n_head: Attention heads in a block; must divide ``n_embd``.
        n_embd: Width of the model.
        block_size: Longest context in bytes.
        dropout: Dropout probability.
        tied: Whether output and input embedding share one matrix.
        lr: Peak learning rate.
        min_lr: Learning rate after ``decay_steps``.
        warmup_steps: Steps over which the rate rises linearly to ``lr``.
        decay_steps: Step at which the cosine reaches ``min_lr``; 0 keeps ``lr``.  It is a number, not derived from the
            loader's length, so the schedule does not depend on who is alive.
        weight_decay: AdamW decay of matrices; biases and norms are not decayed.

    Raises:
        ValueError: ``n_head`` does not divide ``n_embd``.
    """

    def __init__(
        self,
        n_layer: int = 5,
        n_head: int = 4,
        n_embd: int = 128,
        block_size: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
        lr: float = 1e-3,
        min_lr: float = 1e-4,
        warmup_steps: int = 50,
        decay_steps: int = 1000,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.min_lr, self.weight_decay = lr, min_lr, weight_decay
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.gpt = GPT(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, dropout=dropout, tied=tied)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(batch, length, 256)`` for int64 tokens ``(batch, length)``."""
        return self.gpt(tokens)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross entropy in nats; ``batch`` is (tokens, next tokens), both int64 ``(batch, length)``."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_quality("val", self.loss(batch), batch_size=len(batch[0]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_quality("test", self.loss(batch), batch_size=len(batch[0]))

    def _log_quality(self, prefix: str, loss: Tensor, *, batch_size: int) -> None:
        self.log(f"{prefix}_loss", loss, prog_bar=True, sync_dist=True, batch_size=batch_size)
        self.log(f"{prefix}_bpb", loss / math.log(2), sync_dist=True, batch_size=batch_size)

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Fraction of ``lr`` in optimizer step ``step``: linear warm-up, then a cosine down to ``min_lr``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        floor = self.min_lr / self.lr
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
