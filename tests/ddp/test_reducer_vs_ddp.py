"""The reducer against DistributedDataParallel in real gloo processes: every gradient bit must be equal."""

from __future__ import annotations

import copy
import gc
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_cann.ddp import GradientReducer, StepOutcome, StepTransaction, buffers_to_sync, pack, unpack

CAP_MB = 0.004  # about 1000 floats: several buckets in small models
STEPS = 4


class PlainTransport:
    """A fixed process group; the first ``failures`` attempts of every step end in garbage."""

    def __init__(self, *, eager: bool = True, failures: int = 0) -> None:
        self.is_eager, self.failures = eager, failures
        self.launches: list[int] = []
        self.group = dist.distributed_c10d._get_default_group()

    def eager(self) -> bool:
        return self.is_eager

    def size(self) -> int:
        return dist.get_world_size()

    def all_reduce(self, flat: Tensor) -> dist.Work:
        assert flat.numel() > 0
        self.launches.append(flat.numel())
        return self.group.allreduce([flat])

    def commit(self, step: StepTransaction) -> StepOutcome:
        works = step.pending()
        for attempt in range(self.failures + 1):
            if works is None or attempt:
                works = step.launch(self)
            for work in works:
                work.wait()
            if attempt < self.failures:
                for flat in step.results():
                    flat.fill_(77)  # what an aborted collective may leave behind
        return StepOutcome(contributors=self.size(), members=self.size())


class Net(nn.Module):
    """Several buckets, an odd-sized layer, a batch norm, a frozen, a tied and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(13, 37), nn.BatchNorm1d(37), nn.Linear(37, 37)
        self.c, self.head = nn.Linear(37, 37, bias=False), nn.Linear(37, 5)
        self.c.weight = self.b.weight
        self.head.bias.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.rest = nn.ModuleList(nn.Linear(37, 37) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))))))
        for layer in self.rest:
            x = torch.relu(layer(x)) + x
        return self.head(x).square().mean() + self.empty.sum()


class Conv(nn.Module):
    """Channels-last weights (the bucket keeps their strides) beside bfloat16 and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.low = nn.Linear(8, 31, dtype=torch.bfloat16)
        self.high = nn.Linear(31, 7, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 3, 5, 5).to(memory_format=torch.channels_last)).mean(dim=(2, 3))
        return self.high(self.low(x.bfloat16()).double()).square().mean()


