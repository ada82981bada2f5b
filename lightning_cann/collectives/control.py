"""Control collectives: small, synchronous, redone until they complete; what Lightning and users call between steps.

    control = Control(group)
    control.all_reduce(tensor, dist.ReduceOp.SUM); control.barrier()
    value = control.broadcast(value); values = control.all_gather(value)

All are built from all-reduce and all-gather, whose completion at one member needs the entry of all: a broadcast whose
root may finish alone would let members drift apart.  A broadcast's value comes from the lowest live contributor, so it can
be redone when the root dies.

A newcomer that is not yet admitted (``group.solo``) runs the script's set-up alone: its collectives answer as if all
members had given what it gives, and broadcasts answer what the others heard at the same place in the program (the journal).
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cann.collectives.admission import fetch_journal
from lightning_cann.collectives.view import View
from lightning_cann.collectives.view_group import Broken, ViewGroup

__all__ = ["Control"]

HEADER = 1024  # bytes of the first round of a broadcast; most objects fit, and need no second round
CHUNK = 32 * 1024 * 1024  # bytes reduced at a time when tensors are broadcast
MAX_JOURNAL = 64 * 1024 * 1024  # bytes; what set-up broadcasts beyond that is not kept for replacements


class Control:
    """Control collectives of one :class:`ViewGroup`.  Values travel through the group's device."""

    def __init__(self, group: ViewGroup) -> None:
        self.group = group
        self._journal_bytes = 0
        self._replay: dict[str, list[bytes]] | None = None

    # ------------------------------------------------------------------------------------------ tensors
    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> tuple[int, ...]:
        """Reduces ``tensor`` in place over the members; returns the logical ranks that took part."""
        group = self.group
        if group.solo:
            if op == dist.ReduceOp.SUM:
                tensor.mul_(group.world_size)
            return group.ranks
        box: list[Tensor] = []

        def body(view: View) -> None:
            box[:] = [tensor.detach().clone(memory_format=torch.contiguous_format)]
            if tensor.numel() == 0:  # a collective over nothing would not wait for anybody
                group.wait(view, group.launch(view, self._byte_tensor(1), dist.ReduceOp.SUM))
            else:
                group.wait(view, group.launch(view, box[0], op))

        ranks = group.transact("all_reduce", body, lambda: box[0], lambda data: box.__setitem__(slice(None), [data]))
        tensor.detach().copy_(box[0])
        return ranks

    def all_gather_tensor(self, tensor: Tensor) -> tuple[list[Tensor], tuple[int, ...]]:
        """Every member's ``tensor`` (equal shapes and dtypes) in logical order, and the logical ranks of the rows."""
        group = self.group
        source = tensor.detach().contiguous()
        if group.solo:
            return [source.clone() for _ in group.ranks], group.ranks
        rows: list[Tensor] = []

        def body(view: View) -> None:
            rows[:] = [torch.empty_like(source) for _ in view.ranks]
            if source.numel() == 0:
                group.wait(view, group.launch(view, self._byte_tensor(1), dist.ReduceOp.SUM))
            else:
                group.wait(view, group.launch_gather(view, rows, source))

        ranks = group.transact("all_gather", body, lambda: list(rows), lambda data: rows.__setitem__(slice(None), data))
        return [row.clone() for row in rows], ranks

    def barrier(self) -> tuple[int, ...]:
        """Returns when all members have entered."""
        flag = self._byte_tensor(1)
        return self.all_reduce(flag)

    def broadcast_tensors(self, tensors: list[Tensor], src: int = 0) -> None:
        """Copies ``tensors`` of the lowest live rank (``src`` if it lives) to all members, in place, to the bit."""
        group = self.group
        if group.solo:
            return
        chunks: list[Tensor] = []
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]

        def body(view: View) -> None:
            root = src if src in view.ranks else view.ranks[0]
            mine = torch.cat(raw) if raw else self._byte_tensor(1)
            if root != group.rank:
                mine.zero_()
            chunks[:] = list(mine.split(CHUNK))
            for chunk in chunks:
                group.wait(view, group.launch(view, chunk, dist.ReduceOp.SUM))

        group.transact("broadcast_tensors", body, lambda: list(chunks), lambda data: chunks.__setitem__(slice(None), data))
        parts = iter(torch.cat(chunks).split([r.numel() for r in raw]) if raw else ())
        for tensor in tensors:
            if tensor.numel():
                part = next(parts).clone()  # at an offset of its own, which the wider type may need aligned
                tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))

    def follow_leader(self, tensors: list[Tensor]) -> bool:
        """Copies ``tensors`` of the leader to all members, in place, where that costs no vote; False: not this time.

        A plain broadcast, cheaper than :meth:`broadcast_tensors`, and no transaction: its root may finish alone.  That is
        sound because it is never redone.  It runs only in a view in which a step has completed, and is dropped when the view
        breaks: members that have passed it, are in it, or have not come to it then all go on without.
        """
        group = self.group
        view = group.current
        if group.solo or view is None or view.broken or view.steps == 0 or view.size == 1:
            return False
        raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
        if not raw:
            return False
        flat = torch.cat(raw)  # a broken broadcast may still write into its buffer: not into the tensors
        try:
            group.wait(view, group.launch_broadcast(view, flat))
        except Broken as error:
            group.report_broken(view, str(error))
            return False
        if view.index:
            parts = iter(flat.split([r.numel() for r in raw]))
            for tensor in tensors:
                if tensor.numel():
                    tensor.detach().copy_(next(parts).clone().view(tensor.dtype).view(tensor.shape))
        return True

    # ------------------------------------------------------------------------------------------ objects
    def broadcast(self, value: Any, src: int = 0, site: str | None = None) -> Any:
        """The ``value`` of logical rank ``src`` if it lives, else of the lowest live rank (every member offers one).

        Args:
            site: names the place in the program for the journal; default: the caller outside this package.
        """
        group = self.group
        place = site or _call_site()
        if group.solo:
            return self._recall(place, value)
        mine = pickle.dumps(value)
        box: list[bytes] = []

        def body(view: View) -> None:
            root = src if src in view.ranks else view.ranks[0]
            box[:] = [self._broadcast_bytes(view, mine if root == group.rank else None)]

        group.transact("broadcast", body, lambda: box[0], lambda data: box.__setitem__(slice(None), [data]))
        if not group.journal_sealed and self._journal_bytes + len(box[0]) <= MAX_JOURNAL:
            self._journal_bytes += len(box[0])
            with group.cond:
                group.journal.setdefault(place, []).append(box[0])
        return pickle.loads(box[0])

    def all_gather(self, value: Any) -> dict[int, Any]:
        """Every member's ``value`` by logical rank, in logical order."""
        group = self.group
        if group.solo:
            return dict.fromkeys(group.ranks, value)
        mine = pickle.dumps(value)
        parts: list[bytes] = []

        def body(view: View) -> None:
            size = self._tensor([len(mine)], torch.int64)
            sizes = [torch.empty_like(size) for _ in view.ranks]
            group.wait(view, group.launch_gather(view, sizes, size))
            longest = max(int(x.item()) for x in sizes)
            row = self._byte_tensor(longest)
            row[: len(mine)] = self._from_bytes(mine)
            rows = [torch.empty_like(row) for _ in view.ranks]
            group.wait(view, group.launch_gather(view, rows, row))
            parts[:] = [self._to_bytes(r[: int(n.item())]) for r, n in zip(rows, sizes, strict=True)]

        ranks = group.transact(
            "all_gather_object", body, lambda: list(parts), lambda data: parts.__setitem__(slice(None), data)
        )
        return {rank: pickle.loads(part) for rank, part in zip(ranks, parts, strict=True)}

    # ------------------------------------------------------------------------------------------ helpers
    def _broadcast_bytes(self, view: View, data: bytes | None) -> bytes:
        """One round for small values, two for others; all members add, all but the root add zeros."""
        group = self.group
        header = self._byte_tensor(HEADER)
        if data is not None:
            header[:8] = self._from_bytes(len(data).to_bytes(8, "big"))
            if len(data) <= HEADER - 8:
                header[8 : 8 + len(data)] = self._from_bytes(data)
        group.wait(view, group.launch(view, header, dist.ReduceOp.SUM))
        size = int.from_bytes(self._to_bytes(header[:8]), "big")
        if size <= HEADER - 8:
            return self._to_bytes(header[8 : 8 + size])
        payload = self._byte_tensor(size)
        if data is not None:
            payload[:] = self._from_bytes(data)
        group.wait(view, group.launch(view, payload, dist.ReduceOp.SUM))
        return self._to_bytes(payload)

    def _recall(self, place: str, value: Any) -> Any:
        if self._replay is None:
            journal = fetch_journal(self.group)
            self._replay = {key: list(values) for key, values in journal.items()}
            with self.group.cond:
                self.group.journal = journal  # the next replacement may ask this one
        heard = self._replay.get(place)
        return pickle.loads(heard.pop(0)) if heard else value

    def _tensor(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.group.device)

    def _byte_tensor(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.group.device)

    def _from_bytes(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.group.device)

    @staticmethod
    def _to_bytes(tensor: Tensor) -> bytes:
        return bytes(tensor.cpu().numpy())


def _call_site() -> str:
    """The first caller outside this package: where the script, or Lightning, asked for a broadcast."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("lightning_cann"):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}:{frame.f_lineno}"
