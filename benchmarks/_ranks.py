"""What the benchmarks run in rank processes: models, data, and Lightning trainers under ``cann_ft`` and under ``ddp``.

Not a user's example: data cost nothing, nothing is logged, and one torch thread per process is used.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._common import dial
from lightning_cann.launch.agent import Agent, AgentSettings
from lightning_cann.launch.processes import FunctionStarter
from lightning_cann.settings import FaultToleranceSettings

PRELOAD = ["lightning.pytorch", "lightning_cann.strategies.fault_tolerant", "benchmarks._ranks"]


# ---------------------------------------------------------------------------------------------- models and data
class _Gpt(nn.Module):
    """A small GPT over bytes: about 1M parameters in 65 tensors."""

    def __init__(self, width: int = 128, layers: int = 5, length: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", torch.ones(length, length).tril().logical_not(), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(batch) + self.place, mask=self.mask)
        return nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class _Mlp(nn.Module):
    """A plain MLP; with the sizes below 85k, or 24.9M parameters."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


# name -> (model, one sample, batch size per rank)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mlp-85k": (lambda: _Mlp(64, 256, 256, 10), lambda: torch.randn(64), 32),
    "gpt-1M": (_Gpt, lambda: torch.randint(0, 256, (32,)), 4),
    "mlp-25M": (lambda: _Mlp(1024, 2560, 2560, 2560, 2560, 1024), lambda: torch.randn(1024), 16),
}


class _Samples(Dataset):
    """``n`` samples out of a pool of 64, which are there from the start."""

    def __init__(self, n: int, sample: Callable[[], Tensor]) -> None:
        self._n, self._pool = n, [sample() for _ in range(64)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Tensor:
        return self._pool[index % 64]


class Module(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = MODELS[name][0]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def loader(name: str, world_size: int, steps: int) -> DataLoader:
    """Batches for ``steps`` steps of ``world_size`` ranks."""
    _, sample, batch_size = MODELS[name]
    return DataLoader(_Samples(steps * world_size * batch_size, sample), batch_size=batch_size)


def prepare() -> None:
    """Settings of every rank process, ours and the peers'."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pl.seed_everything(1, verbose=False)


def fit(name: str, world_size: int, steps: int, strategy: Any, callback: pl.Callback) -> None:
    """Trains until the callback stops it; an epoch is ``steps`` long."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=-1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(name), loader(name, world_size, steps))


# ---------------------------------------------------------------------------------------------- jobs
def run_agent(path: list[str], world_size: int, settings: dict[str, Any], target: Any, args: tuple[Any, ...]) -> None:
    """The agent's process: runs ``target(*args)`` under ``cann_ft`` in ``world_size`` ranks, restarts without limit."""
    sys.path[:] = path
    chosen = FaultToleranceSettings(max_failures=None, **settings)
    agent = Agent(
        AgentSettings(
            coordinator=chosen.coordinator_settings(world_size), nproc=world_size, grace_s=10.0, show_events=False
        ),
        FunctionStarter(target, args, method="forkserver", preload=PRELOAD),
    )
    code = agent.run()
    if code:
        sys.stderr.write(f"the cann_ft job failed: {agent.failure}\n")
    sys.exit(code)


def start_agent(world_size: int, settings: dict[str, Any], target: Any, args: tuple[Any, ...]) -> Any:
    """Starts :func:`run_agent` in a process of its own, which takes everything with it when it ends."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_agent, args=(list(sys.path), world_size, settings, target, args)
    )
    process.start()
    return process


def start_ddp(world_size: int, port: int, target: Any, args: tuple[Any, ...]) -> list[Any]:
    """Starts ``target(*args)`` in ``world_size`` processes that Lightning's ``ddp`` takes as started from outside."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = []
    for rank in range(world_size):
        process = context.Process(target=_ddp_rank, args=(rank, world_size, port, target, args), daemon=True)
        process.start()
        processes.append(process)
    return processes


def _ddp_rank(rank: int, world_size: int, port: int, target: Any, args: tuple[Any, ...]) -> None:
    # A session per rank, as under our agent: Linux shares processor time between sessions first (autogroup), so on a
    # busy machine ranks that share one would be given less.
    os.setsid()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), NODE_RANK="0"
    )
    target(*args)


