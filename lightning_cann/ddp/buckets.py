"""Bucket layout: which gradients travel together, and where each one lies in its flat buffer.

The layout is exactly that of ``torch.nn.parallel.DistributedDataParallel`` (torch 2.10-2.13), because a ring all-reduce
sums an element in an order that depends on its position in the buffer: only the same layout gives the same bits.

* Before the first synchronised backward: one bucket per (dtype, device) in registration order.  With unused-parameter
  detection: buckets of ``first`` bytes, then ``cap`` bytes, in registration order, launched last to first.
* After it: buckets of ``first``, then ``cap`` bytes, in the order in which gradients became ready on the lowest member
  (never with unused-parameter detection).
* A gradient lies in its buffer with the strides of its parameter where those are dense, else contiguously.

:class:`BucketLayout` is pure arithmetic over the parameters; :class:`BufferSet` is one allocation of it.
:func:`buffers_to_sync`, :func:`pack` and :func:`unpack` serve DDP's ``broadcast_buffers``.  Nothing here communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Bucket", "BucketCaps", "BucketLayout", "BufferSet", "Segment", "buffers_to_sync", "pack", "unpack"]

_MIB = 1024 * 1024
_DEFAULT_CAP_MB = 25
# Small gradients are gathered until this many bytes are ready, then copied and scaled by two calls, still in cache.
_SEGMENT_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class BucketCaps:
    """Bucket sizes in bytes: the first one launched after a rebuild, and all others."""

    first: int
    cap: int

    @classmethod
    def from_mb(cls, bucket_cap_mb: float | None) -> BucketCaps:
        """DDP's rule: by default 1 MiB, then 25 MiB; a size given in MiB holds for all buckets.

        Raises:
            ValueError: ``bucket_cap_mb`` is not positive.
        """
        if bucket_cap_mb is None:
            first: int = dist._DEFAULT_FIRST_BUCKET_BYTES
            return cls(first=first, cap=_DEFAULT_CAP_MB * _MIB)
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be positive; leave it None for 25 MiB buckets")
        cap = max(1, int(bucket_cap_mb * _MIB))
        return cls(first=cap, cap=cap)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of neighbouring parameters of one bucket that is filled by one or two fused calls.

    ``params`` are parameter indices; ``start``/``stop`` bound the run in the flat buffer (elements).
    """

    bucket: int
    params: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One flat buffer: parameter indices, their offsets (elements, ascending), its length, dtype and device."""

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    segments: tuple[int, ...]


class BucketLayout:
    """Cuts ``params`` (trainable, each once, at least one element each) into buckets.

    Args:
        params: the parameters; indices below are positions in this sequence.
        caps: bucket sizes.
        find_unused_parameters: DDP's option of that name; it changes the first layout.
        order: a permutation of the indices: the rebuilt layout; None: the first layout.

    Raises:
        ValueError: ``order`` is not a permutation of the parameter indices.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        caps: BucketCaps,
        find_unused_parameters: bool = False,
        order: Sequence[int] | None = None,
    ) -> None:
        self.params = tuple(params)
        self.buckets: list[Bucket] = []
        self.segments: list[Segment] = []
        self.segment_of = [0] * len(self.params)
        for indices in self._assign(caps, find_unused_parameters, order):
            self._add(indices)

    def _assign(self, caps: BucketCaps, find_unused: bool, order: Sequence[int] | None) -> list[list[int]]:
        if not self.params:
            return []
        limits = [caps.first, caps.cap]
        if order is not None:
            if sorted(order) != list(range(len(self.params))):
                raise ValueError(f"the ready order is not a permutation of the {len(self.params)} parameters: {order}")
            return _assignment([self.params[i] for i in order], limits, list(order))
        # DDP starts without a cut: the order of registration says little about the order of the backward.
        return _assignment(list(self.params), limits if find_unused else [sys.maxsize], [])[::-1]

    def _add(self, indices: Sequence[int]) -> None:
        number, offset, offsets = len(self.buckets), 0, []
        first_segment = len(self.segments)
        run: list[int] = []
        start = 0
        for i in indices:
            size = self.params[i].numel()
            large = size * self.params[i].element_size() >= _SEGMENT_BYTES
            if run and (large or (offset - start) * self.params[i].element_size() >= _SEGMENT_BYTES):
                self._close(number, run, start, offset)
                run, start = [], offset
            run.append(i)
            offsets.append(offset)
            offset += size
        self._close(number, run, start, offset)
        head = self.params[indices[0]]
        self.buckets.append(
            Bucket(
                params=tuple(indices),
                offsets=tuple(offsets),
                numel=offset,
                dtype=head.dtype,
                device=head.device,
                segments=tuple(range(first_segment, len(self.segments))),
            )
        )

    def _close(self, bucket: int, run: Sequence[int], start: int, stop: int) -> None:
        for i in run:
            self.segment_of[i] = len(self.segments)
        self.segments.append(Segment(bucket=bucket, params=tuple(run), start=start, stop=stop))


