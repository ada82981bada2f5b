"""What every communication backend must do: one class, run for each backend that this machine has.

The members of a group are threads of this process; a store as a view has it (keys go to all members, nobody hosts it)
brings them together.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cann.collectives.backend import get_backend
from lightning_cann.collectives.store import ViewStore
from lightning_cann.errors import ConfigurationError

CONNECT_S = 10.0
TIMEOUT = timedelta(seconds=60)
FAST_S = 5.0  # "at once", on a loaded machine; far below TIMEOUT


def missing(name: str) -> str | None:
    """Why a backend cannot be tested here."""
    if name == "gloo":
        return None if dist.is_gloo_available() else "torch is built without gloo"
    if name == "nccl":
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            return "NCCL needs a CUDA device"
        count = torch.cuda.device_count()
    else:
        try:
            import torch_npu  # noqa: F401
        except ImportError:
            return "HCCL needs torch_npu and an Ascend NPU"
        count = torch.npu.device_count()
    return None if count >= 2 else f"{name} needs one device per member, at least 2; {count} found"


class Members:
    """The members of one view, as threads."""

    def __init__(self, name: str, size: int) -> None:
        self.backend: Any = get_backend(name, torch.device("cpu"))
        self.size = size
        self.threads = ThreadPoolExecutor(size)
        self.stores: list[ViewStore] = []
        self.groups: list[Any] = [None] * size
        self.wakes = [threading.Event() for _ in range(size)]

    def device(self, rank: int) -> torch.device:
        kind = self.backend.device_type
        return torch.device(kind, rank) if kind != "cpu" else torch.device(kind)

    def each(self, function: Callable[[int], Any], ranks: Any = None) -> list[Any]:
        """``function(rank)`` at all ``ranks`` at the same time; results, or the exceptions, in order."""

        def guarded(rank: int) -> Any:
            try:
                return function(rank)
            except RuntimeError as error:
                return error

        return list(self.threads.map(guarded, range(self.size) if ranks is None else ranks))

    def connect(self, ranks: Any = None) -> list[Any]:
        """A new group of ``ranks``; those in the way of an exception get None."""
        there = list(range(self.size)) if ranks is None else list(ranks)

        def publish(key: str, value: bytes) -> None:
            for store in self.stores:
                store.deliver(key, value)

        self.stores = [ViewStore(publish, CONNECT_S) for _ in there]
        limit = timedelta(seconds=CONNECT_S)
        self.groups = [None] * self.size

        def create(rank: int) -> Any:
            if self.backend.device_type != "cpu":
                getattr(torch, self.backend.device_type).set_device(rank)
            index = there.index(rank)
            return self.backend.create(self.stores[index], index, len(there), "127.0.0.1", limit)

        found = self.each(create, there)
        for rank, group in zip(there, found, strict=True):
            self.groups[rank] = group if not isinstance(group, Exception) else None
        return found

    def destroy(self, rank: int) -> None:
        group, self.groups[rank] = self.groups[rank], None
        if group is not None:
            self.backend.destroy(group)

    def all_reduce(self, rank: int, value: float, n: int = 1000, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        tensor = torch.full((n,), value, device=self.device(rank))
        work = self.backend.all_reduce(self.groups[rank], tensor, op, TIMEOUT)
        assert self.backend.wait(work, self.wakes[rank], lambda: False)
        return tensor.cpu()

    def close(self) -> None:
        self.each(self.destroy)
        self.threads.shutdown()
        gc.collect()


@pytest.fixture(params=[name for name in ("gloo", "nccl", "hccl") if missing(name) is None])
def members(request: pytest.FixtureRequest) -> Any:
    kinds = {"nccl": "cuda", "hccl": "npu"}
    size = 3 if request.param == "gloo" else min(3, getattr(torch, kinds[request.param]).device_count())
    found = Members(request.param, size)
    yield found
    found.close()


class TestBackend:
    def test_all_reduce(self, members: Members) -> None:
        assert not any(isinstance(x, Exception) for x in members.connect())
        n = members.size
        for op, expected in ((dist.ReduceOp.SUM, sum(range(1, n + 1))), (dist.ReduceOp.MAX, n)):
            for tensor in members.each(lambda rank, op=op: members.all_reduce(rank, rank + 1.0, op=op)):
                assert tensor.tolist() == [expected] * 1000

    def test_several_under_way_are_launched_in_order_and_waited_for_in_any(self, members: Members) -> None:
        members.connect()

        def run(rank: int) -> list[float]:
            tensors = [torch.full((10**k,), float(rank * k + 1), device=members.device(rank)) for k in range(5)]
            sums = [members.backend.all_reduce(members.groups[rank], t, dist.ReduceOp.SUM, TIMEOUT) for t in tensors]
            for work in reversed(sums):
                assert members.backend.wait(work, members.wakes[rank], lambda: False)
            return [float(t.min()) for t in tensors]

        n = members.size
        assert members.each(run) == [[k * n * (n - 1) / 2 + n for k in range(5)]] * n

    def test_all_gather(self, members: Members) -> None:
        members.connect()

        def run(rank: int) -> list[list[int]]:
            mine = torch.tensor([rank, 10 * rank], dtype=torch.int64, device=members.device(rank))
            rows = [torch.empty_like(mine) for _ in range(members.size)]
            work = members.backend.all_gather(members.groups[rank], rows, mine, TIMEOUT)
            assert members.backend.wait(work, members.wakes[rank], lambda: False)
            return [row.tolist() for row in rows]

        assert members.each(run) == [[[r, 10 * r] for r in range(members.size)]] * members.size

    def test_broadcast(self, members: Members) -> None:
        members.connect()

        def run(rank: int) -> list[int]:
            tensor = torch.full((5,), rank, dtype=torch.uint8, device=members.device(rank))
            work = members.backend.broadcast(members.groups[rank], tensor, 1, TIMEOUT)
            assert members.backend.wait(work, members.wakes[rank], lambda: False)
            return tensor.tolist()

        assert members.each(run) == [[1] * 5] * members.size

    def test_wait_can_be_interrupted(self, members: Members) -> None:
        """The last member never comes: the others wait until they are told that the view is broken."""
        members.connect()
        last = members.size - 1
        broken = threading.Event()
        waiting = threading.Barrier(last + 1)

        def run(rank: int) -> Any:
            if rank == last:
                waiting.wait(FAST_S)
                broken.set()
                for wake in members.wakes:
                    wake.set()
                return time.monotonic()
            tensor = torch.ones(1000, device=members.device(rank))
            work = members.backend.all_reduce(members.groups[rank], tensor, dist.ReduceOp.SUM, TIMEOUT)
            waiting.wait(FAST_S)
            assert members.backend.wait(work, members.wakes[rank], broken.is_set) is False
            return time.monotonic()

        *stopped, told = members.each(run)
        assert all(at - told < FAST_S for at in stopped), (stopped, told)

    def test_a_wake_without_a_break_is_no_interruption(self, members: Members) -> None:
        members.connect()
        last = members.size - 1
        waiting = threading.Barrier(last + 1)

        def run(rank: int) -> Any:
            tensor = torch.ones(1000, device=members.device(rank))
            if rank == last:
                waiting.wait(FAST_S)
                for wake in members.wakes:
                    wake.set()
            work = members.backend.all_reduce(members.groups[rank], tensor, dist.ReduceOp.SUM, TIMEOUT)
            if rank != last:
                waiting.wait(FAST_S)
            return members.backend.wait(work, members.wakes[rank], lambda: False), float(tensor.sum())

        assert members.each(run) == [(True, 1000.0 * members.size)] * members.size

    def test_destroy_fails_the_peers_at_once(self, members: Members) -> None:
        members.connect()
        members.each(lambda rank: members.all_reduce(rank, 1.0))  # all connections are in use
        last = members.size - 1
        waiting = threading.Barrier(last + 1)

        def run(rank: int) -> Any:
            if rank == last:
                waiting.wait(FAST_S)
                members.destroy(rank)
                return time.monotonic()
            tensor = torch.ones(1000, device=members.device(rank))
            work = members.backend.all_reduce(members.groups[rank], tensor, dist.ReduceOp.SUM, TIMEOUT)
            waiting.wait(FAST_S)
            with pytest.raises(RuntimeError):
                members.backend.wait(work, members.wakes[rank], lambda: False)
            del work
            # a view drops its group when it breaks: the failure travels on to those who are not its neighbours
            members.destroy(rank)
            return time.monotonic()

        started = time.monotonic()
        assert all(at - started < FAST_S for at in members.each(run))

    def test_rebuild_with_those_that_are_left(self, members: Members) -> None:
        members.connect()
        members.each(lambda rank: members.all_reduce(rank, 1.0))
        left = list(range(1, members.size))
        members.each(members.destroy)
        assert not any(isinstance(x, Exception) for x in members.connect(left))
        for tensor in members.each(lambda rank: members.all_reduce(rank, float(rank)), left):
            assert tensor.tolist() == [float(sum(left))] * 1000

    def test_a_cancelled_store_ends_the_construction(self, members: Members) -> None:
        """A member dies before it connects; the view is given up; construction must not wait for its time-out."""
        store = ViewStore(lambda key, value: None, timeout_s=600.0)
        threading.Timer(0.2, store.cancel, ("a new view is proposed",)).start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="the view is no more"):
            members.backend.create(store, 0, members.size, "127.0.0.1", timedelta(seconds=600))
        assert time.monotonic() - started < FAST_S


def test_unknown_backend() -> None:
    with pytest.raises(ConfigurationError, match="process_group_backend='mpi'"):
        get_backend("mpi", torch.device("cpu"))


@pytest.mark.parametrize(("device", "name"), [("cpu", "gloo"), ("cuda", "nccl"), ("meta", "gloo")])
def test_backend_by_device(device: str, name: str) -> None:
    assert get_backend(None, torch.device(device)).name == name
