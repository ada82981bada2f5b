"""The gradient transport over a view: what :class:`~.reducer.GradientReducer` needs, from a ``ViewGroup``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_cann.collectives.view import View
from lightning_cann.collectives.view_group import Broken, ViewGroup
from lightning_cann.ddp.reducer import StepOutcome, StepTransaction
from lightning_cann.membership import messages as m

__all__ = ["ViewTransport"]


class ViewTransport:
    """Runs each step as one transaction of ``group``.

    Args:
        contributors: number of members that contribute, given the logical ranks of the view that completed the step.
        on_commit: told those ranks when the step has completed, before gradients are written.
    """

    def __init__(
        self,
        group: ViewGroup,
        contributors: Callable[[tuple[int, ...]], int] = len,
        on_commit: Callable[[tuple[int, ...]], None] | None = None,
    ) -> None:
        self.group = group
        self._contributors, self._on_commit = contributors, on_commit
        self._target: View | None = None  # where the running step launches
        self._launched: View | None = None  # where its buckets are under way
        self.steps = 0  # committed

    def eager(self) -> bool:
        # Not in the first step of a view: members come to it from different places in the program (one may be in the
        # middle of its backward), and the order of launches must be the same at all.
        view = None if self.group.solo else self.group.current
        ready = view is not None and not view.broken and view.steps > 0
        self._target, self._launched = (view if ready else None), None
        return ready

    def size(self) -> int:
        view = self._target or self.group.current
        return 1 if view is None else view.size

    def all_reduce(self, flat: Tensor) -> Any:
        view = self._target
        if view is None or view.broken or view is not self.group.current:
            return None
        try:
            work = self.group.launch(view, flat, dist.ReduceOp.SUM)
        except Broken:
            return None
        self._launched = view
        return work

    def commit(self, step: StepTransaction) -> StepOutcome:
        group = self.group

        def body(view: View) -> None:
            works = step.pending() if self._launched is view else None
            if works is None:
                self._target = view
                works = step.launch(self)
            for work in works:
                group.wait(view, work)
            if len(works) < len(step.results()):
                raise Broken("")
            if group.probe is not None:
                group.probe("reduced")
            view.steps += 1

        redone = group.redone
        try:
            ranks = group.transact("step", body, step.results, step.load)
        finally:
            self._target = self._launched = None
        self.steps += 1
        if group.redone > redone and group.rank == ranks[0]:
            group.send(m.Report("step_redone", {"view": group.view.id.number, "step": self.steps}))
        if group.probe is not None:
            group.probe("committed")
        outcome = StepOutcome(contributors=self._contributors(ranks), members=len(ranks))
        if self._on_commit is not None:
            self._on_commit(ranks)
        return outcome
