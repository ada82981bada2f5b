"""Small models, data and faults for tests that train with real processes."""

from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    """``n`` samples of a fixed regression problem; a sample is (index, x, y)."""

    def __init__(self, n: int, features: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, features, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


class Regression(pl.LightningModule):
    """A small regression; logs ``train_loss`` and (synchronised) ``val_loss``."""

    def __init__(self, features: int = 8, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(features, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )
        self.lr = lr

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[1]), batch[2])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loader(n: int, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Points(n), batch_size=batch_size, **options)


def weights_hash(module: torch.nn.Module) -> str:
    """SHA-256 of all parameters and buffers, to the bit."""
    digest = hashlib.sha256()
    for tensor in [*module.parameters(), *module.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer without bars, summaries, loggers and checkpoints, unless asked for."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("CANN_FT_WORLD_SIZE", "1")),
        "strategy": "cann_ft",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**chosen, **options})


def die(sig: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), sig)
    signal.pause()  # a stopped process comes back here when it is continued


class Fault:
    """Ends (or stops) this process once, at a named point, on one rank; replacements are spared unless they are meant.

    Points of the program are checked by the test's own code: ``fault.at("forward", step)``.  Points of the engine
    (``"launch"``, ``"reduced"``, ``"committed"``, ``"propose"``, ``"install"``, ``"adopt"``) come through
    ``group.probe``: ``fault.arm(group)``, counted from the moment it is armed.

    Args:
        step: the step of a point of the program; how often a point of the engine is passed before.
        armed_at: (program point, step) at which the test's code arms a point of the engine.
        generation: which process of the rank: 1 is the first, 2 its first replacement.
    """

    def __init__(
        self,
        rank: int,
        point: str,
        step: int = 0,
        sig: int = signal.SIGKILL,
        *,
        armed_at: tuple[str, int] | None = None,
        generation: int = 1,
    ) -> None:
        self.rank, self.point, self.step, self.sig = rank, point, step, sig
        self.armed_at, self.generation = armed_at, generation
        self._seen = 0

    def mine(self) -> bool:
        rank, generation = map(int, os.environ["CANN_FT_MEMBER_ID"].split("-")[:2])
        return (rank, generation) == (self.rank, self.generation)

    def at(self, point: str, step: int) -> None:
        if point == self.point and step == self.step and self.mine():
            die(self.sig)

    def reach(self, point: str, step: int, group: Any) -> None:
        """A point of the program: ends the process, or arms a point of the engine."""
        if self.armed_at is None:
            self.at(point, step)
        elif self.armed_at == (point, step):
            self.arm(group)

    def arm(self, group: Any) -> None:
        if self.mine():
            group.probe = self._probe

    def _probe(self, point: str) -> None:
        if point == self.point:
            self._seen += 1
            if self._seen > self.step:
                die(self.sig)
