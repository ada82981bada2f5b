"""The store from which a view's process group is made: keys travel over the members' links to the coordinator.

No member hosts it, so no member's death takes it away.  It lives for the construction of one group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["ViewStore"]


class ViewStore(dist.Store):
    """A :class:`torch.distributed.Store` of one view.  Filled by :meth:`deliver`, emptied by nobody.

    Args:
        publish: sends (key, value) to all members of the view, this one included.
        timeout_s: how long :meth:`wait` waits for a key, in seconds.
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish, self._timeout_s = publish, timeout_s
        self._values: dict[str, bytes] = {}
        self._cond = threading.Condition()
        self._cancelled = ""

    def deliver(self, key: str, value: bytes) -> None:
        """A member has set a key (called by the link)."""
        with self._cond:
            self._values[key] = value
            self._cond.notify_all()

    def cancel(self, reason: str) -> None:
        """Makes all waits fail: the view is no more."""
        with self._cond:
            self._cancelled = reason
            self._cond.notify_all()

    # the names are torch's
    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.deliver(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit
        with self._cond:
            while any(key not in self._values for key in keys):
                if self._cancelled:
                    raise RuntimeError(f"the view is no more: {self._cancelled}")
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [key for key in keys if key not in self._values]
                    raise RuntimeError(f"no member has set {missing} within {limit:g} s")
                self._cond.wait(left)

    def check(self, keys: Sequence[str]) -> bool:
        with self._cond:
            return all(key in self._values for key in keys)
