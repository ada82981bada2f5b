"""The order of an epoch: which samples make up batch k of logical shard s.

``make_order(loader, world_size, seed)`` looks at a user's DataLoader and returns an :class:`EpochOrder`; its
``draw(epoch)`` gives an :class:`EpochPlan`, which is the same on every member:

* default samplers, and a ``DistributedSampler`` of the user: one permutation seeded with ``seed + epoch``, strided
  over the shards as ``torch.utils.data.DistributedSampler`` does, but never padded: no sample is seen twice.  Where
  the length is divisible by the world size, shards equal DistributedSampler's index for index;
* any other sampler: its own order, drawn once per epoch under random generators seeded with (seed, epoch), strided;
* a batch sampler other than ``BatchSampler``: its list of batches, drawn likewise; the batches are strided.

It does not load data and keeps no progress: that is ``loader.py`` and ``ledger.py``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_cann.errors import ConfigurationError

__all__ = ["EpochOrder", "EpochPlan", "isolated_rng", "make_order", "seeded_indices", "shard_indices", "transferable"]


def mix_seed(*parts: int) -> int:
    """A 63-bit seed from integers, the same in every process (``hash()`` of a tuple may change with Python)."""
    digest = hashlib.blake2b(repr(tuple(int(p) for p in parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def isolated_rng(*parts: int) -> Iterator[None]:
    """Seed the CPU generators of torch, random and numpy with ``parts``; put their old states back on leaving."""
    seed = mix_seed(*parts)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    # The default generator only: torch.manual_seed() would reseed the accelerator's as well.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seeded_indices(length: int, world_size: int, *, seed: int, shuffle: bool, drop_last: bool, epoch: int) -> Any:
    """The epoch's order before it is cut into shards.

    Returns:
        int64 tensor of shape (length,), or with ``drop_last`` the first ``length // world_size * world_size`` of it.
        The draw is DistributedSampler's (torch/utils/data/distributed.py), so equal seeds give equal orders.
    """
    if shuffle:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        indices = torch.randperm(length, generator=generator)
    else:
        indices = torch.arange(length)
    return indices[: length // world_size * world_size] if drop_last else indices


def shard_indices(
    length: int, world_size: int, shard: int, *, seed: int, shuffle: bool, drop_last: bool, epoch: int
) -> list[int]:
    """Sample indices of ``shard`` in ``epoch``, in order: ``order[shard::world_size]``."""
    order = seeded_indices(length, world_size, seed=seed, shuffle=shuffle, drop_last=drop_last, epoch=epoch)
    return cast("list[int]", order[shard::world_size].tolist())


class EpochPlan:
    """One epoch's batches: ``lengths[s]`` of them in shard s, ``batch(s, k)`` gives the sample keys of one.

    Args:
        order: the epoch's samples (``batch_size`` given) or its batches (``batch_size`` None), all shards together.
        world_size: number of shards W; shard s is ``order[s::W]``.
        batch_size: samples per batch; the last of a shard may be short unless ``drop_last``.
        limit: at most this many batches per shard; None: no limit.
    """

    def __init__(
        self, order: Any, world_size: int, *, batch_size: int | None, drop_last: bool, limit: int | None = None
    ) -> None:
        self._order = order
        self._batch_size = batch_size
        self._world_size = world_size
        self._digest: str | None = None
        sizes = [max(0, -(-(len(order) - s) // world_size)) for s in range(world_size)]
        if batch_size is not None:
            sizes = [n // batch_size if drop_last else -(-n // batch_size) for n in sizes]
        self.lengths: tuple[int, ...] = tuple(n if limit is None else min(n, limit) for n in sizes)

    def batch(self, shard: int, number: int) -> list[Any]:
        """Sample keys of batch ``number`` of ``shard`` (for ``dataset[key]``).

        Raises:
            IndexError: no such batch.
        """
        if not 0 <= number < self.lengths[shard]:
            raise IndexError(f"shard {shard} has {self.lengths[shard]} batches, there is no number {number}")
        w = self._world_size
        if self._batch_size is None:
            return list(self._order[shard + number * w])
        start = shard + number * self._batch_size * w
        part = self._order[start : start + self._batch_size * w : w]
        return part.tolist() if isinstance(part, torch.Tensor) else list(part)

    def shard(self, shard: int) -> Iterator[list[Any]]:
        """All batches of ``shard``, in order."""
        return (self.batch(shard, k) for k in range(self.lengths[shard]))

    def digest(self) -> str:
        """Short hash of order and lengths: members whose digests differ would not train exactly once."""
        if self._digest is not None:
            return self._digest
        digest = hashlib.blake2b(repr(self.lengths).encode(), digest_size=8)
        order = self._order
        digest.update(order.numpy().tobytes() if isinstance(order, torch.Tensor) else repr(list(order)).encode())
        self._digest = digest.hexdigest()
        return self._digest


@dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """How to draw any epoch's plan.

    Attributes:
        source: epoch -> samples (or batches, with ``batch_size`` None) of the whole epoch.
        user_sampler: told of every epoch by ``set_epoch`` if it (or a sampler inside it) can be.
    """

    source: Callable[[int], Any]
    world_size: int
    batch_size: int | None
    drop_last: bool
    user_sampler: Any = None

    def draw(self, epoch: int, *, limit: int | None = None) -> EpochPlan:
        for sampler in _nested(self.user_sampler):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return EpochPlan(
            self.source(epoch), self.world_size, batch_size=self.batch_size, drop_last=self.drop_last, limit=limit
        )


def transferable(loader: Any) -> str | None:
    """Why ``loader`` cannot be made elastic, in words for the user; None: it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a torch.utils.data.DataLoader"
    for method in ("__iter__", "_get_iterator"):
        if getattr(type(loader), method) is not getattr(DataLoader, method):
            return f"its class {type(loader).__name__} has its own {method}"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset: nobody but the dataset knows its samples"
    if loader.batch_sampler is None:
        return "batch_size=None turns batching off"
    if not isinstance(loader.dataset, Sized):
        return f"its dataset {type(loader.dataset).__name__} has no length"
    batch_sampler = loader.batch_sampler
    sampler = batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler
    if not isinstance(sampler, Sized):
        return f"its sampler {type(sampler).__name__} has no length, so it may never end"
    for s in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(s, DistributedSampler):
            if s is not sampler:
                return f"its batch sampler {type(sampler).__name__} is over a DistributedSampler: give it all samples"
            if getattr(type(s), "__iter__", None) is not DistributedSampler.__iter__:
                return f"its sampler {type(s).__name__} is a DistributedSampler with its own order"
        elif hasattr(s, "num_replicas"):
            return f"its sampler {type(s).__name__} cuts shards by itself (num_replicas): give a sampler of all samples"
    return None


