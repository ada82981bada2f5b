"""How the coordinator admits newcomers: all members stop at the same safe point, which lies ahead of them all."""

from __future__ import annotations

from lightning_cann.membership import messages as m
from lightning_cann.membership.state import Attempt, CoordinatorState

__all__ = ["Admission"]

MAX_LEAD = 256  # safe points


class Admission(CoordinatorState):
    def _on_joinready(self, sender: str, message: m.JoinReady, now: float) -> None:
        if sender not in self.known:
            return
        self.known[sender].joining, self.known[sender].stage = True, message.stage
        if self.stage > message.stage:
            self._send(sender, m.StageInfo(self.stage))
        self._try_admit(now)

    def _try_admit(self, now: float) -> None:
        if self.attempt or self.proposal or self.recovering or self.forming or self.stopping or self.without_state:
            return
        if self.finished:
            return  # no safe point is left
        joiners = tuple(
            k for k, v in self.known.items() if v.joining and k not in self.members and v.stage == self.stage
        )
        if self.ending:
            joiners = ()
        elif not joiners:
            return
        if not self.members:
            return
        self.attempts += 1
        self.attempt = Attempt(self.attempts, joiners)
        for member_id in self.members:
            self._send(member_id, m.BoundaryQuery(self.attempts))

    def _on_boundary(self, sender: str, message: m.Boundary, now: float) -> None:
        attempt = self._attempt_of(sender, message.attempt)
        if attempt is None:
            return
        attempt.boundaries[sender] = message.boundary
        if set(attempt.boundaries) == set(self.members):
            attempt.target = max(attempt.boundaries.values()) + self.lead
            for member_id in self.members:
                self._send(member_id, m.JoinAt(attempt.number, attempt.target))

    def _on_joinarmed(self, sender: str, message: m.JoinArmed, now: float) -> None:
        attempt = self._attempt_of(sender, message.attempt)
        if attempt is None:
            return
        if message.ok:
            attempt.armed.add(sender)
            self._at_boundary(attempt)
        else:  # somebody was faster than the messages: try again, further ahead
            self.lead = min(self.lead * 2, MAX_LEAD)
            self._cancel_attempt()
            self._try_admit(now)

    def _on_atboundary(self, sender: str, message: m.AtBoundary, now: float) -> None:
        attempt = self._attempt_of(sender, message.attempt)
        if attempt is not None:
            attempt.waiting.add(sender)
            self._at_boundary(attempt)

    def _at_boundary(self, attempt: Attempt) -> None:
        everybody = set(self.members)
        if attempt.armed >= everybody and attempt.waiting >= everybody:
            self.lead = max(1, self.lead // 2)
            self._new_proposal((*self.members, *attempt.joiners))

    def _attempt_of(self, sender: str, number: int) -> Attempt | None:
        attempt = self.attempt
        if attempt is None or attempt.number != number or sender not in self.members or self.proposal is not None:
            return None
        return attempt

    def _cancel_attempt(self) -> None:
        assert self.attempt is not None
        number, self.attempt = self.attempt.number, None
        for member_id in self.members:
            if member_id in self.known:
                self._send(member_id, m.JoinCancel(number))
