"""DataLoader workers that end with their rank."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["WorkerInit"]

_PR_SET_PDEATHSIG = 1


class WorkerInit:
    """``worker_init_fn`` that ends a worker with its parent, then calls the user's.

    A forked worker inherits the sockets of its rank: while it lives, the peers of a killed rank see open
    connections.  Linux sends the signal when the *thread* that started the worker ends, so :attr:`bind` is set only
    when iteration begins in the main thread.  A no-op elsewhere than on Linux.

    Args:
        user: the user's ``worker_init_fn`` or None; called last.

    Attributes:
        bind: False leaves the worker alone (iteration began in another thread).
        forkserver: workers are children of a fork server, which lives on while they do, so its death is no sign: a
            thread waits for the end of the rank instead.
    """

    def __init__(self, user: Callable[[int], Any] | None) -> None:
        self.user = user
        self.forkserver = False
        self.bind = True

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        if self.forkserver and parent is not None:
            threading.Thread(target=_die_with, args=(parent.sentinel,), name="die-with-rank", daemon=True).start()
        elif self.bind and sys.platform.startswith("linux"):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
                errno = ctypes.get_errno()
                raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
            if parent is not None and os.getppid() != parent.pid:
                os.kill(os.getpid(), signal.SIGKILL)  # the parent died before prctl: no signal will come
        if self.user is not None:
            self.user(worker_id)


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