# ---------------------------------------------------------------------------------------------- step_overhead
class Blocks(pl.Callback):
    """Runs blocks of steps when told to, and waits in between, blocked on the line.

    For each block the driver gets the durations of its steps (seconds, batch end to batch end: loading, forward,
    backward, optimizer and all that the strategy does) and the processor time of one step (all threads).
    """

    def __init__(self, line: Any, warm_up: int) -> None:
        self._line, self._left = line, warm_up
        self._stamps: list[float] = []
        self._cpu = 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._stamps.append(time.perf_counter())
        self._left -= 1
        if self._left:
            return
        stamps, cpu = self._stamps, time.process_time() - self._cpu
        self._line.send(([b - a for a, b in itertools.pairwise(stamps)], cpu / len(stamps)))
        self._left = self._line.recv()
        if not self._left:
            trainer.should_stop = True
        self._stamps, self._cpu = [], time.process_time()


def blocks_rank(job: str, path: str, name: str, world_size: int, warm_up: int, steps: int) -> None:
    """One rank of the benchmark ``step_overhead``; ``steps``: more than will be asked for."""
    prepare()
    rank = int(os.environ.get("CANN_FT_RANK", os.environ["LOCAL_RANK"]))
    line = dial(path, job, rank)
    strategy = "cann_ft" if job == "cann_ft" else DDPStrategy(process_group_backend="gloo")
    fit(name, world_size, steps, strategy, Blocks(line, warm_up))


# ---------------------------------------------------------------------------------------------- recovery
class Stamps:
    """When each rank completed each step, in memory that all processes share (a sparse file).

    Args:
        path: the file; made if it is not there.
        world_size: number of ranks.

    Attributes:
        latest: int64 (world_size,): last step of each rank.
        stop: int64 (1,): step at which the job is to end.
        time: float64 (world_size, CAPACITY): CLOCK_MONOTONIC of the completion of a step (seconds).
        view: int64 (world_size, CAPACITY): the view, or attempt, in which it was completed.
    """

    CAPACITY = 1 << 20

    def __init__(self, path: str, world_size: int) -> None:
        head, block = 4096, world_size * self.CAPACITY * 8
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.truncate(head + 2 * block)
        shape = (world_size, self.CAPACITY)
        self.latest = np.memmap(path, np.int64, "r+", 0, (world_size,))
        self.stop = np.memmap(path, np.int64, "r+", 2048, (1,))
        self.time = np.memmap(path, np.float64, "r+", head, shape)
        self.view = np.memmap(path, np.int64, "r+", head + block, shape)

    def write(self, rank: int, step: int, now: float, view: int) -> None:
        self.time[rank, step], self.view[rank, step] = now, view
        self.latest[rank] = step

    def stopped(self, step: int) -> bool:
        return bool(0 < self.stop[0] <= step)


class StepStamps(pl.Callback):
    """Stamps each committed step; tells the driver of the first one of this process."""

    def __init__(self, line: Any, stamps: Stamps, rank: int) -> None:
        self._line, self._stamps, self._rank, self._told = line, stamps, rank, False

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        now, step = time.monotonic(), trainer.global_step
        view = trainer.strategy._group.view.id.number
        self._stamps.write(self._rank, step, now, view)
        if not self._told:
            self._told = True
            self._line.send(("first", step, now, view))
        if self._stamps.stopped(step):
            trainer.should_stop = True


def recovery_rank(path: str, stamps: str, name: str, world_size: int, lease_s: float) -> None:
    """One rank of the benchmark ``recovery`` under ``cann_ft``."""
    from lightning_cann.strategies import FaultTolerantStrategy

    prepare()
    rank = int(os.environ["CANN_FT_RANK"])
    line = dial(path, "cann_ft", rank)
    strategy = FaultTolerantStrategy(lease_s=lease_s, max_failures=None)
    fit(name, world_size, 2000, strategy, StepStamps(line, Stamps(stamps, world_size), rank))


def torchrun_rank(folder: str, name: str) -> None:
    """One worker under torchrun: DDP on gloo in a plain loop, a checkpoint by rank 0 every 10 steps, resume from it.

    Goes on until it is killed.
    """
    prepare()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    line = dial(os.path.join(folder, "line"), "torchrun", rank)
    stamps = Stamps(os.path.join(folder, "torchrun.stamps"), world_size)
    lost = int(stamps.latest.max())  # the last step of the attempt before: all its workers have ended
    torch.distributed.init_process_group("gloo")
    model = MODELS[name][0]()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpoint, step = os.path.join(folder, "checkpoint.pt"), 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    first = step + 1
    batches = list(loader(name, 1, 8))
    while True:
        loss = ddp(batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.monotonic()
        stamps.write(rank, step, now, attempt)
        if step == first:
            line.send(("first", step, now, attempt))
        if step == lost + 1:
            line.send(("past", step, now, attempt))
        if rank == 0 and step % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)


if __name__ == "__main__":
    torchrun_rank(*sys.argv[1:])
