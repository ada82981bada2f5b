"""The one table of environment names.

``HCCL_FT_*`` are the vendor's names, read late: an argument that is given wins.  ``CANN_FT_*`` are set by the agent for
the rank processes that it starts; nobody sets them by hand.
"""

from __future__ import annotations

import os

from lightning_cann.errors import ConfigurationError

__all__ = ["USER_NAMES", "read_bool", "read_int"]

# set by users
ENABLE = "HCCL_FT_ENABLE"
CHECKPOINT_INTERVAL = "HCCL_FT_CHECKPOINT_INTERVAL"
MAX_FAILURES = "HCCL_FT_MAX_FAILURES"

USER_NAMES = {
    ENABLE: "0 turns recovery off: the strategy then behaves as DDP",
    CHECKPOINT_INTERVAL: "steps between snapshots",
    MAX_FAILURES: "logical ranks that may be without a member at one time before the job stops",
}

# set by the agent for its children
COORDINATOR = "CANN_FT_COORDINATOR"  # host:port
TOKEN = "CANN_FT_TOKEN"  # secret of the job
JOB_ID = "CANN_FT_JOB_ID"
MEMBER_ID = "CANN_FT_MEMBER_ID"  # identity of this process, new for each start
RANK = "CANN_FT_RANK"  # logical rank
LOCAL_RANK = "CANN_FT_LOCAL_RANK"
NODE = "CANN_FT_NODE"
WORLD_SIZE = "CANN_FT_WORLD_SIZE"
EVENTS = "CANN_FT_EVENTS"  # path of the event log


def read_int(name: str, default: int | None) -> int | None:
    """The integer in the environment, or ``default``.  Raises ConfigurationError if it is none."""
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"environment variable {name}={text!r} must be an integer; unset it or correct it.") from None


def read_bool(name: str, default: bool) -> bool:
    """The switch in the environment (0/1, true/false, yes/no, on/off), or ``default``."""
    text = os.environ.get(name, "").strip().lower()
    if text == "":
        return default
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"environment variable {name}={text!r} must be 0 or 1; unset it or correct it.")