class BufferSet:
    """One allocation of a layout.

    Attributes:
        flats: per bucket a 1-D buffer of the bucket's dtype and length.
        wires: the same memory as it is reduced: complex buckets as real numbers, last dimension 2.
        views: per parameter index the place of its gradient, shaped like the parameter.
        bucket_views, segment_views: per bucket and per segment the views of its parameters, in order.
        segment_flats: per segment its part of the flat buffer.
        used: int32 map of locally used parameters, one element each; None without unused-parameter detection.
    """

    def __init__(self, layout: BucketLayout, *, with_used_map: bool) -> None:
        self.flats = [torch.empty(b.numel, dtype=b.dtype, device=b.device) for b in layout.buckets]
        self.wires = [torch.view_as_real(f) if f.is_complex() else f for f in self.flats]
        views: dict[int, Tensor] = {}
        for bucket, flat in zip(layout.buckets, self.flats, strict=True):
            for i, offset in zip(bucket.params, bucket.offsets, strict=True):
                views[i] = _view(flat, layout.params[i], offset)
        self.views = [views[i] for i in range(len(layout.params))]
        self.bucket_views = [[views[i] for i in b.params] for b in layout.buckets]
        self.segment_views = [[views[i] for i in s.params] for s in layout.segments]
        self.segment_flats = [self.flats[s.bucket][s.start : s.stop] for s in layout.segments]
        self.used: Tensor | None = None
        if with_used_map and layout.params:
            self.used = torch.zeros(len(layout.params), dtype=torch.int32, device=layout.params[0].device)
        self.on_wire = [*self.wires] if self.used is None else [*self.wires, self.used]


def _assignment(params: list[Tensor], limits: list[int], indices: list[int]) -> list[list[int]]:
    buckets, _ = dist._compute_bucket_assignment_by_size(params, limits, [False] * len(params), indices)
    return [list(b) for b in buckets]


def _view(flat: Tensor, param: Tensor, offset: int) -> Tensor:
    if _is_dense(param):
        return flat.as_strided(param.size(), param.stride(), offset)
    return flat.narrow(0, offset, param.numel()).view(param.size())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones (at::Tensor::is_non_overlapping_and_dense)."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.size(), strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def buffers_to_sync(module: nn.Module) -> list[Tensor]:
    """The buffers that DDP's ``broadcast_buffers`` sends from the lowest member before a forward pass.

    Each buffer once, in registration order, non-persistent and integer ones included.  Read it anew every time:
    modules may rebind buffers.
    """
    return [b.detach() for b in module.buffers() if b.numel() > 0]


def pack(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies ``tensors`` into one flat tensor per (dtype, device), in order of first appearance."""
    return [torch.cat([t.reshape(-1) for t in group]) for group in _by_kind(tensors)]


def unpack(flats: Sequence[Tensor], tensors: Iterable[Tensor]) -> None:
    """Writes what :func:`pack` made of tensors like these back into them.

    Raises:
        ValueError: the flat tensors do not fit.
    """
    groups = _by_kind(tensors)
    if [sum(t.numel() for t in g) for g in groups] != [f.numel() for f in flats]:
        raise ValueError(f"{len(flats)} packed tensors do not fit {len(groups)} groups of buffers of this module")
    with torch.no_grad():
        for flat, group in zip(flats, groups, strict=True):
            parts = flat.split([t.numel() for t in group])
            for target, part in zip(group, parts, strict=True):
                target.copy_(part.view(target.size()))


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
