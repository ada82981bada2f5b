"""``cann-train`` and ``python -m lightning_cann.cli``: a dispatcher that imports a command only to run it.

Lightning takes seconds to import, so ``--help``, ``--version`` and ``report`` do without.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lightning_cann.errors import ConfigurationError, FaultToleranceError

__all__ = ["main"]

USAGE = """\
usage: cann-train COMMAND [ARGUMENTS]

Train with PyTorch Lightning and survive the death of ranks.

commands:
  fit | validate | test | predict --config FILE.yaml [--KEY VALUE ...]
                    run a Lightning config; `cann-train fit --help` lists all keys
  demo              train a small model with 4 processes on CPU, kill one on the way, show that nothing was lost
  report EVENTS.jsonl
                    tell a finished run: table of failures and recoveries, picture of the loss

options:
  -h, --help        show this text
  --version         show the version
"""

LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program name (default: ``sys.argv[1:]``).

    Returns:
        Exit code: 0 well, 1 the training or its check failed, 2 the command line or config is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    try:
        if command in ("-h", "--help", "help"):
            print(USAGE, end="")
            return 0
        if command == "--version":
            print(f"cann-train {_version()}")
            return 0
        if command in LIGHTNING_COMMANDS:
            from lightning_cann.cli.fit import run

            run(arguments)
            return 0
        if command == "demo":
            from lightning_cann.cli.demo import main as demo

            return demo(arguments[1:])
        if command == "report":
            from lightning_cann.cli.report import main as report

            return report(arguments[1:])
        raise ConfigurationError(f"unknown command {command!r}: `cann-train --help` lists the commands")
    except ConfigurationError as error:
        print(f"cann-train: error: {error}", file=sys.stderr)
        return 2
    except FaultToleranceError as error:
        print(f"cann-train: training stopped: {error}", file=sys.stderr)
        return 1


def _version() -> str:
    try:
        return version("lightning-cann")
    except PackageNotFoundError:
        return "(not installed: running from a source folder)"


if __name__ == "__main__":
    sys.exit(main())
