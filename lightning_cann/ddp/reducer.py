"""Redoable gradient averaging with the arithmetic of ``DistributedDataParallel``, to the bit.

A :class:`GradientReducer` hooks the parameters of a module, copies gradients into flat buckets while a backward runs
and hands full buckets to a :class:`Transport`.  At the end of the backward it asks the transport to *commit* the step,
and only then writes the averages into ``.grad``: until then the local gradients stay there, so that a broken step can
be redone from them (or replaced by a result that somebody else has) without computing anything again.

    reducer = GradientReducer(module.named_parameters(), transport)
    with reducer.guard():            # optional: tidies up behind a backward that raises, see there
        loss.backward()              # returns with averaged gradients, or raises with ``.grad`` untouched
    optimizer.step()
    if reducer.needs_rebuild():      # same answer on every member; before the second forward, as DDP does
        reducer.rebuild(order_of_lowest_member)

It moves no bytes between processes and knows no views: that is the transport's part.  Not thread-safe: one backward at
a time.  Unlike DDP, ``require_sync`` is looked at in the backward, not in the forward; sparse gradients are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.distributed import Work

from lightning_cann.ddp.buckets import BucketCaps, BucketLayout, BufferSet

__all__ = ["GradientReducer", "StepOutcome", "StepTransaction", "Transport"]

_NAMED_IN_ERRORS = 5


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """How a step ended: ``contributors`` of the ``members`` of the view in which it completed gave a gradient."""

    contributors: int
    members: int

    def __post_init__(self) -> None:
        if not 1 <= self.contributors <= self.members:
            raise ValueError(f"contributors={self.contributors} must lie in 1..members={self.members}")


class StepTransaction(Protocol):
    """What the reducer offers to ``Transport.commit``.  Valid inside that call."""

    def pending(self) -> list[Work] | None:
        """The reductions of all buckets, launched during the backward; None: void, :meth:`launch` is needed."""

    def launch(self, transport: Transport) -> list[Work]:
        """Fills all buckets from ``.grad`` for ``transport.size()`` members and launches them in order.

        Buffers of an earlier attempt are left alone (an abandoned reduction may still write into them): this attempt
        gets new ones.  The list is shorter than :meth:`results` if the transport refused one (its view is broken).
        """

    def results(self) -> list[Tensor]:
        """The flat buffers, in launch order: once reduced, the step's result, to be kept and served to a laggard."""

    def load(self, results: list[Tensor]) -> None:
        """Takes a served result instead of reducing.  Raises ValueError if it does not fit."""


class Transport(Protocol):
    """What the reducer needs from the collectives of the current view."""

    def eager(self) -> bool:
        """May buckets be launched during this backward?  False: all are launched by ``commit``."""

    def all_reduce(self, flat: Tensor) -> Work | None:
        """Starts the sum of ``flat`` (in place) over the current view; None: the view is broken, stop launching."""

    def size(self) -> int:
        """Number of members of the current view."""

    def commit(self, step: StepTransaction) -> StepOutcome:
        """Runs the step to completion, over as many attempts as it takes.  What it raises leaves ``backward()``."""


