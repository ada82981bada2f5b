"""Loggers that outlive the rank that writes them.

In Lightning only global rank zero writes to loggers.  Here ranks may die, rank 0 included, and the *leader* (the lowest
live logical rank) writes.  A :class:`LoggerRelay` sits in front of the loggers of one trainer, on every rank:

* Every ``log_metrics`` call is held.  It leaves the job once it is *stable* (rule R9 of the design: every survivor
  knows of it), then the leader writes it; the others keep it, bounded, in case they have to.
* A new leader opens the same logs in append mode, reads what is there (:mod:`lightning_cann.plugins.sinks`), and
  writes what is missing: no gap, no step twice.

Used by the strategies::

    relay = LoggerRelay(trainer, is_leader=lambda: ...)          # every rank, before Lightning opens its loggers
    relay.adopt_identity(broadcast(relay.identity()))            # identity() on the leader, adopt on all others
    mark = relay.mark(); work = all_reduce(...); work.wait(); relay.stable(mark)
    relay.promote()                                              # new leader, main thread, before the next stable()
    relay.demote()                                               # old leader, when a lower logical rank has come back
    relay.close()

It is not a transport: ranks hold what they logged themselves (unsynchronised values differ by rank, as they always do),
nothing is sent.  Calls on ``logger.experiment`` (images, tables) go past it; so do loggers that write on every rank by
design, that is, whose ``log_metrics`` is not ``@rank_zero_only``.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_cann.errors import ConfigurationError
from lightning_cann.plugins.sinks import Sink, Written, sink_for

__all__ = ["LoggerRelay"]

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    number: int
    step: int | None
    metrics: dict[str, Any]
    extra: dict[str, Any]


@dataclass
class _Channel:
    """One logger: its original methods, and what it still has to write."""

    logger: Any
    sink: Sink
    original: dict[str, Callable[..., Any]] = field(default_factory=dict)
    held: deque[_Entry] = field(default_factory=deque)
    retired: Counter[tuple[int, Hashable]] = field(default_factory=Counter)  # no longer held: claimed first
    retirements: int = 0
    hyperparams: deque[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=16))
    hyperparams_done: int = 0
    open: bool = False
    adopted: bool = False  # another rank has written to the run: open it in append mode
    inside: bool = False
    #: what the leader before had written; None: unknown, then entries up to `written_number` count as written
    written: Written | None = None
    written_number: int = 0
    unflushed: int = 0
    last_step: int | None = None


_STATE = "_lightning_cann_relay_state"
_GUARDED = ("save", "log_graph", "after_save_checkpoint")


class LoggerRelay:
    """Holds what is logged until it is stable; lets the leader, and only the leader, write it exactly once.

    Args:
        trainer: anything with ``loggers``, a list of Lightning loggers.  Their methods are replaced on the instances
            until :meth:`close`.
        is_leader: whether this rank writes now.  Asked on every call; must become False when this process is excluded.
        hold: ``log_metrics`` calls kept per logger on a rank that does not write (default 2,000; older are dropped).
        flush_every: calls that the leader writes before it flushes (default 1, as Lightning does).

    Raises:
        ConfigurationError: ``hold`` is too small for ``flush_every``: the death of the leader would leave a gap.
    """

    def __init__(
        self, trainer: Any, *, is_leader: Callable[[], bool], hold: int = 2000, flush_every: int = 1
    ) -> None:
        if flush_every < 1 or hold < 2 * flush_every:
            raise ConfigurationError(
                f"LoggerRelay(hold={hold}, flush_every={flush_every}): other ranks must hold at least twice what the "
                "leader may lose when it dies. Raise hold or lower flush_every (>= 1)."
            )
        self._is_leader = is_leader
        self._hold = hold
        self._flush_every = flush_every
        self._number = 0
        self._stable = 0
        # users may log from threads; the writes themselves happen in stable(), promote() and demote()
        self._lock = threading.RLock()
        # W&B first: it must be there before a TensorBoard writer is, to sync that (as Lightning does)
        loggers = sorted(trainer.loggers, key=lambda logger: sink_for(logger).kind != "wandb")
        self._channels = [_Channel(logger, sink_for(logger)) for logger in loggers if _writes_on_rank_zero(logger)]
        for channel in self._channels:
            self._install(channel)

    # ------------------------------------------------------------------ run identity

    def identity(self) -> dict[str, Any]:
        """On the leader: opens the loggers; returns what other ranks need to log into the same runs (JSON types)."""
        with self._lock:
            self._open_all()
            return {"loggers": [{"kind": c.sink.kind, **c.sink.identity()} for c in self._channels]}

    def adopt_identity(self, identity: dict[str, Any]) -> None:
        """On every other rank, replacements included: log into the runs of the leader, if this rank is ever promoted.

        Raises:
            ConfigurationError: this rank's trainer has other loggers than the leader's.
        """
        kinds = [entry["kind"] for entry in identity["loggers"]]
        if kinds != (mine := [channel.sink.kind for channel in self._channels]):
            raise ConfigurationError(
                f"Trainer(logger=...): this rank has the loggers {mine}, the leader has {kinds}. Give every rank the "
                "same loggers in the same order."
            )
        with self._lock:
            for channel, entry in zip(self._channels, identity["loggers"], strict=True):
                channel.sink.adopt(entry)
                channel.adopted = True

    # ------------------------------------------------------------------ stability

    def mark(self) -> int:
        """Number of the last call held so far: take it before a collective is launched, see :meth:`stable`."""
        return self._number

    def stable(self, upto: int | None = None) -> None:
        """Calls up to mark ``upto`` (default: all) are known to every survivor.  The leader writes them now.

        Call it in the main thread when a collective has completed that was launched after ``upto`` was taken.
        """
        with self._lock:
            if self._is_leader():
                self._open_all()  # before the mark moves: what was stable before the leader's death is the fallback
            self._stable = max(self._stable, self._number if upto is None else upto)
            if self._is_leader():
                for channel in self._channels:
                    self._write_stable(channel)

    def durable(self) -> list[int | None]:
        """On the leader, per logger: all calls up to this step survive the leader's death.  None: not known."""
        return [
            c.last_step if c.open and c.sink.flush_is_durable and not c.unflushed and not c.held else None
            for c in self._channels
        ]

    def forget(self, durable: list[int | None]) -> None:
        """On the others: :meth:`durable` of the leader, so that less need be kept.  Optional."""
        with self._lock:
            for channel, step in zip(self._channels, durable, strict=True):
                while step is not None and channel.held and (first := channel.held[0]).number <= self._stable:
                    if first.step is None or first.step > step:
                        break
                    self._retire(channel, channel.held.popleft())

    # ------------------------------------------------------------------ leadership

    def promote(self) -> None:
        """This rank is the leader now: open the logs in append mode and write what the leader before did not.

        In the main thread, after a view change.  Does nothing where the loggers are open already.  If the strategy does
        not call it, the next call of :meth:`stable` or of a logger's method does.  W&B needs about a second.
        """
        with self._lock:
            self._open_all()
            for channel in self._channels:
                self._write_stable(channel)

    def demote(self) -> None:
        """This rank was the leader: write what is stable, then let go, so that the new leader can open the logs.

        Call it at a safe point, after :meth:`stable`; the new leader may be promoted once this has returned.
        """
        with self._lock:
            for channel in self._channels:
                channel.adopted = True
                if channel.open:
                    self._write_stable(channel)
                    with self._entered(channel):
                        channel.sink.close()
                    channel.open, channel.written, channel.unflushed = False, None, 0

    def close(self) -> None:
        """Give the loggers their own methods back.  Idempotent."""
        with self._lock:
            for channel in self._channels:
                while channel.held and channel.held[0].number <= self._stable:
                    self._retire(channel, channel.held.popleft())
                # the next fit or validate of this process gets a new relay: the same logger, the same run
                vars(channel.logger)[_STATE] = (channel.adopted and not channel.open, channel.retired)
                for name in channel.original:
                    vars(channel.logger).pop(name, None)
                channel.original.clear()

    # ------------------------------------------------------------------ in front of the logger

    def _install(self, channel: _Channel) -> None:
        logger = channel.logger
        channel.adopted, channel.retired = vars(logger).pop(_STATE, (False, Counter()))

        def log_metrics(metrics: dict[str, Any], step: int | None = None, **extra: Any) -> None:
            self._log(channel, metrics, step, extra)

        def log_hyperparams(*args: Any, **kwargs: Any) -> None:
            with self._lock:
                channel.hyperparams.append((args, kwargs))
                if self._is_leader():
                    self._open_all()
                    self._hyperparams(channel)

        def finalize(status: str) -> None:
            with self._lock:
                if not self._is_leader():
                    return
                if status == "success":  # fit has ended behind a barrier that every rank has passed
                    self.stable()
                if channel.open:
                    with self._entered(channel):
                        channel.original["finalize"](status)

        def guard(name: str) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    if not self._is_leader():
                        return None
                    self._open_all()
                    with self._entered(channel):
                        result = channel.original[name](*args, **kwargs)
                    if name == "save":
                        channel.unflushed = 0
                    return result

            return method

        methods: dict[str, Callable[..., Any]] = {
            "log_metrics": log_metrics,
            "log_hyperparams": log_hyperparams,
            "finalize": finalize,
            **{name: guard(name) for name in _GUARDED},
        }
        for name, method in methods.items():
            if hasattr(logger, name):
                channel.original[name] = getattr(logger, name)
                # On the instance, not the class: only this trainer's loggers are relayed, whatever their class, in
                # either namespace, and `close` only has to delete the attribute
                setattr(logger, name, method)

    def _log(self, channel: _Channel, metrics: dict[str, Any], step: int | None, extra: dict[str, Any]) -> None:
        with self._lock:
            if channel.inside:  # the logger itself, from within log_hyperparams or the like
                channel.original["log_metrics"](metrics, step, **extra)
                return
            self._number += 1
            channel.held.append(_Entry(self._number, step, _frozen(metrics), extra))
            if not self._is_leader():
                while len(channel.held) > self._hold:
                    self._retire(channel, channel.held.popleft())

    # ------------------------------------------------------------------ writing

    def _open_all(self) -> None:
        for channel in self._channels:
            if channel.open:
                continue
            with self._entered(channel):
                if channel.adopted:
                    steps = [entry.step for entry in channel.held if entry.step is not None]
                    written = channel.sink.resume(min_step=min(steps, default=None), keep=self._hold)
                    if written is not None:
                        written.counts.subtract(channel.retired)
                    channel.written, channel.written_number = written, self._stable
                    channel.last_step = written.last_step if written is not None else channel.last_step
                    log.info("logging goes on in %s, after step %s", type(channel.logger).__name__, channel.last_step)
                else:
                    channel.sink.open()
                    channel.written, channel.written_number = None, 0
            channel.open = True
            if channel.adopted:
                calls = list(channel.hyperparams)
                with self._entered(channel):
                    channel.sink.restore_hyperparams(calls, channel.original["log_hyperparams"])
                channel.hyperparams_done = len(calls)
            self._hyperparams(channel)

    def _hyperparams(self, channel: _Channel) -> None:
        for args, kwargs in list(channel.hyperparams)[channel.hyperparams_done :]:
            with self._entered(channel):
                channel.original["log_hyperparams"](*args, **kwargs)
        channel.hyperparams_done = len(channel.hyperparams)

    def _write_stable(self, channel: _Channel) -> None:
        with self._entered(channel):
            while channel.held and channel.held[0].number <= self._stable:
                entry = channel.held[0]
                if missing := self._missing(channel, entry):
                    channel.original["log_metrics"](missing, entry.step, **entry.extra)
                    channel.unflushed += 1
                channel.last_step = entry.step if entry.step is not None else channel.last_step
                # only now: if the logger raises, the call is not lost
                self._retire(channel, channel.held.popleft())
            if channel.unflushed >= self._flush_every:
                channel.sink.flush()
                channel.unflushed = 0

    def _missing(self, channel: _Channel, entry: _Entry) -> dict[str, Any]:
        """The part of this call that no leader has written yet."""
        if channel.written is None or entry.step is None:
            return entry.metrics if entry.number > channel.written_number else {}
        missing: dict[str, Any] = {}
        for key, part in channel.sink.units(entry.metrics).items():
            if channel.written.claim(entry.step, key):
                continue
            for name, value in part.items():
                # a dict of scalars is a unit per scalar: put it together again
                missing[name] = {**missing[name], **value} if isinstance(missing.get(name), dict) else value
        return missing

    def _retire(self, channel: _Channel, entry: _Entry) -> None:
        if entry.step is None:
            return
        for key in channel.sink.units(entry.metrics):
            channel.retired[entry.step, key] += 1
        channel.retirements += 1
        if channel.retirements % self._hold == 0:  # steps grow: what lies before all that is held cannot come again
            oldest = min((e.step for e in channel.held if e.step is not None), default=entry.step)
            channel.retired = Counter({k: n for k, n in channel.retired.items() if k[0] >= oldest})

    @contextmanager
    def _entered(self, channel: _Channel) -> Iterator[None]:
        """Inside a call of the logger's own methods: they are `rank_zero_only`, and may call each other."""
        zero: Any = rank_zero_only  # Lightning keeps the rank as an attribute of the decorator
        inside, rank = channel.inside, getattr(zero, "rank", None)
        # whether the strategy has moved this global to the new leader yet must not matter here
        channel.inside, zero.rank = True, 0
        try:
            yield
        finally:
            channel.inside, zero.rank = inside, rank


def _writes_on_rank_zero(logger: Any) -> bool:
    """Whether log_metrics is decorated with ``@rank_zero_only`` (a ``functools.wraps`` wrapper), as Lightning asks."""
    return hasattr(type(logger), "log_metrics") and hasattr(type(logger).log_metrics, "__wrapped__")


def _frozen(value: Any) -> Any:
    """The value as it is now: dicts copied, tensors cloned (on their device: `.item()` would wait for it)."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
