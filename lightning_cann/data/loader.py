"""A DataLoader whose shards survive their owners: :class:`ElasticLoader`.

It wraps a user's map-style ``torch.utils.data.DataLoader`` and yields, on each member, the batches that its
:class:`~.ledger.ShardLedger` gives to this logical rank: its own shard in order, then batches of shards whose
owner is gone or behind.  A member without a batch in a round gets a repeat, with ``current_weight == 0``:

    loader = ElasticLoader(user_loader, rank=rank, world_size=W, seed=seed)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:                              # opens a window if none is open
            loss = loader.current_weight * step(batch)
            ...                                           # gradients, then, when the step stands:
            loader.ledger.commit(counted_ranks)

Reading ahead is exact while nobody comes or goes: the inner DataLoader is fed from the ledger's forecast.  What a
view change makes unpredicted is loaded in this process.  The loader does not talk to other members, knows no view,
and does not decide when a step stands.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_cann.data.ledger import Piece, ShardLedger
from lightning_cann.data.order import EpochPlan, isolated_rng, make_order, transferable
from lightning_cann.data.reading import BatchSamplerView, Feed, SamplerView, Target
from lightning_cann.data.workers import WorkerInit
from lightning_cann.errors import ConfigurationError

__all__ = ["ElasticLoader", "WorkerInit", "transferable"]

# A window with this many rounds in which nobody had a batch is a loop that never commits.
MAX_EMPTY_ROUNDS = 10_000


class ElasticLoader:
    """Exactly-once batches for one logical rank (see the module's page).

    One pass of ``for batch in loader`` goes on from the committed cursors of the epoch.  A pass over an epoch that
    is finished starts it anew (as a stock loader without ``set_epoch`` would), unless that state was just loaded:
    then there is nothing left to do, and the pass is empty.  Unknown attributes are
    those of the wrapped loader (``dataset``, ``batch_size``, ``num_workers``, ...).

    Args:
        loader: the user's loader.  Of its settings only ``in_order=False`` is ignored.
        rank: this member's logical rank.
        world_size: number of logical ranks W, members or not.
        seed: seed of the order, the same on every member.  A ``DistributedSampler`` of the user brings its own.
        limit: at most this many batches per shard and epoch.
        audit: keep ``ledger.consumed``.

    Attributes:
        current: the :class:`Piece` that the last ``next()`` gave; None: it was a repeat.
        current_weight: 1, or 0 for a repeat.

    Raises:
        ConfigurationError: :func:`transferable` says why, or ``rank`` is outside the world.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        world_size: int,
        seed: int = 0,
        limit: int | None = None,
        audit: bool = False,
    ) -> None:
        reason = transferable(loader)
        if reason is not None:
            raise ConfigurationError(f"this DataLoader cannot be elastic: {reason}")
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank={rank} is outside the world 0..{world_size - 1}")
        self.wrapped = loader
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.current: Piece | None = None
        self.current_weight = 1
        self._limit = limit
        self._order = make_order(loader, world_size, seed=seed)
        self._plan: EpochPlan | None = None
        self._plan_epoch: int | None = None
        self._ledger = ShardLedger(world_size, audit=audit)
        self._loaded = False
        self._empty_rounds = 0
        self._last: Piece | None = None
        self._feed = Feed(self) if loader.num_workers else None
        self._target = Target(self)
        self._worker_init = WorkerInit(loader.worker_init_fn)
        self._inner: Any = None
        self._batches: Iterator[Any] | None = None

    @property
    def sampler(self) -> SamplerView:
        """This rank's own shard; has the ``set_epoch`` that Lightning looks for."""
        return SamplerView(self)

    @property
    def batch_sampler(self) -> BatchSamplerView:
        """The batches of this rank's own shard."""
        return BatchSamplerView(self)

    # ------------------------------------------------------------------ the epoch
    @property
    def ledger(self) -> ShardLedger:
        """The book of the current epoch."""
        self.plan  # noqa: B018  (an epoch that was only announced starts here)
        return self._ledger

    @property
    def plan(self) -> EpochPlan:
        """The current epoch's order; the same on every member."""
        if self._plan is None or self._plan_epoch != self.epoch:
            plan = self._order.draw(self.epoch, limit=self._limit)
            if self._ledger.epoch != self.epoch:
                self._ledger.reset(self.epoch, plan.lengths)
            elif self._ledger.lengths != plan.lengths:
                raise ConfigurationError(
                    f"epoch {self.epoch} has {list(plan.lengths)} batches per shard here, but "
                    f"{list(self._ledger.lengths)} where the state comes from: "
                    "use the same dataset, batch size and limit"
                )
            self._plan, self._plan_epoch = plan, self.epoch
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``; nothing happens if it is the current one (its progress stays).

        Raises:
            RuntimeError: a window of another epoch is open.
        """
        if epoch == self.epoch:
            return
        if self._ledger.window_open:
            raise RuntimeError(f"set_epoch({epoch}): epoch {self.epoch} has an open window: commit() or abandon() it")
        self.epoch = epoch
        self._loaded = False
        self._stop_reading()  # what was read ahead is of the old order, under the same numbers

    def set_limit(self, limit: int | None) -> None:
        """At most ``limit`` batches per shard and epoch (None: all), from a fresh epoch on.

        Raises:
            RuntimeError: the current epoch has begun.
        """
        if limit == self._limit:
            return
        if self._ledger.epoch == self.epoch and self._ledger.rounds:
            raise RuntimeError(f"limit={limit}: epoch {self.epoch} has begun; set it between epochs")
        self._limit = limit
        self._plan = None
        self._stop_reading()
        self._ledger.abandon()
        self._ledger.epoch = -1

    def __len__(self) -> int:
        """Rounds of this epoch: those dealt so far and those that the current members still need."""
        return self.ledger.rounds + self.ledger.rounds_left()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: epoch, hash of its order, and ledger, an open window included."""
        return {
            "epoch": self.epoch,
            "limit": self._limit,
            "order": self.plan.digest(),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, keep_window: bool = False) -> None:
        """Go on where ``state`` was written, at its committed cursors.

        Args:
            keep_window: take an open window over as well, from a member that is in the middle of it.  From a checkpoint
                its batches are read again: the gradients that were accumulated in it are in no checkpoint.

        Raises:
            ValueError, ConfigurationError: ``state`` is of another world size, dataset or batch size.
        """
        if state["ledger"]["world_size"] != self.world_size:
            raise ConfigurationError(
                f"this state was written inside an epoch that is cut into {state['ledger']['world_size']} shards, but there "
                f"are {self.world_size} ranks: resume with as many ranks as before, or from a checkpoint of an epoch's end"
            )
        self._ledger.load_state_dict(state["ledger"])
        if not keep_window:
            self._ledger.abandon()
        self.epoch = int(state["epoch"])
        self._limit = state["limit"]
        self._loaded = True
        self._plan = None
        if self.plan.digest() != state["order"]:
            raise ConfigurationError(
                f"epoch {self.epoch} has another order here than where the state comes from: use the same dataset and "
                f"seed={self.seed}; a sampler that draws must use the global generators of torch, random or numpy, or "
                "have its torch.Generator as .generator"
            )
        self._last = None
        self._stop_reading()

    # ------------------------------------------------------------------ iteration
    def __iter__(self) -> ElasticLoader:
        ledger = self.ledger
        if not (self._loaded or ledger.window_open or ledger.remaining()):
            ledger.reset(self.epoch, self.plan.lengths)
        self._loaded = False
        self._start_reading()
        return self

    def __next__(self) -> Any:
        """This rank's batch of the next round.

        Raises:
            StopIteration: no batch of the epoch is left and no window is open.
            RuntimeError: the open window has seen thousands of rounds without a batch: nobody commits it.
        """
        ledger = self.ledger
        if not ledger.window_open:
            if not ledger.remaining():
                self._stop_reading()
                raise StopIteration
            ledger.begin()
        self._empty_rounds = 0 if ledger.unassigned() else self._empty_rounds + 1
        if self._empty_rounds > MAX_EMPTY_ROUNDS:
            raise RuntimeError("every batch is in the open window but it is never committed: call ledger.commit()")
        if self._batches is None:
            self._start_reading()
        self.current = ledger.assign().get(self.rank)
        self.current_weight = 0 if self.current is None else 1
        batch = self._obtain(self.current)
        self._last = self.current or self._last
        return batch

    def keys(self, piece: Piece | None) -> list[Any]:
        """Sample keys of ``piece``; of None: of a batch fit for a repeat."""
        return self.plan.batch(*(piece or self._repeatable()))

    def close(self) -> None:
        """Stop worker processes, persistent ones too.  The loader may be used again."""
        self._stop_reading()
        self._inner = None

    def _repeatable(self) -> Piece:
        """The last batch, read again rather than kept: users change batches in place (``batch.pop(...)``)."""
        if self._last is not None and self._last.batch < self.plan.lengths[self._last.shard]:
            return self._last
        lengths = self.plan.lengths
        return Piece(self.rank if lengths[self.rank] else next(s for s, n in enumerate(lengths) if n), 0)

    def _obtain(self, piece: Piece | None) -> Any:
        assert self._batches is not None
        if self._feed is None:
            if piece is None:
                return self._load_here(None)
            self._target.piece = piece
            return next(self._batches)
        ahead = self._feed.ahead
        if piece not in ahead:
            # A stale adopted batch at the head would block reading ahead for good: let one go per miss.
            if ahead and (ahead[0] is None or ahead[0].shard != self.rank):
                ahead.popleft()
                next(self._batches)
            return self._load_here(piece)
        while True:
            head = ahead.popleft()
            batch = next(self._batches)
            if head == piece:
                return batch

    def _load_here(self, piece: Piece | None) -> Any:
        """Load what was not read ahead, drawing nothing from this process's generators: any adopter draws the same."""
        dataset = self.wrapped.dataset
        source = piece or self._repeatable()
        keys = self.plan.batch(*source)
        with isolated_rng(self.seed, self.epoch, *source):
            if self.wrapped.num_workers and self.wrapped.worker_init_fn is not None:
                # The dataset may work only where the user's worker_init_fn ran: one worker for one batch.
                return next(iter(self._make_inner([keys], num_workers=1, persistent_workers=False)))
            many = getattr(dataset, "__getitems__", None)
            batch = self.wrapped.collate_fn(many(keys) if many else [dataset[key] for key in keys])
        if self.wrapped.pin_memory and torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
            batch = pin_memory(batch, None if device is None else device.type)
        return batch

    def _start_reading(self) -> None:
        if self._inner is None:
            self._inner = self._make_inner(self._target if self._feed is None else self._feed)
        self._batches = None
        self._worker_init.bind = threading.current_thread() is threading.main_thread()
        # One draw of base_seed per pass from the stock generator, or one for all with persistent workers: as stock.
        self._batches = iter(self._inner)

    def _stop_reading(self) -> None:
        # Dropping an iterator ends its workers, unless they are persistent: then the inner loader holds it.
        self._batches = None
        if self._feed is not None:
            self._feed.ahead.clear()

    def _make_inner(self, batch_sampler: Any, **changes: Any) -> Any:
        user = self.wrapped
        workers: dict[str, Any] = {"num_workers": 0}
        if user.num_workers:
            context = user.multiprocessing_context or multiprocessing.get_context()
            self._worker_init.forkserver = context.get_start_method() == "forkserver"
            workers = {
                "num_workers": user.num_workers,
                "prefetch_factor": user.prefetch_factor,
                "persistent_workers": user.persistent_workers,
                "multiprocessing_context": user.multiprocessing_context,
                "worker_init_fn": self._worker_init,
                "timeout": user.timeout,
            }
        if user.pin_memory_device:
            workers["pin_memory_device"] = user.pin_memory_device
        return DataLoader(
            user.dataset,
            batch_sampler=batch_sampler,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            generator=user.generator if not changes else None,
            **{**workers, **changes},
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"ElasticLoader({self.wrapped!r}, rank={self.rank}, world_size={self.world_size}, epoch={self.epoch})"
