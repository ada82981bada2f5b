"""The strategies: ``Trainer(strategy="cann_ft")`` or ``FaultTolerantStrategy(...)``.

``FaultTolerantStrategy`` is the class of the Lightning namespace in use: ``pytorch_lightning`` if only that one has been
imported, else ``lightning.pytorch``.  :func:`lightning_cann.strategies.factory.strategy_class` gives either by name.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["FaultTolerantStrategy"]


def __getattr__(name: str) -> Any:
    if name == "FaultTolerantStrategy":
        from lightning_cann.strategies.factory import strategy_class

        only_standalone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        return strategy_class("pytorch_lightning" if only_standalone else "lightning.pytorch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
