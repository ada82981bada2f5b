"""The closed set of error types that lightning_cann raises.

``FaultToleranceError``
    Training could not go on: more failures than ``max_failures``, fewer members than ``min_members``,
    or a rank that raised and whose policy is "fail".
``ViewChanged``
    A collective could not be redone in the new view; the caller must run its own unit of work again.
``ConfigurationError``
    An argument or environment value is wrong.  Raised before training starts; nothing was changed.
``Excluded``
    This process was declared failed by the others.  Its state is void: it must end and come back as a newcomer.
"""

from __future__ import annotations

__all__ = ["ConfigurationError", "Excluded", "FaultToleranceError", "ViewChanged"]


class FaultToleranceError(RuntimeError):
    """Training stopped cleanly because recovery was not possible or not allowed."""


class ViewChanged(RuntimeError):
    """The view changed inside an operation that only the caller can run again."""


class ConfigurationError(ValueError):
    """A setting is invalid: the message names the argument, the value and the way out."""


class Excluded(SystemExit):
    """The other members went on without this process (DESIGN rule R5: identity).

    A ``SystemExit``, so that it ends the process through ``finally`` blocks and past ``except Exception``;
    its code, :data:`EXCLUDED_EXIT_CODE`, tells the agent to start the logical rank again as a newcomer.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXCLUDED_EXIT_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


EXCLUDED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
