"""``FaultTolerantStrategy`` of ``lightning.pytorch``."""

from __future__ import annotations

from lightning_cann.strategies.factory import strategy_class

__all__ = ["FaultTolerantStrategy"]

FaultTolerantStrategy = strategy_class("lightning.pytorch")
