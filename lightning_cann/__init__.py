"""Fault-tolerant data-parallel training for PyTorch Lightning on Ascend NPUs (HCCL), GPUs (NCCL) and CPUs (gloo).

    Trainer(strategy="cann_ft")        # needs no import of this package

Importing the package is cheap: names are loaded when they are used, and neither torch nor lightning comes with it.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "FaultTolerantStrategy": "lightning_cann.strategies",
    "FaultToleranceError": "lightning_cann.errors",
    "ViewChanged": "lightning_cann.errors",
    "ConfigurationError": "lightning_cann.errors",
}

__all__ = ["ConfigurationError", "FaultToleranceError", "FaultTolerantStrategy", "ViewChanged", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_loaded() -> None:
    """Where torch's autoloading is off, importing this package registers the strategies."""
    from lightning_cann._autoload import autoload

    autoload()


_register_loaded()
