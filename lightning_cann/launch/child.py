"""Runs a command that must not outlive the process that started it.

    python -m lightning_cann.launch.child COMMAND ARGUMENT...

The kernel sends SIGKILL to this process when its parent dies (Linux, PR_SET_PDEATHSIG, kept over exec), so that no rank is
orphaned by a SIGKILL of its agent.  It is a shim because doing this between fork and exec is not safe in a process with
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "main"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ties the calling process to its parent (``parent``: its expected pid, against the race).  No-op but on Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    die_with_parent(int(os.environ["CANN_FT_AGENT_PID"]))
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
