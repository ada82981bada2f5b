"""Gradient reducer against DistributedDataParallel: two gloo processes on this machine, alternating short blocks.

    python benchmarks/_reducer_micro.py

Prints, per model, the medians over blocks of forward + backward wall time and of CPU time per step (gloo's threads
included), and the median of the paired wall ratios (below 1: the reducer is faster).  CPU time is the steadier one.
"""

from __future__ import annotations

import copy
import gc
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cann.ddp import GradientReducer, StepOutcome, StepTransaction

# name, layers, width, batch size, blocks, steps per block
MODELS = [("1M/100 tensors", 50, 140, 16, 60, 6), ("80k/150 tensors", 75, 32, 8, 60, 6), ("25M", 12, 1440, 8, 20, 2)]


class Deep(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class FixedGroup:
    def __init__(self) -> None:
        self.group = dist.distributed_c10d._get_default_group()

    def eager(self) -> bool:
        return True

    def size(self) -> int:
        return dist.get_world_size()

    def all_reduce(self, flat: Tensor) -> dist.Work:
        return self.group.allreduce([flat])

    def commit(self, step: StepTransaction) -> StepOutcome:
        for work in step.pending() or ():
            work.wait()
        return StepOutcome(contributors=self.size(), members=self.size())


def compare(rank: int, name: str, layers: int, width: int, batch: int, blocks: int, steps: int) -> None:
    torch.manual_seed(0)
    ours = Deep(layers, width)
    theirs = copy.deepcopy(ours)
    reducer, ddp = GradientReducer(ours.named_parameters(), FixedGroup()), DistributedDataParallel(theirs)
    x = torch.randn(batch, width)
    runs: dict[str, Callable[[], Tensor]] = {"ours": lambda: ours(x), "ddp": lambda: ddp(x)}
    wall: dict[str, list[float]] = {"ours": [], "ddp": []}
    cpu: dict[str, list[float]] = {"ours": [], "ddp": []}
    for block in range(blocks + 1):  # the first block warms up and rebuilds the buckets
        for kind in sorted(runs, reverse=bool(block % 2)):
            dist.barrier()
            times, before = [], time.process_time()
            for _ in range(steps):
                start = time.perf_counter()
                runs[kind]().backward()
                times.append(time.perf_counter() - start)
                (ours if kind == "ours" else theirs).zero_grad()
            if block:
                wall[kind].append(statistics.median(times) * 1e3)
                cpu[kind].append((time.process_time() - before) / steps * 1e3)
        if reducer.needs_rebuild():
            reducer.rebuild(reducer.last_ready_order)  # one model: the same order everywhere
    if rank == 0:
        paired = statistics.median(a / b for a, b in zip(wall["ours"], wall["ddp"], strict=True))
        cpu_paired = statistics.median(a / b for a, b in zip(cpu["ours"], cpu["ddp"], strict=True))
        print(f"{name:16} paired wall {paired:.3f} cpu {cpu_paired:.3f}", end="")
        for kind in runs:
            print(f" | {kind} {statistics.median(wall[kind]):.2f} ms, cpu {statistics.median(cpu[kind]):.2f}", end="")
        print(flush=True)
    reducer.remove()


def main(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for row in MODELS:
        compare(rank, *row)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(main, (free,), nprocs=2)
