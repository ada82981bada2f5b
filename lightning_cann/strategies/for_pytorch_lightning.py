"""``FaultTolerantStrategy`` of ``pytorch_lightning``."""

from __future__ import annotations

from lightning_cann.strategies.factory import strategy_class

__all__ = ["FaultTolerantStrategy"]

FaultTolerantStrategy = strategy_class("pytorch_lightning")
