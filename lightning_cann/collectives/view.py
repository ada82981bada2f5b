"""A view: the numbered membership in which collectives run, and the process group that carries them."""

from __future__ import annotations

import threading
from typing import Any

from lightning_cann.collectives.backend import Backend
from lightning_cann.collectives.store import ViewStore
from lightning_cann.membership.messages import Install, MemberInfo, ViewId

__all__ = ["View"]


class View:
    """One installed view as one of its members sees it.

    ``group`` is None in a view of one member, and once the view is broken.  Owner: :class:`~.view_group.ViewGroup`.

    Attributes:
        ranks: logical ranks of its members, ascending.  ``ranks[0]`` is the leader.
        index: this member's place among them, which is its rank in the process group.
    """

    def __init__(self, install: Install, me: str, backend: Backend, store: ViewStore) -> None:
        self.install = install
        self.id: ViewId = install.view
        self.members: tuple[MemberInfo, ...] = install.members
        self.ranks = tuple(x.rank for x in install.members)
        self.index = next(i for i, x in enumerate(install.members) if x.member_id == me)
        self.size = len(self.members)
        self.group: Any = None
        self.broken = False
        self.steps = 0  # completed in this view
        self.store = store
        self._backend = backend
        self.reaper: threading.Thread | None = None

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def connect(self, host: str, connect_timeout: Any) -> None:
        """Makes the process group.  Raises RuntimeError when a member cannot be reached or the view is no more."""
        if self.size > 1:
            self.group = self._backend.create(self.store, self.index, self.size, host, connect_timeout)

    def dispose(self, reason: str) -> None:
        """Ends the view.  Its group goes to a thread: a destructor takes 0.3 s, and waits for a frozen peer's time-out."""
        self.broken = True
        self.store.cancel(reason)
        group, self.group = self.group, None
        if group is not None:
            box = [group]
            del group
            name = f"cann-reaper-{self.id.number}"
            self.reaper = threading.Thread(target=self._destroy, args=(box,), name=name, daemon=True)
            self.reaper.start()

    def _destroy(self, box: list[Any]) -> None:
        self._backend.destroy(box.pop())
