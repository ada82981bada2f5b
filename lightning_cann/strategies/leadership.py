"""What only the leader does, moved when the leader changes: loggers, progress bar, ``rank_zero_only``.

The leader is the lowest live logical rank.  What it writes about a step leaves the job only when the step is stable (R9);
:class:`~lightning_cann.plugins.logger_relay.LoggerRelay` holds it until then, on every rank.
"""

from __future__ import annotations

from typing import Any

from lightning_cann.plugins import LoggerRelay, promote_progress_bar

__all__ = ["Leadership"]


class Leadership:
    def __init__(self, trainer: Any, strategy: Any) -> None:
        self._trainer = trainer
        group = self._group = strategy._runtime.group
        self._admitted_at = -1
        self._relay = LoggerRelay(trainer, is_leader=self._writes)
        self._leads = False
        self._mark = 0
        if not group.solo:
            identity = strategy._control.broadcast(self._relay.identity() if group.leader == group.rank else None)
            if group.leader != group.rank and identity is not None:
                self._relay.adopt_identity(identity)
            self._leads = group.leader == group.rank

    def _writes(self) -> bool:
        """A newcomer that leads takes over the logs when a step has completed since its admission: the leader before it
        has then passed the safe point at which it let go of them."""
        group = self._group
        return bool(group.leader == group.rank and group.state.done > self._admitted_at)

    def identity(self) -> dict[str, Any]:
        """Which runs the loggers write to, for a replacement."""
        return self._relay.identity()

    def adopt_identity(self, identity: dict[str, Any]) -> None:
        """In a newcomer, with the state of the safe point at which it is admitted."""
        self._admitted_at = self._group.state.done
        self._relay.adopt_identity(identity)

    def at_safe_point(self, admission: bool = False) -> None:
        """A step has completed since the last safe point, so what was logged before that one is stable.

        Where newcomers are admitted, all members stand at the same safe point: all that they have logged is stable, and
        must be written, since the newcomer that may lead from here on has not logged it.
        """
        leads = self._writes()
        self._relay.stable(None if admission else self._mark)
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
