"""Makes ``Trainer(strategy="cann_ft")`` work in a script that never imports this package.

torch imports the ``torch.backends`` entry points at the end of ``import torch``; Lightning imports torch first.  The hook
installs a finder that registers the strategy right after Lightning's registry has been filled, in each namespace
(``lightning.pytorch`` and ``pytorch_lightning``).  Off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``: then
``import lightning_cann`` does the same.

It must be light, idempotent, and never raise: an exception here would break ``import torch``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["autoload"]

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
_CONNECTOR = "trainer.connectors.accelerator_connector"
_MODULES = {f"{name}.{part}": name for name in _NAMESPACES for part in ("strategies", "accelerators", _CONNECTOR)}


def _register(module: ModuleType) -> None:
    from lightning_cann.strategies import registration

    namespace = _MODULES[module.__name__]
    if module.__name__.endswith(".strategies"):
        registration.register(namespace, module.StrategyRegistry)
    elif module.__name__.endswith(".accelerators"):
        registration.register_accelerator(namespace, module.AcceleratorRegistry)
    else:
        registration.prefer_npu(module._AcceleratorConnector)


class _RegisterAfter(importlib.abc.Loader):
    """Executes a module as its own loader would, then registers our strategies in its registry."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfter(spec.loader)
        return spec


def autoload() -> None:
    """Entry point of the group ``torch.backends``; also called by ``import lightning_cann``."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _MODULES:
        module = sys.modules.get(name)
        ready = ("StrategyRegistry", "AcceleratorRegistry", "_AcceleratorConnector")
        if module is not None and any(hasattr(module, attribute) for attribute in ready):
            _register(module)
