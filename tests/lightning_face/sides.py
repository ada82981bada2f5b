"""Runs the same small trainings under ``strategy="cann_ft"`` and under Lightning's own ``ddp``, in real processes.

    ours, theirs = run_ours(2, CASES), run_ddp(2, CASES)      # rank -> case -> what the case returned

A case is a module-level function ``case(side) -> dict``: it makes trainers with ``side.trainer(...)`` and returns what
is to be compared, as plain picklable values.  All cases of a list run one after the other in the same W processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.support.job import PRELOAD, record, run_job
from tests.support.training import quiet_trainer

Case = Callable[["Side"], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Side:
    """Where a case runs: ``ours`` or stock DDP, as which of how many ranks, and in a folder that ranks share."""

    ours: bool
    rank: int
    world_size: int
    folder: Path

    def strategy(self, unused: bool = False) -> str:
        name = "cann_ft" if self.ours else "ddp"
        return f"{name}_find_unused_parameters_true" if unused else name

    def trainer(self, unused: bool = False, **options: Any) -> pl.Trainer:
        defaults = {"strategy": self.strategy(unused), "devices": self.world_size, "default_root_dir": str(self.folder)}
        return quiet_trainer(**{**defaults, **options})


class Observed(pl.LightningModule):
    """A module that keeps what a user would see: its losses and its learning rates, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.calls: list[str] = []

    def saw(self, loss: torch.Tensor) -> torch.Tensor:
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        optimizers = self.trainer.optimizers
        self.rates.append(optimizers[0].param_groups[0]["lr"] if optimizers else 0.0)


def tensors_hash(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the bytes of ``tensors``."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def optimizer_hash(trainer: pl.Trainer) -> str:
    """SHA-256 of all tensors in all optimizers' states, to the bit."""
    tensors = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                tensors += [value for _, value in sorted(state.items()) if torch.is_tensor(value)]
    return tensors_hash(tensors)


def observe(trainer: pl.Trainer, model: Observed, **more: Any) -> dict[str, Any]:
    """What both sides must agree on after a fit.  Names that begin with ``my_`` may differ between ranks."""
    return {
        "my_losses": list(model.losses),
        "rates": list(model.rates),
        "weights": tensors_hash(model.parameters()),
        "my_buffers": tensors_hash(model.buffers()),  # DDP copies rank 0's before a forward, not after the last one
        "optimizers": optimizer_hash(trainer),
        "my_metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "stopped": trainer.should_stop,
        **more,
    }


def run_cases(ours: bool, cases: Sequence[Case], give: Callable[[Any], None], rank: int, world_size: int) -> None:
    """In a rank process: runs ``cases`` and hands over all results so far after each."""
    results: dict[str, Any] = {}
    for case in cases:
        folder = Path(f"{case.__name__}-files").resolve()
        folder.mkdir(exist_ok=True)
        pl.seed_everything(1, verbose=False)
        try:
            results[case.__name__] = case(Side(ours, rank, world_size, folder))
        except BaseException:
            results[case.__name__] = {"error": traceback.format_exc()}
            give(results)
            raise
        give(results)


def _in_our_rank(cases: Sequence[Case]) -> None:
    rank, world_size = int(os.environ["CANN_FT_RANK"]), int(os.environ["CANN_FT_WORLD_SIZE"])
    run_cases(True, cases, record, rank, world_size)


def run_ours(world_size: int, cases: Sequence[Case], **settings: Any) -> dict[int, dict[str, Any]]:
    """Rank -> case name -> result, under the agent; cases that were not reached are missing."""
    result = run_job(_in_our_rank, world_size, (list(cases),), **settings)
    values = {rank: dict(result.values.get(rank, {})) for rank in range(world_size)}
    if result.code:
        for found in values.values():
            found.setdefault("failure", result.failure)
    return values


def _in_ddp_rank(folder: str, path: list[str], rank: int, world_size: int, port: int, cases: Sequence[Case]) -> None:
    sys.path[:] = path
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size)
    )
    os.chdir(folder)
    torch.set_num_threads(1)

    def give(value: Any) -> None:
        Path(folder, f"value.{rank}").write_bytes(pickle.dumps(value))

    run_cases(False, cases, give, rank, world_size)
    torch.distributed.destroy_process_group()


def run_ddp(world_size: int, cases: Sequence[Case]) -> dict[int, dict[str, Any]]:
    """The same under Lightning's ``ddp``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="cann-ft-ddp-") as folder:
        arguments = [(folder, list(sys.path), rank, world_size, port, list(cases)) for rank in range(world_size)]
        processes = [context.Process(target=_in_ddp_rank, args=a) for a in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:  # the others would wait for it until their time-out
                for other in processes:
                    other.kill()
        files = {rank: Path(folder, f"value.{rank}") for rank in range(world_size)}
        return {rank: pickle.loads(f.read_bytes()) if f.exists() else {} for rank, f in files.items()}


def assert_ranks_agree(values: dict[int, dict[str, Any]], case: str) -> None:
    """All ranks returned the same, but for what is each rank's own (``my_...``)."""
    shared = []
    for rank, found in values.items():
        assert case in found, f"rank {rank} never finished {case}: {found.get('failure') or list(found)[-1:]}"
        assert "error" not in found[case], f"rank {rank}: {found[case]['error']}"
        shared.append({key: value for key, value in found[case].items() if not key.startswith("my_")})
    for rank, other in enumerate(shared[1:], 1):
        assert other == shared[0], f"{case}: rank {rank} differs from rank 0"


def assert_same(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]], case: str) -> None:
    """What ``case`` returned is equal on both sides, rank by rank, to the bit."""
    assert_ranks_agree(ours, case)
    assert_ranks_agree(theirs, case)
    for rank in ours:
        assert ours[rank][case].keys() == theirs[rank][case].keys()
        for key, value in theirs[rank][case].items():
            assert ours[rank][case][key] == value, f"{case}, rank {rank}: {key} is not what ddp gives"