class Branches(nn.Module):
    """Which branch is used depends on rank and step; the last branch never is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(13, 29)
        self.branches = nn.ModuleList(nn.Linear(29, 29) for _ in range(5))

    def forward(self, x: Tensor, *which: int) -> Tensor:
        x = self.stem(x)
        return sum((self.branches[w](x).square().mean() for w in which), x.mean())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return x.square().mean()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _worker(rank: int, world: int, port: int, bodies: Sequence[Callable[[int, int], None]]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for body in bodies:
        body(rank, world)
        gc.collect()  # a process group that is destroyed at interpreter exit aborts
        dist.barrier()
    dist.destroy_process_group()


def twins(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module, DistributedDataParallel]:
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    return ours, theirs, DistributedDataParallel(theirs, forward_sync_buffers=False, **options)


def assert_same(ours: nn.Module, theirs: nn.Module, where: str) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{where}: {name}: {p.grad is None} {q.grad is None}"
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad), f"{where}: {name} differs by {(p.grad - q.grad).abs().max()}"
            assert p.grad.stride() == q.grad.stride(), f"{where}: {name}"


def broadcast_order(reducer: GradientReducer) -> None:
    if reducer.needs_rebuild():
        order = torch.tensor(reducer.last_ready_order)
        dist.broadcast(order, 0)
        reducer.rebuild(order.tolist())
        assert not reducer.needs_rebuild()


def batch(rank: int, step: int, width: int = 13) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(100 * step + rank))


def _same_bits(rank: int, world: int, make: Callable[[], nn.Module], width: int, cap: float | None, kind: str) -> None:
    ours, theirs, ddp = twins(make, bucket_cap_mb=cap)
    transport = PlainTransport(eager=kind != "lazy", failures=2 if kind == "redo" else 0)
    reducer = GradientReducer(ours.named_parameters(), transport, bucket_cap_mb=cap, retain=kind != "no-retain")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    sizes = []
    for step in range(STEPS):
        x = batch(rank, step, width)
        broadcast_order(reducer)
        transport.launches.clear()
        ours(x).backward()
        sizes.append(transport.launches[: len(reducer.layout.buckets)])
        ddp(x).backward()
        assert_same(ours, theirs, f"{make.__name__} step {step}")
        assert any(p.grad.abs().sum() > 0 for p in ours.parameters() if p.grad is not None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    if cap is not None and make is Net:
        assert len(sizes[0]) == 1 and len(sizes[1]) > 3, sizes
    logged = ddp._get_ddp_logging_data()
    if make is not Checkpointed and cap is not None:
        assert logged["has_rebuilt_buckets"] == 1
    reducer.remove()
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())


def _many_same_bits(rank: int, world: int) -> None:
    for kind in ("eager", "lazy", "redo", "no-retain"):
        _same_bits(rank, world, Net, 13, CAP_MB, kind)
    _same_bits(rank, world, Net, 13, None, "eager")
    _same_bits(rank, world, Conv, 75, CAP_MB, "eager")
    _same_bits(rank, world, Checkpointed, 13, CAP_MB, "eager")


def _accumulate(rank: int, world: int) -> None:
    ours, theirs, ddp = twins(Net, bucket_cap_mb=CAP_MB)
    reducer = GradientReducer(ours.named_parameters(), PlainTransport(), bucket_cap_mb=CAP_MB)
    for step in range(STEPS):
        for micro in range(3):
            x = batch(rank, 10 * step + micro)
            broadcast_order(reducer)
            if micro < 2:
                with reducer.no_sync():
                    ours(x).backward()
                with ddp.no_sync():
                    ddp(x).backward()
            else:
                ours(x).backward()
                ddp(x).backward()
            assert_same(ours, theirs, f"step {step}.{micro}")
        if step % 2:  # a second synchronised backward in the same optimizer step
            x = batch(rank, 500 + step)
            ours(x).backward()
            ddp(x).backward()
            assert_same(ours, theirs, f"step {step} twice")
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad = None


def _unused(rank: int, world: int) -> None:
    for failures in (0, 1):
        ours, theirs, ddp = twins(Branches, bucket_cap_mb=CAP_MB, find_unused_parameters=True)
        transport = PlainTransport(failures=failures)
        reducer = GradientReducer(ours.named_parameters(), transport, bucket_cap_mb=CAP_MB, find_unused_parameters=True)
        assert len(reducer.layout.buckets) > 2
        for step in range(6):
            which = [(0, 1), (1,), (2, 3)][(rank + step) % 3] if step != 2 else (0,)
            if step == 4:  # a parameter that only the accumulating backward uses
                with reducer.no_sync():
                    ours(batch(rank, 90), 3, 1).backward()
                with ddp.no_sync():
                    ddp(batch(rank, 90), 3, 1).backward()
                which = (0,)
            ours(batch(rank, step), *which).backward()
            ddp(batch(rank, step), *which).backward()
            assert_same(ours, theirs, f"unused step {step}")
            assert ours.branches[4].weight.grad is None
            assert not reducer.needs_rebuild()
            if step != 1:  # stale gradients of then unused parameters, too
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                    p.grad = q.grad = None


def _buffers(rank: int, world: int) -> None:
    module = Net()
    module.register_buffer("count", torch.arange(3) + rank, persistent=False)
    module(batch(rank, 0))
    tensors = buffers_to_sync(module)
    assert len(tensors) == len(list(module.buffers()))
    flats = pack(tensors)
    assert sorted(str(f.dtype) for f in flats) == ["torch.float32", "torch.int64"]
    for flat in flats:
        dist.broadcast(flat, 0)
    unpack(flats, tensors)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, [b.tolist() for b in module.buffers()])
    assert gathered[0] == gathered[1]
    assert module.count.tolist() == [0, 1, 2]


class PartialTransport(PlainTransport):
    """``silent`` contributes nothing; ``laggard`` never completes by itself and is served the result by member 0."""

    def __init__(self, *, silent: int, laggard: int, rank: int) -> None:
        super().__init__()
        self.silent, self.laggard, self.rank = silent, laggard, rank

    def commit(self, step: StepTransaction) -> StepOutcome:
        for work in step.pending() or step.launch(self):
            work.wait()
        served = [torch.empty_like(r) for r in step.results()]
        if self.rank == self.laggard:
            for flat in step.results():
                flat.fill_(55)
        for mine, flat in zip(step.results(), served, strict=True):
            if self.rank == 0:
                flat.copy_(mine)
            dist.broadcast(flat, 0)
        if self.rank == self.laggard:
            step.load(served)
        return StepOutcome(contributors=self.size() - 1, members=self.size())


def _partial(rank: int, world: int) -> None:
    silent, laggard = 1, 2
    torch.manual_seed(0)
    ours = Net()
    reducer = GradientReducer(
        ours.named_parameters(), PartialTransport(silent=silent, laggard=laggard, rank=rank), bucket_cap_mb=CAP_MB
    )
    for step in range(STEPS):
        broadcast_order(reducer)
        reducer.contributing = rank != silent
        if rank == silent and step % 2:
            reducer.finalize()  # it has no data left: no forward, no backward
        else:
            ours(batch(rank, step)).backward()
        got = [p.grad for p in reducer.params]
        expected = []
        for member in (0, 2):
            twin = copy.deepcopy(ours)
            twin.zero_grad()
            twin(batch(member, step)).backward()
            expected.append([p.grad for p in twin.parameters() if p.requires_grad and p.numel()])
        for name, mean, a, b in zip(reducer.names, got, *expected, strict=True):
            torch.testing.assert_close(mean, (a + b) / 2, msg=lambda m, n=name: f"{n}: {m}")
        flat = torch.cat([g.reshape(-1) for g in got if g is not None])
        everywhere = [torch.empty_like(flat) for _ in range(world)]
        dist.all_gather(everywhere, flat)
        assert all(torch.equal(flat, other) for other in everywhere)
        ours.zero_grad()


BODIES: dict[int, list[Callable[[int, int], None]]] = {
    2: [_many_same_bits, _buffers, _unused],
    3: [_many_same_bits, _accumulate, _unused, _partial],
    4: [_many_same_bits, _accumulate],
}


@pytest.mark.parametrize("world", sorted(BODIES))
def test_like_ddp(world: int) -> None:
    """One set of processes per size (starting them costs most); the traceback of a failure names the body."""
    mp.spawn(_worker, (world, _free_port(), BODIES[world]), nprocs=world)
