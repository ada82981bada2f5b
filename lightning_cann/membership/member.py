"""A member's protocol as a pure state machine: the other half of :mod:`lightning_cann.membership.coordinator`.

The program of a member is a sequence of *transactions*, the same at all members: a step (all its buckets) or a control
collective.  A transaction completes only when all members of the view have entered it, so nobody is ever more than one
behind (R2), and ``done``, their number, is all that a flush has to say.

Owner of the state: the engine, under one lock.  Its link thread feeds messages in; the training thread calls
:meth:`complete`, :meth:`adopt` and :meth:`reach_boundary`.
"""

from __future__ import annotations

from lightning_cann.membership import messages as m
from lightning_cann.membership.messages import NO_VIEW, MemberInfo, ViewId

__all__ = ["MemberState"]


class MemberState:
    def __init__(self, info: MemberInfo) -> None:
        self.info = info
        self.incarnation = 0  # of the coordinator last spoken to: older ones are not obeyed (R10)
        self.view: ViewId = NO_VIEW  # adopted
        self.members: tuple[MemberInfo, ...] = ()
        self.promised: ViewId = NO_VIEW  # last proposal answered
        self.frozen = True  # between flush and adoption nothing completes (R3)
        self.fresh = True  # has no state yet (R6)
        self.done = 0  # completed transactions
        self.install: m.Install | None = None  # not yet adopted
        self.lacking = False  # the result of transaction cut - 1 is still to be fetched (R4)
        self.features: set[str] = set()
        self.boundary = 0  # safe points passed
        self.armed: tuple[int, int] | None = None  # (attempt, boundary) at which to stop

    @property
    def member_id(self) -> str:
        return self.info.member_id

    def hello(self, incarnation: int, stage: int, joining: bool, pid: int, stopping: str = "") -> m.Hello:
        """What the member tells a coordinator; announcing is a promise not to obey older ones."""
        self.incarnation = max(self.incarnation, incarnation)
        self.install, self.lacking = None, False  # a view that it did not announce it must not adopt either
        return m.Hello(self.info, pid, self.fresh, self.view, self.members, stage, joining, stopping)

    # ------------------------------------------------------------------------------------------ view change
    def on_propose(self, message: m.Propose) -> m.Flush | None:
        if message.view <= self.promised or message.view.incarnation < self.incarnation:
            return None
        self.promised, self.frozen = message.view, True
        self.install, self.lacking, self.armed = None, False, None
        return m.Flush(message.view, self.done, self.fresh, tuple(sorted(self.features)))

    def on_install(self, message: m.Install) -> bool:
        """Takes the view's plan; returns whether it is the one that was promised."""
        if message.view != self.promised or message.view <= self.view or message.view.incarnation < self.incarnation:
            return False
        self.install = message
        self.features |= set(message.features)
        newcomer = self.member_id in message.newcomers
        self.lacking = self.done < message.cut and not newcomer and not self.fresh
        return True

    def source(self) -> MemberInfo | None:
        """From whom to fetch the missing result, or, for a newcomer, the state."""
        if self.install is None:
            return None
        wanted = self.install.sources.get(self.member_id)
        return next((x for x in self.install.members if x.member_id == wanted), None)

    def served(self) -> None:
        """The missing result is there, and kept: from now on it counts as completed."""
        assert self.install is not None
        self.lacking, self.done = False, self.install.cut

    def adopt(self) -> m.Install:
        """Enters the installed view.  A member does so only with all results up to the cut in hand (R4)."""
        install = self.install
        if install is None or self.lacking:
            raise AssertionError("no view to adopt, or results are lacking")
        self.install, self.view, self.members, self.frozen = None, install.view, install.members, False
        if self.member_id in install.newcomers:
            self.done, self.boundary = install.cut, install.boundary
        elif self.fresh:  # the first view
            self.fresh, self.done = False, install.cut
        return install

    def complete(self, view: ViewId) -> bool:
        """The next transaction has completed in ``view``; False: too late, it does not count (R3)."""
        if self.frozen or view != self.view:
            return False
        self.done += 1
        return True

    def took_state(self, view: ViewId) -> bool:
        """A newcomer holds its donor's state of the cut of ``view``; False: that view is no more (R7)."""
        if self.frozen or view != self.view:
            return False
        self.fresh = False
        return True

    # ------------------------------------------------------------------------------------------ safe points
    def on_boundary_query(self, message: m.BoundaryQuery) -> m.Boundary:
        return m.Boundary(message.attempt, self.boundary)

    def on_join_at(self, message: m.JoinAt) -> m.JoinArmed:
        """A safe point that is already passed, or is being waited at, cannot be stopped at any more."""
        ok = self.boundary < message.boundary and not self.frozen
        if ok:
            self.armed = (message.attempt, message.boundary)
        return m.JoinArmed(message.attempt, ok)

    def on_join_cancel(self, message: m.JoinCancel) -> None:
        if self.armed is not None and self.armed[0] == message.attempt:
            self.armed = None

    def reach_boundary(self) -> m.AtBoundary | None:
        """The program is at its next safe point; a message means: send it and wait until :attr:`armed` is gone."""
        self.boundary += 1
        if self.armed is not None and self.armed[1] == self.boundary:
            return m.AtBoundary(self.armed[0])
        return None

    @property
    def held(self) -> bool:
        """Whether the program has to wait at the safe point at which it stands."""
        return self.armed is not None and self.armed[1] == self.boundary