def make_order(loader: Any, world_size: int, *, seed: int) -> EpochOrder:
    """The order of a map-style ``torch.utils.data.DataLoader`` that :func:`transferable` accepts.

    Args:
        loader: the user's loader; its sampler or batch sampler decides (see the module's page).
        world_size: number of logical shards.
        seed: for everything that the user's sampler does not seed itself; the same on every member.

    Raises:
        ConfigurationError: the dataset or sampler has no length.
    """
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        return EpochOrder(
            source=_Drawn(batch_sampler, seed),
            world_size=world_size,
            batch_size=None,
            drop_last=False,
            user_sampler=batch_sampler,
        )
    sampler = batch_sampler.sampler
    if isinstance(sampler, DistributedSampler):
        source: Callable[[int], Any] = _Seeded(
            _length(sampler.dataset), world_size, sampler.seed, sampler.shuffle, sampler.drop_last
        )
    elif type(sampler) is SequentialSampler:
        source = _Seeded(_length(sampler.data_source), world_size, seed, False, False)
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        source = _Seeded(_length(sampler.data_source), world_size, seed, True, False)
    else:
        source = _Drawn(sampler, seed)
    return EpochOrder(
        source=source,
        world_size=world_size,
        batch_size=int(batch_sampler.batch_size),
        drop_last=bool(batch_sampler.drop_last),
        user_sampler=sampler,
    )


@dataclass(frozen=True)
class _Seeded:
    length: int
    world_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __call__(self, epoch: int) -> Any:
        return seeded_indices(
            self.length, self.world_size, seed=self.seed, shuffle=self.shuffle, drop_last=self.drop_last, epoch=epoch
        )


@dataclass(frozen=True)
class _Drawn:
    """The order of a sampler of the user, the same on every member and for a newcomer in any epoch."""

    sampler: Any
    seed: int

    def __call__(self, epoch: int) -> Sequence[Any]:
        own = [g for s in _nested(self.sampler) if isinstance(g := getattr(s, "generator", None), torch.Generator)]
        # A generator's state says how often it was drawn from, which a newcomer cannot know: seed it per epoch.
        states = [g.get_state() for g in own]
        try:
            with isolated_rng(self.seed, epoch):
                for g in own:
                    g.manual_seed(mix_seed(self.seed, epoch))
                return list(self.sampler)
        finally:
            for g, state in zip(own, states, strict=True):
                g.set_state(state)


def _nested(sampler: Any) -> list[Any]:
    """``sampler`` and the samplers inside it (a batch sampler's ``.sampler``), outermost first."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not s for s in found):
        found.append(sampler)
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner
    return found


def _length(data: Any) -> int:
    if not isinstance(data, Sized):
        raise ConfigurationError(
            f"dataset={type(data).__name__} has no length, so its epoch cannot be cut into shards: give it __len__"
        )
    return len(data)
