"""This process as a member of its job: made once, from what the agent put into the environment.

    runtime = Runtime.start(settings, device)     # blocks until the first view, or until it is known to be a newcomer
    runtime.group, runtime.control

It lives until the process ends, over any number of trainer calls, and then leaves the job in order.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from typing import Any

import torch

from lightning_cann import environment as env
from lightning_cann.collectives.control import Control
from lightning_cann.collectives.process_group import install_default_group
from lightning_cann.collectives.view_group import GroupSettings, ViewGroup
from lightning_cann.errors import FaultToleranceError
from lightning_cann.membership import messages as m

__all__ = ["Runtime", "is_rank_process"]

log = logging.getLogger(__name__)


def is_rank_process() -> bool:
    """Whether an agent started this process."""
    return env.MEMBER_ID in os.environ


class Runtime:
    """Owner of this process's :class:`ViewGroup`.  Use from the main thread."""

    _instance: Runtime | None = None

    def __init__(self, settings: GroupSettings, device: torch.device) -> None:
        host, port = os.environ[env.COORDINATOR].rsplit(":", 1)
        self.group = ViewGroup(
            settings,
            rank=int(os.environ[env.RANK]),
            world_size=int(os.environ[env.WORLD_SIZE]),
            member_id=os.environ[env.MEMBER_ID],
            coordinator=(host, int(port)),
            token=os.environ[env.TOKEN],
            node=os.environ.get(env.NODE, ""),
            host=host,
            device=device,
        )
        self.control = Control(self.group)
        self.calls = 0  # trainer calls entered: the stage
        self.steps = 0  # committed
        self.failed = ""

    @classmethod
    def start(cls, settings: GroupSettings, device: torch.device) -> Runtime:
        """The runtime of this process; connects it on the first call (later ones ignore ``settings``)."""
        if cls._instance is None:
            runtime = cls(settings, device)
            cls._instance = runtime
            atexit.register(runtime.close)
            runtime._note_exceptions()
            runtime.group.start()
            install_default_group(runtime.control)
        return cls._instance

    @classmethod
    def current(cls) -> Runtime | None:
        """The runtime if :meth:`start` was called, else None."""
        return cls._instance

    def _note_exceptions(self) -> None:
        """An exception that ends the script is no clean farewell."""
        previous = sys.excepthook

        def hook(kind: Any, error: Any, trace: Any) -> None:
            self.failed = self.failed or f"raised {kind.__name__}"
            if isinstance(error, FaultToleranceError):
                # Its cause lies elsewhere, and is told there: where this rank stood when it heard of it says nothing.
                sys.stderr.write(f"[cann_ft] rank {self.group.rank} stops: {error}\n")
            else:
                previous(kind, error, trace)

        sys.excepthook = hook

    def report_exception(self, error: BaseException) -> None:
        """Tells the coordinator that the user's code raised here; its policy decides what follows."""
        if not self.failed:
            self.failed = f"raised {type(error).__name__}"
            text = "".join(traceback.format_exception(error))
            self.group.send(m.RankError(type(error).__name__, str(error)[:2000], text[-8000:]))

    def leave(self, reason: str) -> None:
        """A planned leave: the others go on at once."""
        self.failed = reason
        self.group.close(reason, finished=False, steps=self.steps)

    def close(self) -> None:
        """Farewell at the end of the process; idempotent."""
        if threading.current_thread() is threading.main_thread():
            joined = not self.group.solo
            self.group.close(self.failed or "finished", finished=joined and not self.failed, steps=self.steps)
