"""One strategy class per Lightning namespace, from one mixin.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of the same code with base classes of their own; a Trainer
accepts only strategies of its copy.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

__all__ = ["namespace_of", "strategy_class"]


@functools.cache
def namespace_of(name: str) -> SimpleNamespace:
    """What the face needs of one Lightning copy (``"lightning.pytorch"`` or ``"pytorch_lightning"``)."""
    fabric = "lightning.fabric" if name.startswith("lightning.") else "lightning_fabric"

    def load(path: str) -> Any:
        return importlib.import_module(path)

    return SimpleNamespace(
        name=name,
        DDPStrategy=load(f"{name}.strategies").DDPStrategy,
        Launcher=load(f"{name}.strategies.launchers.launcher")._Launcher,
        MisconfigurationException=load(f"{name}.utilities.exceptions").MisconfigurationException,
        TrainerFn=load(f"{name}.trainer.states").TrainerFn,
        TrainerStatus=load(f"{name}.trainer.states").TrainerStatus,
        RunningStage=load(f"{name}.trainer.states").RunningStage,
        CombinedLoader=load(f"{name}.utilities.combined_loader").CombinedLoader,
        rank_zero_only=(
            load(f"{fabric}.utilities.rank_zero").rank_zero_only,
            load(f"{name}.utilities.rank_zero").rank_zero_only,
        ),
        data_connector=load(f"{name}.trainer.connectors.data_connector"),
        optimizers_to_device=load(f"{fabric}.utilities.optimizer")._optimizers_to_device,
        reset_seed=load(f"{fabric}.utilities.seed").reset_seed,
        auto_add_worker_init_fn=load(f"{fabric}.utilities.data")._auto_add_worker_init_fn,
    )


@functools.cache
def strategy_class(name: str) -> type:
    """``FaultTolerantStrategy`` for one namespace; the same class at each call."""
    from lightning_cann.strategies.fault_tolerant import FaultTolerantMixin

    namespace = namespace_of(name)
    FaultTolerantMixin.__init__.__qualname__ = "FaultTolerantStrategy.__init__"  # the name that a TypeError tells
    # Where pickle finds the class again: a spawned rank process receives its Trainer that way.
    module = f"lightning_cann.strategies.for_{name.replace('.', '_')}"
    return type(
        "FaultTolerantStrategy",
        (FaultTolerantMixin, namespace.DDPStrategy),
        {"_namespace": namespace, "__doc__": FaultTolerantMixin.__doc__, "__module__": module},
    )
