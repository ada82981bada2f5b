"""Names under which Lightning finds the strategies.  Imports neither torch nor Lightning until one is used."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["NAMES", "register"]

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
