"""The training data under Lightning's fit loop: exactly-once shards, and an epoch whose length follows the members.

Lightning caches how many batches an epoch has; when members come or go that number changes, at the same step everywhere,
because every member computes it from the same ledger.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

from lightning_cann.data import ElasticLoader, transferable
from lightning_cann.plugins import set_train_total

__all__ = ["ElasticData"]

log = logging.getLogger(__name__)


class ElasticData:
    """Owner of the elastic training loader of one fit."""

    def __init__(self, trainer: Any, namespace: SimpleNamespace, rank: int, world_size: int, audit: bool) -> None:
        self._trainer, self._ns = trainer, namespace
        self._rank, self._world_size, self._audit = rank, world_size, audit
        self.loader: ElasticLoader | None = None
        self._pending_state: dict[str, Any] | None = None
        self._limited = False
        self._several = False
        self._last_contributors: tuple[int, ...] = ()
        self._window_had_data = False
        self.history: dict[int, dict[str, Any]] = {}  # audit: epoch -> what was consumed
        self._count_loaders()

    # ------------------------------------------------------------------------------------------ the loader
    def wrap(self, dataloader: Any) -> Any:
        """The elastic form of a training loader, or the loader itself where that is not possible (said once)."""
        if isinstance(dataloader, ElasticLoader):
            return dataloader
        plain = self._without_wrapper(dataloader)
        reason = transferable(plain)
        if reason is None and self._several:
            reason = "there are several training loaders"
        if reason is not None:
            if self._rank == 0:
                log.warning(
                    "the training data is not exactly-once under failures: %s. What a rank that dies has not read is lost "
                    "for this epoch unless its replacement reads it.",
                    reason,
                )
            self.close()
            self.loader = None  # an earlier epoch's, where loaders are made anew
            return dataloader
        self._ns.auto_add_worker_init_fn(plain, self._rank)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.loader = ElasticLoader(
            plain, rank=self._rank, world_size=self._world_size, seed=seed, audit=self._audit
        )
        self._limited = False
        if self._pending_state is not None:
            self.loader.load_state_dict(self._pending_state)
            self._pending_state = None
        return self.loader

    def _count_loaders(self) -> None:
        """Lightning hands over one loader at a time: whether it is the only one is seen where it asks the user for them."""
        source = self._trainer.fit_loop._data_source
        ask = source.dataloader

        def dataloader() -> Any:
            loaders = ask()
            combined = self._ns.CombinedLoader
            whole = loaders if isinstance(loaders, combined) else combined(loaders)
            self._several = len(whole.flattened) > 1
            return loaders

        source.dataloader = dataloader

    def _without_wrapper(self, dataloader: Any) -> Any:
        """Lightning wraps a user's sampler per rank; the order itself is what we need."""
        sampler: Any = getattr(dataloader, "sampler", None)
        if type(sampler).__name__ != "DistributedSamplerWrapper":
            return dataloader
        update = self._ns.data_connector._update_dataloader
        return update(dataloader, sampler.dataset._sampler)

    # ------------------------------------------------------------------------------------------ steps
    def in_window(self) -> bool:
        """Whether the program is inside an optimizer step (between microbatches): no place for newcomers."""
        if self.loader is not None:
            return self.loader.ledger.window_open
        loop = self._trainer.fit_loop.epoch_loop
        return bool(loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches)

    def weight(self) -> int:
        """1, or 0 if this member repeats a batch because it has none of its own in this round."""
        return 1 if self.loader is None else self.loader.current_weight

    def contributing(self) -> bool:
        """Whether this member's gradient counts in the step that is being reduced."""
        loader = self.loader
        if loader is None or not loader.ledger.window_open:
            return loader is None or self._window_had_data
        self._window_had_data = loader.rank in loader.ledger.contributors(range(self._world_size))
        return self._window_had_data

    def contributors(self, ranks: tuple[int, ...]) -> int:
        """How many of ``ranks`` contribute.  A further reduction of the same batch (another optimizer) counts as its
        first."""
        loader = self.loader
        if loader is None:
            return len(ranks)
        if loader.ledger.window_open:
            self._last_contributors = loader.ledger.contributors(range(self._world_size))
        return max(1, len(set(self._last_contributors) & set(ranks)))

    def commit(self, ranks: tuple[int, ...]) -> None:
        """The step stands: its batches are consumed.  Those of ranks that are gone are free again."""
        loader = self.loader
        if loader is not None and loader.ledger.window_open:
            loader.ledger.commit(ranks)
            if self._audit:
                self._record()
            self.refresh()

    def abandon(self) -> None:
        """The step under way will never stand: its batches are free again."""
        if self.loader is not None:
            self.loader.ledger.abandon()

    def members_changed(self, ranks: tuple[int, ...]) -> None:
        """Newcomers were admitted at this safe point: they have batches from here on."""
        loader = self.loader
        if loader is not None and loader.ledger.remaining():
            loader.ledger.begin(ranks)

    # ------------------------------------------------------------------------------------------ lengths
    def at_safe_point(self) -> None:
        """The epoch's length as it is now, the same at all members from here on, newcomers included."""
        self.apply_limit()
        self.refresh()

    def apply_limit(self) -> None:
        """Takes ``limit_train_batches`` from Lightning's loader: shards are limited, the epoch's length stays ours."""
        combined = self._trainer.fit_loop._combined_loader
        if self.loader is None or combined is None or self._limited:
            return
        self._limited = True
        limit = combined.limits[0] if combined.limits else float("inf")
        fresh = not self.loader.ledger.rounds
        if fresh and limit != float("inf") and limit < max(self.loader.ledger.lengths):
            self.loader.set_limit(int(limit))
            iter(self._trainer.fit_loop._data_fetcher)
        combined.limits = None

    def refresh(self) -> None:
        """Tells the loops how long the epoch is now."""
        loader, fit_loop = self.loader, self._trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        if loader is None or fetcher is None or fit_loop._combined_loader is None:
            return
        progress = fit_loop.epoch_loop.batch_progress
        length = progress.current.ready + loader.ledger.rounds_left()
        if fit_loop.max_batches != length:
            if self._trainer.val_check_batch == fit_loop.max_batches:
                self._trainer.val_check_batch = length
            fit_loop.max_batches = length
            set_train_total(self._trainer, length)
            progress.is_last_batch = progress.is_last_batch and progress.current.ready >= length
        fetcher.length = length
        fetcher.done = fetcher.fetched >= length

    # ------------------------------------------------------------------------------------------ transfer, audit
    def state_dict(self) -> dict[str, Any] | None:
        return None if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """For the loader that is there, or the one that is still to be made."""
        if state is None:
            return
        if self.loader is not None:
            self.loader.load_state_dict(state)
        else:
            self._pending_state = state

    def _record(self) -> None:
        assert self.loader is not None
        ledger = self.loader.ledger
        self.history[self.loader.epoch] = {
            "consumed": list(ledger.consumed or ()),
            "lengths": list(ledger.lengths),
            "plan": self.loader.plan,
        }

    def report(self) -> dict[int, dict[str, Any]]:
        """Per epoch: ``expected``, ``consumed``, ``duplicates``, ``missing``: numbers of samples, from committed steps."""
        out = {}
        for epoch, record in self.history.items():
            plan = record["plan"]
            used = [key for piece in record["consumed"] for key in plan.batch(*piece)]
            every = [key for shard, n in enumerate(record["lengths"]) for i in range(n) for key in plan.batch(shard, i)]
            out[epoch] = {
                "expected": len(every),
                "consumed": len(used),
                "duplicates": len(used) - len(set(used)),
                "missing": len(set(every) - set(used)),
            }
        return out

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()