class GradientReducer:
    """Averages the gradients of the trainable ones among ``named_parameters`` over the members of ``transport``.

    Args:
        named_parameters: as ``module.named_parameters()``; frozen and empty ones are left out, tied ones count once.
        transport: the collectives; the attribute ``transport`` may be replaced between steps.
        bucket_cap_mb: as in DDP (MiB); None: 1 MiB for the first bucket and 25 MiB for the others.
        find_unused_parameters: as in DDP: parameters that no member used keep their ``.grad`` as it was.
        retain: keep the last committed result while the next step fills a second set of buffers.

    Attributes:
        require_sync: False: hooks do nothing, gradients accumulate locally (see :meth:`no_sync`).
        contributing: False: this member's buckets are zeros, and ``.grad`` receives the average of the others.
            Set it before each backward; :meth:`finalize` may then be called without any backward.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        transport: Transport,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        retain: bool = True,
    ) -> None:
        unique = {id(p): (name, p) for name, p in reversed(list(named_parameters)) if p.requires_grad and p.numel()}
        trainable = list(unique.values())[::-1]
        self.names = [name for name, _ in trainable]
        self.params = [param for _, param in trainable]
        self.transport = transport
        self.find_unused_parameters = find_unused_parameters
        self.retain = retain
        self.require_sync = True
        self.contributing = True
        self._caps = BucketCaps.from_mb(bucket_cap_mb)
        self._order: list[int] | None = None
        self._ready_order = list(range(len(self.params)))[::-1]
        self._steps = 0
        # Hooks hold these four containers: they are changed in place only.
        self._seen: dict[int, None] = {}
        self._accumulated: set[int] = set()  # used by backwards without synchronisation since the last step
        self._left: list[int] = []
        self._segment_of: list[int] = []
        self._armed = False  # a callback is queued in the running backward
        self._open = False  # a step is in progress
        self._eager = False
        self._works: list[Work] = []
        self._bucket_left: list[int] = []
        self._set_layout(None)
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self.params)]

    # ---------------------------------------------------------------- layout

    def _set_layout(self, order: Sequence[int] | None) -> None:
        self._order = None if order is None else list(order)
        self.layout = BucketLayout(
            self.params, caps=self._caps, find_unused_parameters=self.find_unused_parameters, order=order
        )
        self._segment_of[:] = self.layout.segment_of
        self._segment_sizes = [len(s.params) for s in self.layout.segments]
        self._bucket_sizes = [len(b.segments) for b in self.layout.buckets]
        self._sets: list[BufferSet | None] = [None, None]
        self._dirty = [False, False]  # a reduction was launched in this set and is not known to be over
        self._current = 0
        self._committed: list[Tensor] = []
        self._close()

    @property
    def last_ready_order(self) -> list[int]:
        """Parameter indices in the order in which their gradients became ready in the last complete backward.

        A full permutation always; before such a backward (a member that never contributed) the reverse of registration.
        """
        return list(self._ready_order)

    def needs_rebuild(self) -> bool:
        """Whether DDP would now rebuild its buckets.  The same on all members that committed the same steps."""
        return self._order is None and self._steps > 0 and not self.find_unused_parameters and bool(self.params)

    def rebuild(self, order: Sequence[int]) -> None:
        """Cuts new buckets after ``order``, the lowest member's :attr:`last_ready_order`, the same on all members.

        Raises:
            RuntimeError: a backward is in progress.
            ValueError: ``order`` is not a permutation of the parameter indices.
        """
        if self._open:
            raise RuntimeError("buckets cannot be rebuilt inside a backward: call rebuild() before the next forward")
        self._set_layout(order)

    def state_dict(self) -> dict[str, Any]:
        """The layout (plain Python), for a process that joins later: its buckets must be cut the same way."""
        order = None if self._order is None else list(self._order)
        return {"shapes": self._shapes(), "find_unused_parameters": self.find_unused_parameters, "order": order,
                "caps": [self._caps.first, self._caps.cap], "steps": self._steps}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the layout of :meth:`state_dict`.

        Raises:
            RuntimeError: a backward is in progress.
            ValueError: it was made for other parameters or with another ``find_unused_parameters``.
        """
        if self._open:
            raise RuntimeError("a bucket layout cannot be loaded inside a backward")
        if state["shapes"] != self._shapes():
            raise ValueError(
                f"the bucket layout is for {len(state['shapes'])} parameters of other names or shapes than the "
                f"{len(self.params)} of this module: all members must build the same module"
            )
        if state["find_unused_parameters"] != self.find_unused_parameters:
            raise ValueError(
                f"find_unused_parameters={self.find_unused_parameters} here, {state['find_unused_parameters']} on the "
                "member that sent its bucket layout: pass the same value everywhere"
            )
        self._caps = BucketCaps(first=state["caps"][0], cap=state["caps"][1])
        self._steps = state["steps"]
        self._set_layout(state["order"])

    def _shapes(self) -> list[list[Any]]:
        return [[name, list(p.shape), str(p.dtype)] for name, p in zip(self.names, self.params, strict=True)]

    # ---------------------------------------------------------------- during the backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context only accumulate; the next one outside reduces the whole accumulated ``.grad``."""
        before, self.require_sync = self.require_sync, False
        try:
            yield
        finally:
            self.require_sync = before

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around a backward: :meth:`complete` after it, :meth:`reset` if it raises (or an earlier one did)."""
        self.reset()
        try:
            yield
            self.complete()
        except BaseException:
            self.reset()
            raise

    def _hook(self, index: int) -> Any:
        seen, left, segment_of = self._seen, self._left, self._segment_of
        accumulated, track_use = self._accumulated, self.find_unused_parameters

        def hook(_: Tensor) -> None:
            if not self._armed and not self._begin():
                if track_use:
                    accumulated.add(index)
                return
            if index in seen:
                self._raise_ready_twice(index)
            seen[index] = None
            segment = segment_of[index]
            left[segment] -= 1
            if not left[segment] and self._eager:
                self._filled(segment)

        return hook

    def _begin(self) -> bool:
        if not self.require_sync:
            return False
        if not self._open:
            self._start()
        Variable._execution_engine.queue_callback(self._at_end_of_backward)
        self._armed = True
        return True

    def _start(self) -> None:
        self._open = True
        self._buffers = self._take_buffers()
        self._eager = self.contributing and self.transport.eager()
        if self._eager:
            self._scale = 1.0 / self.transport.size()

    def _filled(self, segment: int) -> None:
        self._fill(segment)
        bucket = self.layout.segments[segment].bucket
        self._bucket_left[bucket] -= 1
        if not self._bucket_left[bucket] and bucket == len(self._works):
            self._launch_full_buckets()

    def _launch_full_buckets(self) -> None:
        while len(self._works) < len(self._bucket_left) and not self._bucket_left[len(self._works)]:
            work = self._send(self.transport, self._buffers.wires[len(self._works)])
            if work is None:
                self._eager = False
                return
            self._works.append(work)

    def _send(self, transport: Transport, wire: Tensor) -> Work | None:
        self._dirty[self._current] = True
        return transport.all_reduce(wire)

    def _fill(self, segment: int) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._copy_in(segment)
        else:
            self._copy_in(segment)

    def _copy_in(self, segment: int) -> None:
        """Bucket = gradient * (1 / members), DDP's arithmetic; a gradient that is None counts as zeros."""
        params, buffers, indices = self.params, self._buffers, self.layout.segments[segment].params
        if self._steps == 0:
            self._check_gradients(indices)
        try:
            if len(indices) == 1:
                torch.mul(params[indices[0]].grad, self._scale, out=buffers.segment_views[segment][0])  # type: ignore[arg-type]
            else:
                torch._foreach_copy_(buffers.segment_views[segment], [params[i].grad for i in indices])  # type: ignore[arg-type]
                buffers.segment_flats[segment].mul_(self._scale)
        except (RuntimeError, TypeError):
            self._check_gradients(indices)
            if all(params[i].grad is not None for i in indices):
                raise
            for i, view in zip(indices, buffers.segment_views[segment], strict=True):
                grad = params[i].grad
                if grad is None:
                    view.zero_()
                else:
                    torch.mul(grad, self._scale, out=view)

    def _take_buffers(self) -> BufferSet:
        """The current set, or a new one in its place while an unfinished reduction may still write into it."""
        buffers = self._sets[self._current]
        if buffers is None or self._dirty[self._current]:
            buffers = BufferSet(self.layout, with_used_map=self.find_unused_parameters)
            self._sets[self._current] = buffers
            self._dirty[self._current] = False
        return buffers

    # ---------------------------------------------------------------- end of the backward

    def _at_end_of_backward(self) -> None:
        self._armed = False
        if self._open and (len(self._seen) == len(self.params) or not _inside_a_backward()):
            self.finalize()

    def complete(self) -> None:
        """Call after ``backward()``: finalizes a step whose last gradients came from a nested backward.

        (Re-entrant activation checkpointing.  The end of a nested backward is not the end of the step while gradients
        are missing, and the engine tells hooks of the outer one only if there are any.)  A no-op otherwise.
        """
        if self._open:
            self.finalize()

    def finalize(self) -> None:
        """Completes the step and writes the averages into ``.grad``.  Runs by itself at the end of a backward.

        To be called by hand, without a backward, only on a member that does not contribute.

        Raises:
            RuntimeError: parameters received no gradient, or there was no backward.
            Exception: whatever ``Transport.commit`` raises.  In all cases ``.grad`` is untouched.
        """
        try:
            with torch.no_grad():
                if not self._open:
                    if self.contributing:
                        raise RuntimeError("finalize() without a backward: set contributing=False for a step of zeros")
                    self._start()
                if len(self._seen) < len(self.params) and self.contributing and not self.find_unused_parameters:
                    self._raise_unused()
                if self._eager:
                    self._launch_rest()
                outcome = self.transport.commit(self)
                self._write_back(outcome)
                if len(self._seen) == len(self.params):
                    self._ready_order = list(self._seen)
                self._flip()
        finally:
            self._close()

    def reset(self) -> None:
        """Forgets a backward that raised half-way.  Call it before the next one; launched reductions are abandoned."""
        self._close()

    def _launch_rest(self) -> None:
        for segment, left in enumerate(self._left):
            if left:
                self._copy_in(segment)
        self._bucket_left = [0] * len(self._bucket_left)
        self._launch_full_buckets()
        if self._eager and self._buffers.used is not None:
            work = self._send_used_map(self.transport, self._buffers.used)
            if work is None:
                self._eager = False
            else:
                self._works.append(work)

    def _send_used_map(self, transport: Transport, used: Tensor) -> Work | None:
        mine = [int(self.contributing and (i in self._seen or i in self._accumulated)) for i in range(len(self.params))]
        used.copy_(torch.tensor(mine, dtype=torch.int32))
        return self._send(transport, used)

    def _write_back(self, outcome: StepOutcome) -> None:
        buffers = self._buffers
        used: list[int] | None = None
        if buffers.used is not None and not (self.contributing and len(self._seen) == len(self.params)):
            used = buffers.used.tolist()
        correction = outcome.members / outcome.contributors
        for number, bucket in enumerate(self.layout.buckets):
            indices, views = bucket.params, buffers.bucket_views[number]
            if used is not None:
                indices = tuple(i for i in indices if used[i])
                views = [buffers.views[i] for i in indices]
                if not indices:
                    continue
            grads = [self.params[i].grad for i in indices]
            try:
                torch._foreach_copy_(grads, views)  # type: ignore[arg-type]
            except TypeError:  # refused as a whole, for a gradient that is None
                for i, view in zip(indices, views, strict=True):
                    if self.params[i].grad is None:
                        self.params[i].grad = torch.empty_like(view)
                grads = [self.params[i].grad for i in indices]
                torch._foreach_copy_(grads, views)  # type: ignore[arg-type]
            # The flat buffers stay as reduced: a laggard that is served them corrects by itself.
            if outcome.contributors != outcome.members:
                torch._foreach_mul_(grads, correction)  # type: ignore[arg-type]

    def _flip(self) -> None:
        self._steps += 1
        self._accumulated.clear()
        self._dirty[self._current] = False
        self._committed = self._buffers.on_wire if self.retain else []
        if self.retain:
            self._current = 1 - self._current
        else:
            self._sets[1 - self._current] = None

    def _close(self) -> None:
        self._open = self._armed = self._eager = False
        self._works = []
        self._seen.clear()
        self._left[:] = self._segment_sizes
        self._bucket_left = list(self._bucket_sizes)

    # ---------------------------------------------------------------- StepTransaction

    def pending(self) -> list[Work] | None:
        return list(self._works) if self._eager else None

    def launch(self, transport: Transport) -> list[Work]:
        self._eager = False  # what was launched before is void
        self._buffers = buffers = self._take_buffers()
        self._scale = 1.0 / transport.size()
        works: list[Work] = []
        with torch.no_grad():
            for bucket, flat, wire in zip(self.layout.buckets, buffers.flats, buffers.wires, strict=True):
                if self.contributing:
                    for segment in bucket.segments:
                        self._copy_in(segment)
                else:
                    flat.zero_()
                work = self._send(transport, wire)
                if work is None:
                    return works
                works.append(work)
            if buffers.used is not None:
                work = self._send_used_map(transport, buffers.used)
                if work is not None:
                    works.append(work)
        return works

    def results(self) -> list[Tensor]:
        """Inside ``commit``: the buffers of this step; outside: the last committed result (empty if not retained)."""
        return list(self._buffers.on_wire if self._open else self._committed)

    def load(self, results: list[Tensor]) -> None:
        self._eager = False
        self._buffers = buffers = self._take_buffers()
        mine, theirs = ([(t.shape, t.dtype) for t in x] for x in (buffers.on_wire, results))
        if mine != theirs:
            raise ValueError(f"a served result of {len(theirs)} buffers {theirs} does not fit this layout {mine}")
        with torch.no_grad():
            for buffer, result in zip(buffers.on_wire, results, strict=True):
                buffer.copy_(result)

    # ---------------------------------------------------------------- errors and the end

    def _check_gradients(self, indices: Iterable[int]) -> None:
        for i in indices:
            grad = self.params[i].grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self.names[i]!r} has a sparse gradient, which cannot be averaged here: "
                    "build its module with sparse=False"
                )
            if grad is not None and grad.dtype != self.params[i].dtype:
                raise RuntimeError(
                    f"the gradient of parameter {self.names[i]!r} is {grad.dtype}, the parameter {self.params[i].dtype}"
                )

    def _raise_ready_twice(self, index: int) -> NoReturn:
        self._close()
        raise RuntimeError(
            f"the gradient of parameter {self.names[index]!r} became ready twice in one step: either nested backwards "
            "(re-entrant checkpointing) use it more than once (pass use_reentrant=False), or an earlier backward "
            "raised half-way and reset() was not called"
        )

    def _raise_unused(self) -> NoReturn:
        missing = [name for i, name in enumerate(self.names) if i not in self._seen]
        more = f" and {len(missing) - _NAMED_IN_ERRORS} more" if len(missing) > _NAMED_IN_ERRORS else ""
        raise RuntimeError(
            f"{len(missing)} of {len(self.names)} parameters received no gradient in this backward: "
            f"{', '.join(missing[:_NAMED_IN_ERRORS])}{more}. If that is intended, pass find_unused_parameters=True "
            "(Lightning: strategy='cann_ft_find_unused_parameters_true')"
        )

    def remove(self) -> None:
        """Takes the hooks off the parameters and drops all buffers."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        self._set_layout(self._order)


def _inside_a_backward() -> bool:
    """Whether this runs below the backward of a custom autograd function, thus in a nested backward."""
    nested = BackwardCFunction.apply.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nested:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
