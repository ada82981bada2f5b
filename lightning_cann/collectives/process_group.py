"""The view as ``torch.distributed``'s default group: what calls ``dist.*`` (torchmetrics, Lightning, users) survives too.

    install_default_group(control)

Its size is the number of members of the current view and a rank is a place in it, lowest logical rank first; both change
when the view does.  Every operation is synchronous and redone until it completes; ``async_op=True`` returns a finished
work.  When a member dies inside an ``all_gather``, the rows of those who are gone are zeros.

Not for speed: gradients go through buckets of their own.  Point-to-point operations are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cann.collectives.control import Control

__all__ = ["ViewProcessGroup", "install_default_group"]

NAME = "cann_ft"


class _FinishedWork(dist._Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class ViewProcessGroup(dist.ProcessGroup):
    """A process group whose membership follows the view.  The method names are c10d's."""

    def __init__(self, control: Control) -> None:
        super().__init__(control.group.rank, control.group.world_size)
        self._control = control

    # ------------------------------------------------------------------------------------------ who
    def size(self) -> int:
        return len(self._control.group.ranks)

    def rank(self) -> int:
        group = self._control.group
        return group.ranks.index(group.rank)

    def getBackendName(self) -> str:
        return NAME

    # ------------------------------------------------------------------------------------------ reductions
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None or not hasattr(opts, "reduceOp") else opts.reduceOp
        for tensor in tensors:
            self._reduce(tensor, op)
        return _FinishedWork(tensors)

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        if op == dist.ReduceOp.AVG:
            ranks = self._control.all_reduce(tensor, dist.ReduceOp.SUM)
            # as Lightning does it under gloo: integers are divided as floats, then cut
            tensor.detach().copy_(tensor.detach() / len(ranks))
        else:
            self._control.all_reduce(tensor, op)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            result = tensor.detach().clone()
            self._reduce(result, opts.reduceOp)
            if self.rank() == opts.rootRank:
                tensor.detach().copy_(result)
        return _FinishedWork(tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            total = torch.stack([part.detach() for part in parts])
            self._reduce(total, opts.reduceOp)
            output.detach().copy_(total[self.rank()])
        return _FinishedWork(outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        total = input.detach().clone()
        self._reduce(total, opts.reduceOp)
        output.detach().copy_(total.view(self.size(), *output.shape)[self.rank()])
        return _FinishedWork([output])

    reduce_scatter_single = _reduce_scatter_base  # the name since torch 2.13

    # ------------------------------------------------------------------------------------------ gathers
    def _rows(self, tensor: Tensor, count: int) -> list[Tensor]:
        """Rows as the caller expects them: one per member of the view in which it called; zeros for those who left."""
        before = self._control.group.ranks
        rows, ranks = self._control.all_gather_tensor(tensor)
        if len(rows) == count:
            return rows
        by_rank = dict(zip(ranks, rows, strict=True))
        return [by_rank.get(rank, torch.zeros_like(tensor)) for rank in before][:count]

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            for target, row in zip(output, self._rows(tensor, len(output)), strict=True):
                target.detach().copy_(row)
        return _FinishedWork(outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        count = output.numel() // max(1, input.numel())
        output.detach().copy_(torch.stack(self._rows(input, count)).view(output.shape))
        return _FinishedWork([output])

    all_gather_single = _allgather_base  # the name since torch 2.13

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        for index, tensor in enumerate(inputs):
            count = len(outputs[index]) if outputs else self.size()
            rows = self._rows(tensor, count)
            if outputs:
                for target, row in zip(outputs[index], rows, strict=True):
                    target.detach().copy_(row)
        return _FinishedWork(outputs)

    # ------------------------------------------------------------------------------------------ from one to many
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = 0 if opts is None or not hasattr(opts, "rootRank") else opts.rootRank
        self._control.broadcast_tensors([t.detach() for t in tensors], src=self._control.group.ranks[root])
        return _FinishedWork(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        root = self._control.group.ranks[opts.rootRank]
        for index, output in enumerate(outputs):
            parts = self._control.broadcast([p.cpu() for p in inputs[index]] if inputs else None, src=root)
            output.detach().copy_(parts[self.rank()])
        return _FinishedWork(outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        sizes = input_splits or [input.shape[0] // self.size()] * self.size()
        sent = self._control.all_gather([part.cpu() for part in input.detach().split(sizes)])
        output.detach().copy_(torch.cat([parts[self.rank()] for parts in sent.values()]).view(output.shape))
        return _FinishedWork([output])

    all_to_all_single = alltoall_base  # the name since torch 2.13

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        sent = self._control.all_gather([part.detach().cpu() for part in inputs])
        for output, parts in zip(outputs, sent.values(), strict=True):
            output.detach().copy_(parts[self.rank()])
        return _FinishedWork(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self._control.barrier()
        return _FinishedWork([])

    # ------------------------------------------------------------------------------------------ refused
    def _refuse(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"{name} is not available in the fault-tolerant default group: between two ranks nothing can be redone when "
            "one dies. Use a collective, or make a process group of your own and handle its errors."
        )

    def send(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("send")

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("recv")

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("recv_anysource")


def install_default_group(control: Control) -> None:
    """Makes the view the default process group of this process (once)."""
    if dist.is_initialized():
        return
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda store, rank, size, timeout: ViewProcessGroup(control), devices=["cpu", "cuda", "npu"]
        )
    group = control.group
    dist.init_process_group(NAME, store=dist.HashStore(), rank=group.rank, world_size=group.world_size)
