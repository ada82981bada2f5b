"""The text: the Python standard library's own sources on the user's machine, as byte windows.

Real text of some ten megabytes that every machine with Python has: nothing is downloaded, nothing is generated.
All nodes of a job must run the same Python version, or they would train on different text.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["ByteWindows", "StdlibBytes", "read_bytes", "split_files", "stdlib_files"]

# Third-party packages may lie inside the stdlib folder; its test suite holds deliberately broken text.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def stdlib_files(root: Path | None = None) -> list[Path]:
    """All ``.py`` files of the standard library, sorted by path.

    Raises:
        FileNotFoundError: There are none (a Python that ships its library in a zip file).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts))
    if not files:
        raise FileNotFoundError(f"no .py files under {root}: pass root=... with a folder of Python sources")
    return files


def split_files(files: list[Path], every: int = 10) -> tuple[list[Path], list[Path]]:
    """Split into (training, validation): each ``every``-th file validates, so no file is in both."""
    validation = files[every - 1 :: every]
    return [f for i, f in enumerate(files) if i % every != every - 1], validation


def read_bytes(files: list[Path], limit: int | None = None) -> Tensor:
    """Concatenate files into one uint8 tensor of at most ``limit`` bytes (None: all of them)."""
    text = bytearray()
    for file in files:
        if limit is not None and len(text) >= limit:
            break
        text += file.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset of consecutive windows over one byte tensor.

    Window ``i`` starts at byte ``i * block_size`` and pairs each byte with its successor, so every byte but the first
    is a target at most once in an epoch; a rest shorter than a window is left out.  Workers share the tensor's memory.

    Args:
        text: uint8 tensor, one dimension.
        block_size: Bytes in a window.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, text: Tensor, block_size: int) -> None:
        if len(text) < block_size + 1:
            raise ValueError(f"{len(text)} bytes are less than one window of block_size={block_size} and its successor")
        self.text = text
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, next tokens), int64, each ``(block_size,)``."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.block_size
        window = self.text[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


class StdlibBytes(LightningDataModule):
    """Windows over the standard library, training and validation split by file.

    Args:
        block_size: Bytes in a window; must not exceed the model's ``block_size``.
        batch_size: Windows in a batch of one rank.
        train_bytes: Size limit of the training text; None takes all of it.
        val_bytes: Size limit of the validation text; None takes all of it.
        num_workers: Loader processes of each rank; 0 loads in the rank itself, which is quick enough for bytes.
        root: Folder to read ``.py`` files from instead of the standard library.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 8,
        train_bytes: int | None = 4_000_000,
        val_bytes: int | None = 200_000,
        num_workers: int = 0,
        root: str | None = None,
    ) -> None:
        super().__init__()
        self.block_size, self.batch_size, self.num_workers = block_size, batch_size, num_workers
        self.train_bytes, self.val_bytes = train_bytes, val_bytes
        self.root = Path(root) if root else None

    def setup(self, stage: str) -> None:
        training, validation = split_files(stdlib_files(self.root))
        if stage == "fit":
            self.train_set = ByteWindows(read_bytes(training, self.train_bytes), self.block_size)
        self.val_set = ByteWindows(read_bytes(validation, self.val_bytes), self.block_size)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self.val_dataloader()
