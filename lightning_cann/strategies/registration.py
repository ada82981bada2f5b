"""Names under which Lightning finds the strategies and the NPU.  Imports neither torch nor Lightning until one is used."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

__all__ = ["NAMES", "prefer_npu", "register", "register_accelerator"]

NAMES: dict[str, dict[str, Any]] = {
    "cann_ft": {},
    "cann_ft_find_unused_parameters_true": {"find_unused_parameters": True},
    "cann_ft_find_unused_parameters_false": {"find_unused_parameters": False},
    "cann_ft_spawn": {"start_method": "spawn"},
    "cann_ft_notebook": {"start_method": "spawn"},
}


def _create(namespace: str, **arguments: Any) -> Any:
    from lightning_cann.strategies.factory import strategy_class

    return strategy_class(namespace)(**arguments)


def register(namespace: str, registry: Any) -> None:
    """Adds the strategies to a ``StrategyRegistry``; names that are there already are left alone."""
    for name, arguments in NAMES.items():
        if name not in registry:
            registry.register(
                name,
                functools.partial(_create, namespace),
                description="data-parallel training that goes on when ranks die",
                **arguments,
            )


def register_accelerator(namespace: str, registry: Any) -> None:
    """Adds ``"npu"`` to an ``AcceleratorRegistry``, unless it has one."""
    if "npu" not in registry:
        from lightning_cann.accelerators.npu import accelerator_class

        registry.register("npu", accelerator_class(namespace), description="Ascend NPU")


def prefer_npu(connector: Any) -> None:
    """``accelerator="auto"`` picks an NPU where there is one: Lightning's own choice knows only its own devices."""
    if importlib.util.find_spec("torch_npu") is None or getattr(connector, "_prefers_npu", False):
        return
    original = connector._choose_auto_accelerator

    def choose() -> Any:
        from lightning_cann.accelerators.npu import npu_available

        return "npu" if npu_available() else original()

    connector._choose_auto_accelerator = staticmethod(choose)
    connector._prefers_npu = True
