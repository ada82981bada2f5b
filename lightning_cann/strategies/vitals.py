"""The engine's own metrics, logged beside the user's (names: :mod:`lightning_cann.metrics.names`).

The rows go to all loggers when the view changes and each time the weights are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_cann.collectives.view import View

__all__ = ["Vitals", "projection"]


def projection(parameters: list[torch.Tensor], seed: int) -> float:
    """A random projection of the weights in float64: equal weights give equal numbers, to the bit."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for parameter in parameters:
        flat = parameter.detach().reshape(-1).cpu()
        signs = torch.randint(0, 2, (min(flat.numel(), 4096),), generator=generator, dtype=torch.int8) * 2 - 1
        whole = flat.numel() // signs.numel() * signs.numel() if signs.numel() else 0
        if whole:
            total += float((flat[:whole].double().view(-1, signs.numel()).sum(0) * signs).sum())
        if whole < flat.numel():
            total += float(flat[whole:].double().sum())
    return total


class Vitals:
    def __init__(self, trainer: Any, runtime: Any, every_n_steps: int) -> None:
        self._trainer, self._runtime, self._every = trainer, runtime, every_n_steps
        self._failures = self._rejoins = 0
        self._changed = True
        self._latency = 0.0
        self._compared_at = -1

    def state_dict(self) -> dict[str, int]:
        """What decides when members compare: a replacement must do it at the same safe points."""
        return {"compared_at": self._compared_at, "failures": self._failures, "rejoins": self._rejoins}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._compared_at = state["compared_at"]
        self._failures, self._rejoins = state["failures"], state["rejoins"]

    def on_view(self, view: View) -> None:
        before = self._runtime.group.previous_ranks
        self._failures += len(set(before) - set(view.ranks))
        self._rejoins += len(view.install.newcomers)
        self._latency = self._runtime.group.last_latency_s
        self._changed = True

    def at_safe_point(self) -> None:
        steps = self._runtime.steps
        compare = bool(self._every) and steps > 0 and steps % self._every == 0 and steps != self._compared_at
        if not (compare or self._changed):
            return
        group = self._runtime.group
        row: dict[str, float] = {
            "ft_view": group.view.id.number,
            "ft_members": group.view.size,
            "ft_steps_redone": group.redone,
            "ft_failures": self._failures,
            "ft_rejoins": self._rejoins,
            "ft_recovery_latency_seconds": self._latency,
        }
        if compare:
            self._compared_at = steps
            row["ft_gradient_divergence"] = self._divergence(steps)
        self._changed = False
        if self._trainer.loggers:
            self._trainer._logger_connector.log_metrics(row, step=self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _divergence(self, steps: int) -> float:
        """Largest relative deviation between members of a random projection of the weights; 0 when all is well."""
        mine = projection(list(self._trainer.strategy.model.parameters()), steps)
        value = torch.tensor([mine], dtype=torch.float64)
        rows, _ = self._runtime.control.all_gather_tensor(value.to(self._runtime.group.device))
        values = torch.cat(rows)
        spread = float(values.max() - values.min())
        return spread / max(1e-30, float(values.abs().max())) if spread else 0.0
