"""``cann-train fit | validate | test | predict``: LightningCLI with the defaults of this package.

Models, data and everything else are named by ``class_path`` in a YAML file; classes in the current directory are
found as well.  Rank processes are started by running the same command line again, so this module must behave the
same in the first process and in every other.  It is not a training script: see ``examples/`` for one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry

from lightning_cann._autoload import autoload
from lightning_cann.errors import ConfigurationError

__all__ = ["TrainCLI", "run"]


class TrainCLI(LightningCLI):
    """LightningCLI for any model and data, with ``strategy: cann_ft`` unless the config says otherwise."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            trainer_defaults={"strategy": "cann_ft"},
            seed_everything_default=42,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},  # a replacement finds the file of the rank that it replaces
            parser_kwargs={"prog": "cann-train"},
            args=args,
        )

    def before_instantiate_classes(self) -> None:
        """Refuse a strategy name that Lightning would refuse later and less clearly."""
        strategy = self.config[self.subcommand].trainer.strategy
        if isinstance(strategy, str) and strategy != "auto" and strategy not in StrategyRegistry:
            raise ConfigurationError(
                f"trainer.strategy={strategy!r} is no strategy: use one of {', '.join(sorted(StrategyRegistry))}, "
                "or {class_path: ..., init_args: {...}} for a class of your own"
            )


def run(argv: Sequence[str]) -> Any:
    """Run ``argv`` (subcommand first) to its end.

    Raises:
        SystemExit: The command line or a config file is wrong (code 2), or help was asked for (code 0).
        ConfigurationError: A setting is wrong in a way that only shows once classes are known.
    """
    autoload()  # registers the strategies also where torch's entry points are switched off, or not installed
    # As `python -m` does: a console script has its own folder at the front of the path instead.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    # Lightning warns where `args` repeats the command line.
    return TrainCLI(args=None if list(argv) == sys.argv[1:] else list(argv))
