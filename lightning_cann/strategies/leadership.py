"""What only the leader does, moved when the leader changes: loggers, progress bar, ``rank_zero_only``.

The leader is the lowest live logical rank.  What it writes about a step leaves the job only when the step is stable (R9);
:class:`~lightning_cann.plugins.logger_relay.LoggerRelay` holds it until then, on every rank.
"""

from __future__ import annotations

from typing import Any

from lightning_cann.plugins.logger_relay import LoggerRelay, promote_progress_bar

__all__ = ["Leadership"]


class Leadership:
    def __init__(self, trainer: Any, strategy: Any) -> None:
        self._trainer, self._strategy = trainer, strategy
        group = strategy._runtime.group
        self._relay = LoggerRelay(trainer, is_leader=lambda: group.leader == group.rank)
        self._leads = False
        self._mark = 0
        self._first = True
        if not group.solo:
            identity = strategy._control.broadcast(self._relay.identity() if group.leader == group.rank else None)
            if group.leader != group.rank and identity is not None:
                self._relay.adopt_identity(identity)
            self._leads = group.leader == group.rank

    def identity(self) -> dict[str, Any]:
        """Which runs the loggers write to, for a replacement."""
        return self._relay.identity()

    def adopt_identity(self, identity: dict[str, Any]) -> None:
        self._relay.adopt_identity(identity)

    def at_safe_point(self) -> None:
        """A step has completed since the last safe point, so what was logged before that one is stable."""
        leads = bool(self._strategy.is_global_zero)
        self._relay.stable(self._mark)
        self._mark = self._relay.mark()
        if leads == self._leads:
            return
        self._leads = leads
        if leads:
            self._relay.promote()
            promote_progress_bar(self._trainer)
        else:
            self._relay.demote()

    def close(self) -> None:
        """Training is over: everything that was logged is stable behind the closing barrier."""
        self._relay.stable()
        self._relay.close()
