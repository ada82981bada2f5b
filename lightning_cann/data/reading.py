"""What an :class:`~.loader.ElasticLoader` feeds to its inner DataLoader, and shows as its samplers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from lightning_cann.data.ledger import Piece

if TYPE_CHECKING:
    from lightning_cann.data.loader import ElasticLoader

__all__ = ["BatchSamplerView", "Feed", "SamplerView", "Target"]


def _alive(ref: weakref.ref[ElasticLoader]) -> ElasticLoader:
    owner = ref()
    if owner is None:
        raise RuntimeError("the ElasticLoader of this inner DataLoader is gone")
    return owner


class Feed:
    """Batch sampler of the inner DataLoader.  Remembers what it handed out, in order; None is a repeat."""

    def __init__(self, owner: ElasticLoader) -> None:
        # Weak, or an ElasticLoader that is dropped would keep its workers until the next garbage collection.
        self._owner = weakref.ref(owner)
        self.ahead: deque[Piece | None] = deque()
        self.last: Piece | None = None
        self._forecast: Iterator[Piece | None] = iter(())
        self._basis: tuple[int, ...] | None = None

    def __iter__(self) -> Feed:
        self.ahead.clear()
        self._basis = None
        return self

    def __next__(self) -> list[Any]:
        owner = _alive(self._owner)
        ledger = owner.ledger
        if self._basis != ledger.members:
            self._basis = ledger.members
            self._forecast = ledger.forecast(owner.rank)
        for piece in self._forecast:
            if piece not in self.ahead:
                self.ahead.append(piece)
                self.last = piece or self.last
                return owner.keys(piece or self.last)
        raise StopIteration


class Target:
    """Batch sampler of an inner DataLoader without workers, which reads nothing ahead: exactly what is asked for."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = weakref.ref(owner)
        self.piece: Piece | None = None

    def __iter__(self) -> Target:
        return self

    def __next__(self) -> list[Any]:
        return _alive(self._owner).keys(self.piece)


class SamplerView:
    """``ElasticLoader.sampler``; unknown attributes are those of the user's sampler."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = owner

    def set_epoch(self, epoch: int) -> None:
        self._owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return (key for batch in self._owner.plan.shard(self._owner.rank) for key in batch)

    def __len__(self) -> int:
        return sum(len(batch) for batch in self._owner.plan.shard(self._owner.rank))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_owner" not in self.__dict__:
            raise AttributeError(name)
        user = self._owner.wrapped.batch_sampler
        return getattr(user.sampler if type(user) is BatchSampler else user, name)


class BatchSamplerView:
    """``ElasticLoader.batch_sampler``; unknown attributes are those of the user's."""

    def __init__(self, owner: ElasticLoader) -> None:
        self._owner = owner
        self.sampler = owner.sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return self._owner.plan.shard(self._owner.rank)

    def __len__(self) -> int:
        return self._owner.plan.lengths[self._owner.rank]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_owner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._owner.wrapped.batch_sampler, name)
