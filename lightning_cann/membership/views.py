"""How the coordinator makes views: proposal, flush, plan, installation."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_cann.membership import messages as m
from lightning_cann.membership.messages import ViewId
from lightning_cann.membership.state import CoordinatorState

__all__ = ["Views"]


class Views(CoordinatorState):
    def _try_form(self, now: float) -> None:
        """The first view: everybody that is not known to be dead, all at transaction 0."""
        if not self.forming or self.proposal is not None or self.stopping:
            return
        there = {member.info.rank for member in self.known.values()}
        awaited = set(range(self.settings.world_size)) - there - self.dead_ranks
        if awaited and now - self.started < self.settings.start_timeout_s:
            return
        missing = self.settings.world_size - len(there)
        limit = self.settings.max_failures
        if len(there) < self.settings.min_members or (limit is not None and missing > limit):
            if not awaited and not there:
                return  # all died; their replacements will say hello
            if awaited or missing:
                self._stop(f"only {len(there)} of {self.settings.world_size} ranks came up", now)
                for member_id in self.known:
                    self._send(member_id, m.Stop(self.stopping, True))
            return
        self._new_proposal(self.known)

    def _propose(self, now: float) -> None:
        """A new view from those that are left (and the newcomers of the attempt that has come to its safe point)."""
        stay = [x for x in self.members if x in self.known]
        if self.attempt is not None:
            self._cancel_attempt()
        if not stay:
            self.proposal, self.members = None, ()
            if not self.finished:
                self._stop(f"no member is left ({'; '.join(self.causes)})", now)
            else:
                self._finish()
            return
        self._check_limits(len(stay), now)
        self._new_proposal(stay)

    def _check_limits(self, left: int, now: float) -> None:
        if self.finished:
            return
        missing = self.settings.world_size - left
        limit = self.settings.max_failures
        if limit is not None and missing > limit:
            self._stop(
                f"{missing} of {self.settings.world_size} logical ranks are without a member, more than "
                f"max_failures={limit} ({'; '.join(self.causes)})",
                now,
            )
        elif left < self.settings.min_members:
            self._stop(
                f"{left} members are left, fewer than min_members={self.settings.min_members} "
                f"({'; '.join(self.causes)})",
                now,
            )

    def _new_proposal(self, ids: Iterable[str]) -> None:
        if self.attempt is not None and not set(self.attempt.joiners) <= set(ids):
            self._cancel_attempt()
        self.counter = max(self.counter, self.view.number) + 1
        ordered = tuple(sorted(ids, key=lambda x: self.known[x].info.rank))
        self.proposal = (ViewId(self.incarnation, self.counter), ordered)
        self.replies = {}
        for member_id in ordered:
            self._send(member_id, m.Propose(self.proposal[0]))

    def _on_flush(self, sender: str, message: m.Flush, now: float) -> None:
        if self.proposal is None or message.view != self.proposal[0] or sender not in self.proposal[1]:
            return
        self.replies[sender] = message
        self.features |= set(message.features)
        if set(self.replies) != set(self.proposal[1]):
            return
        if self.forming:
            self._install(self.proposal[1], {}, cut=0, newcomers=())
            self.forming = False
            return
        standing = [x for x in self.proposal[1] if not self.replies[x].fresh]
        if all(self.replies[x].done == 0 for x in standing) and (standing or self.view.incarnation == self.incarnation):
            # nobody has completed anything: those who had not even adopted the first view yet are as good as the others
            starters = (set(self.members) & set(self.proposal[1])) - self.without_state
            standing = [x for x in self.proposal[1] if x in starters or x in standing]
        if not standing:
            self.proposal = None
            self._stop("no member with the model's state is left", now)
            for member_id in self.known:
                self._send(member_id, m.Stop(self.stopping, True))
            return
        cut = max(self.replies[x].done for x in standing)
        leaders = [x for x in standing if self.replies[x].done == cut]
        laggards = [x for x in standing if self.replies[x].done < cut]
        if any(self.replies[x].done < cut - 1 for x in laggards):
            raise AssertionError(f"a member is more than one transaction behind: {self.replies}")
        joiners = self.attempt.joiners if self.attempt is not None else ()
        newcomers = tuple(x for x in self.proposal[1] if self.replies[x].fresh and x in joiners)
        sources = {x: leaders[i % len(leaders)] for i, x in enumerate(laggards)}
        sources |= dict.fromkeys(newcomers, leaders[0])
        for member_id in self.proposal[1]:
            if member_id not in standing and member_id not in newcomers:
                self.known[member_id].fresh = True
                self.known[member_id].joining = True
                self._send(member_id, m.Dismissed(self.proposal[0]))
                if self.stopping:
                    self._send(member_id, m.Stop(self.stopping, True))
        ids = tuple(x for x in self.proposal[1] if x in standing or x in newcomers)
        boundary = self.attempt.target if self.attempt is not None else 0
        end = self.ending if self.attempt is not None else ""
        self.attempt = None
        self.without_state = set(newcomers)
        self.joined_at = now if newcomers else None
        self._install(ids, sources, cut, newcomers, boundary, end)
        self._try_admit(now)

    def _install(
        self,
        ids: tuple[str, ...],
        sources: dict[str, str],
        cut: int,
        newcomers: tuple[str, ...],
        boundary: int = 0,
        end: str = "",
    ) -> None:
        assert self.proposal is not None
        self.view, self.members, self.proposal = self.proposal[0], ids, None
        self.infos = {x: self.known[x].info for x in ids}
        self.resumed = {}
        for member_id in ids:
            self.known[member_id].joining = False
            if member_id not in newcomers:
                self.known[member_id].fresh = False
        message = m.Install(
            self.view,
            tuple(self.infos[x] for x in ids),
            cut,
            sources,
            newcomers,
            tuple(sorted(self.features)),
            self.stopping,
            "; ".join(self.causes),
            boundary,
            end,
        )
        for member_id in ids:
            self._send(member_id, message)
        if end:
            self._emit("job_stopped", reason=end)
            self._finish()  # what follows are farewells
        self._emit(
            "view_installed",
            view=self.view.number,
            members=self._ranks(ids),
            size=len(ids),
            cause=message.cause,
            cut=cut,
            joined=self._ranks(newcomers),
        )
        self.causes = []
        if self.stopping:
            self.finished = True  # what follows are farewells
