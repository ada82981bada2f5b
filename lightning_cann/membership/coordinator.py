"""The coordinator's protocol as a pure state machine: messages in, messages out, no I/O, no clock of its own.

    coordinator = Coordinator(settings, incarnation=0)
    effects = coordinator.receive(sender, message, now)     # also: disconnected(sender, now), tick(now)

It installs views and keeps leases; it is *not* on the training path.  Its state is soft: it may be killed at any time,
and a successor (``incarnation + 1``) rebuilds it from what members and agents announce (rule R10).

How a view changes::

    break -> Propose(n) -> every member answers Flush(n): done, fresh -> plan -> Install(n)
    a failure in between: Propose(n + 1), needing new answers

How a newcomer is admitted: only at a *safe point* of the program (between two optimizer steps), so that it can resume
there as from a checkpoint.  Members are asked how many safe points they have passed, told to stop at one that lies ahead
(those already past it decline and the attempt starts again, further ahead), and when all wait there the view is proposed.

Virtual synchrony: Birman & Joseph, "Exploiting virtual synchrony in distributed systems", SOSP 1987.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lightning_cann.errors import ConfigurationError
from lightning_cann.membership import messages as m
from lightning_cann.membership.messages import NO_VIEW, MemberInfo, ViewId

__all__ = ["Coordinator", "CoordinatorSettings", "Emit", "Send"]


CONNECTION_CLOSED = "connection closed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """What the coordinator must know of the job."""

    world_size: int
    """Number of logical ranks."""
    min_members: int = 1
    """Fewer members than this: the job stops."""
    max_failures: int | None = 3
    """More logical ranks than this without a member at one time: the job stops.  None: no limit."""
    lease_s: float = 2.0
    """A member that is silent for so long (seconds) is excluded."""
    start_timeout_s: float = 600.0
    """How long the first view waits for all ranks (seconds) before it starts with those that are there."""
    join_timeout_s: float = 120.0
    """How long members wait for a newcomer to take its state (seconds)."""
    on_rank_exception: str = "fail"
    """``"fail"``: an exception on one rank ends the job; ``"replace"``: that rank is replaced."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigurationError(f"world_size={self.world_size} must be at least 1.")
        if not 1 <= self.min_members <= self.world_size:
            raise ConfigurationError(
                f"min_members={self.min_members} must lie between 1 and the number of ranks, {self.world_size}: "
                "lower it, or start more ranks."
            )
        if self.max_failures is not None and self.max_failures < 0:
            raise ConfigurationError(f"max_failures={self.max_failures} must be 0 or more, or None for no limit.")
        if self.lease_s <= 0:
            raise ConfigurationError(f"lease_s={self.lease_s} must be a positive number of seconds.")
        if self.on_rank_exception not in ("fail", "replace"):
            raise ConfigurationError(f"on_rank_exception={self.on_rank_exception!r} must be 'fail' or 'replace'.")


@dataclasses.dataclass(frozen=True)
class Send:
    """Effect: send a message to a member, an agent, or (``to=None``) to all agents."""

    to: str | None
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Emit:
    """Effect: write an event."""

    event: str
    fields: dict[str, Any]


Effect = Send | Emit


@dataclasses.dataclass
class _Member:
    info: MemberInfo
    pid: int
    fresh: bool
    seen: float
    joining: bool = False  # waits at the entrance with a built model
    stage: int = 0


@dataclasses.dataclass
class _Attempt:
    """One attempt to stop the members at a safe point."""

    number: int
    joiners: tuple[str, ...]
    boundaries: dict[str, int] = dataclasses.field(default_factory=dict)
    armed: set[str] = dataclasses.field(default_factory=set)
    waiting: set[str] = dataclasses.field(default_factory=set)
    target: int = 0  # the safe point


class Coordinator:
    def __init__(self, settings: CoordinatorSettings, incarnation: int = 0, now: float = 0.0) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.view: ViewId = NO_VIEW
        self.members: tuple[str, ...] = ()  # of the current view, in logical order
        self.known: dict[str, _Member] = {}  # connected processes, members or not
        self.infos: dict[str, MemberInfo] = {}  # of the current view, also of members that are gone
        self.gone: dict[str, str] = {}  # excluded or dead processes and why (R5: an identity never comes back)
        self.dead_ranks: set[int] = set()  # reaped before the first view
        self.proposal: tuple[ViewId, tuple[str, ...]] | None = None
        self.replies: dict[str, m.Flush] = {}
        self.features: set[str] = set()
        self.attempt: _Attempt | None = None
        self.attempts = 0
        self.lead = 1  # how far ahead of the foremost member an attempt stops
        self.stage = 0
        self.stopping = ""  # reason, once the job is to end with an error
        self.ending = ""  # reason, once it is to end in order
        self.finished = False  # a member has: the others are in, or past, the closing barrier
        self.reported = False  # that the job has finished
        self.steps = 0
        self.forming = incarnation == 0
        self.recovering = incarnation > 0
        self.trained = False  # an agent has seen a view of this job
        self.announced: dict[str, m.Hello] = {}
        self.joined_at: float | None = None  # when the newest newcomers were admitted
        self.without_state: set[str] = set()  # newcomers of the current view that still take their state
        self.resumed: dict[str, float] = {}  # in the current view: member -> latency in seconds
        self.started = now
        self.last_tick = now
        self.counter = 0  # of views
        self.causes: list[str] = []  # of the next view, for the event log
        self._out: list[Effect] = []

    # ------------------------------------------------------------------------------------------ entrances
    def receive(self, sender: str, message: m.Message, now: float) -> list[Effect]:
        """Handles one message of a member or agent and returns what must be done."""
        if sender in self.known:
            self.known[sender].seen = now
        handler = getattr(self, "_on_" + type(message).__name__.lower(), None)
        if handler is None:
            raise ValueError(f"{type(message).__name__} is not a message for the coordinator")
        if isinstance(message, (m.Hello, m.AgentHello)) or sender in self.known or not hasattr(message, "view"):
            handler(sender, message, now)
        return self._flush_effects()

    def disconnected(self, sender: str, now: float) -> list[Effect]:
        """The connection of a member has ended without a farewell."""
        if sender in self.known:
            self._lost(sender, CONNECTION_CLOSED, now)
        return self._flush_effects()

    def tick(self, now: float) -> list[Effect]:
        """Checks leases and time-outs; call it several times per lease."""
        late = now - self.last_tick > self.settings.lease_s / 2
        self.last_tick = now
        for member_id, member in list(self.known.items()):
            if late:  # it was the coordinator that slept: nobody's silence proves anything
                member.seen = now
            elif now - member.seen > self.settings.lease_s and member_id in self.known:
                self._send(None, m.Fence(member_id, "lease expired"))
                self._lost(member_id, "lease expired", now)
        if self.joined_at is not None and now - self.joined_at > self.settings.join_timeout_s:
            for member_id in sorted(self.without_state & set(self.known)):
                self._send(None, m.Fence(member_id, "took too long to take its state"))
                self._lost(member_id, f"no state after {self.settings.join_timeout_s:g} s", now)
        if self.forming:
            self._try_form(now)
        overdue = self.recovering and not self.finished and now - self.started > self.settings.start_timeout_s
        if overdue and all(hello.fresh for hello in self.announced.values()):
            self._stop("no process with the model's state announced itself to the restarted coordinator", now)
        return self._flush_effects()

    # ------------------------------------------------------------------------------------------ members
    def _on_hello(self, sender: str, hello: m.Hello, now: float) -> None:
        if sender in self.gone:
            self._send(sender, m.ExcludedNotice(self.incarnation, self.gone[sender]))
            return
        holder = next((k for k, v in self.known.items() if v.info.rank == hello.info.rank and k != sender), None)
        if holder is not None:  # a replacement is there before its predecessor's end was noticed
            self._lost(holder, "replaced", now)
        again = sender in self.known  # a new connection: what was under way on the old one is lost
        self.known[sender] = _Member(hello.info, hello.pid, hello.fresh, now, hello.joining, hello.stage)
        self.dead_ranks.discard(hello.info.rank)
        newcomer = hello.fresh and not self.forming
        self._send(sender, m.Welcome(self.incarnation, newcomer, self.stage, self.settings.lease_s))
        if hello.fresh:
            self._emit("member_started", rank=hello.info.rank, pid=hello.pid, member_id=sender)
        if self.stopping and hello.fresh:
            self._send(sender, m.Stop(self.stopping, True))
        elif self.finished and newcomer and sender not in self.members:
            self._send(sender, m.Stop("the job has finished", False))
        elif self.recovering:
            self.announced[sender] = hello
            self._try_recover(now)
        elif self.forming:
            self.proposal = None  # it is to be in the first view too
            self._try_form(now)
        elif again and (sender in self.members or (self.proposal is not None and sender in self.proposal[1])):
            self.causes.append(f"rank {hello.info.rank}: new connection")
            self._propose(now)
        elif not hello.fresh and sender not in self.members:
            self._exclude(sender, "not a member of the current view", now)
        elif hello.joining:
            self._try_admit(now)

    def _on_beat(self, sender: str, message: m.Beat, now: float) -> None:
        pass  # every message renews the lease

    def _on_broken(self, sender: str, message: m.Broken, now: float) -> None:
        if message.view == self.view and self.proposal is None and not self.recovering and sender in self.members:
            self.features |= set(message.features)
            self.causes.append(message.reason)
            self._propose(now)

    def _on_left(self, sender: str, message: m.Left, now: float) -> None:
        if sender not in self.known:
            return
        if message.finished:
            self.finished, self.steps = True, max(self.steps, message.steps)
        self._lost(sender, message.reason, now, planned=True, finished=message.finished)

    def _on_rankerror(self, sender: str, message: m.RankError, now: float) -> None:
        if sender not in self.known:
            return
        info = self.known[sender].info
        self._emit(
            "rank_exception", rank=info.rank, type=message.kind, message=message.text, traceback=message.traceback
        )
        if self.settings.on_rank_exception == "fail" and sender in self.members:
            self._stop(f"rank {info.rank} raised {message.kind}: {message.text}", now)
        self._lost(sender, f"raised {message.kind}", now)

    def _on_resumed(self, sender: str, message: m.Resumed, now: float) -> None:
        """The view has recovered when its slowest survivor can train again."""
        if message.view != self.view or sender not in self.members:
            return
        self.resumed[sender] = message.latency_s
        if set(self.resumed) >= set(self.members) - self.without_state:
            self._emit(
                "recovered",
                view=self.view.number,
                members=self._ranks(self.members),
                latency_s=max(self.resumed.values()),
            )

    def _on_joined(self, sender: str, message: m.Joined, now: float) -> None:
        if message.view == self.view and sender in self.without_state:
            self.without_state.discard(sender)
            self.known[sender].fresh = False
            if not self.without_state:
                self.joined_at = None
            self._emit(
                "member_joined",
                rank=self.known[sender].info.rank,
                view=self.view.number,
                transfer_s=message.transfer_s,
            )
            self._try_admit(now)

    def _on_stagereached(self, sender: str, message: m.StageReached, now: float) -> None:
        if message.stage > self.stage:
            self.stage = message.stage
            for member_id, member in self.known.items():
                if member.joining:
                    self._send(member_id, m.StageInfo(self.stage))
            if self.attempt is not None and self.proposal is None:  # its newcomers wait at the entrance of an older one
                self._cancel_attempt()
                self._try_admit(now)

    def _on_membersquery(self, sender: str, message: m.MembersQuery, now: float) -> None:
        infos = tuple(self.infos[x] for x in self.members if x in self.known and not self.known[x].fresh)
        self._send(sender, m.MembersInfo(infos, self.stage))

    def _on_report(self, sender: str, message: m.Report, now: float) -> None:
        self._emit(message.event, **message.fields)

    # ------------------------------------------------------------------------------------------ agents
    def _on_agenthello(self, sender: str, message: m.AgentHello, now: float) -> None:
        self.trained = self.trained or message.trained
        if message.finished:
            self._finish()
        for member_id in message.reaped:
            self._reaped(member_id, "ended while no coordinator ran", now)
        self._try_recover(now)

    def _on_reaped(self, sender: str, message: m.Reaped, now: float) -> None:
        if self.forming and not any(v.info.rank == message.rank for v in self.known.values()):
            self.dead_ranks.add(message.rank)
        self._reaped(message.member_id, message.cause, now, finished=message.cause == "exit code 0")
        if self.forming:
            self.dead_ranks.add(message.rank)
            self._try_form(now)

    def _reaped(self, member_id: str, cause: str, now: float, finished: bool = False) -> None:
        if member_id in self.known:  # a finished one's farewell may still be under way, on its own connection
            self._lost(member_id, cause, now, planned=finished, finished=finished)
        elif self.recovering and member_id not in self.gone:
            self.gone[member_id] = cause
            if finished:
                self._finish()
        if self.recovering:
            self._try_recover(now)

    def _on_stoprequest(self, sender: str, message: m.StopRequest, now: float) -> None:
        """Members end together, at a safe point at which all of them stop (as if somebody joined there)."""
        self.ending = message.reason
        for member_id, member in self.known.items():
            if member.fresh:
                self._send(member_id, m.Stop(message.reason, False))
        self._try_admit(now)

    # ------------------------------------------------------------------------------------------ loss
    def _lost(self, member_id: str, cause: str, now: float, planned: bool = False, finished: bool = False) -> None:
        """A process is dead, excluded, or has left: it is never heard again under this identity."""
        member = self.known.pop(member_id)
        self.gone[member_id] = cause
        self.without_state.discard(member_id)
        if not planned:
            self._send(member_id, m.ExcludedNotice(self.incarnation, cause))
        if finished:
            if member_id in self.members:  # the others are in, or past, the closing barrier: no new view for them
                self.members = tuple(x for x in self.members if x != member_id)
            self._finish()
        else:
            self._emit(
                "member_failed",
                rank=member.info.rank,
                member_id=member_id,
                cause=cause,
                planned=planned,
                view=max(self.view.number, 0),
            )
        if self.attempt is not None and (member_id in self.members or member_id in self.attempt.joiners):
            self._cancel_attempt()
        in_proposal = self.proposal is not None and member_id in self.proposal[1]
        if (member_id in self.members and not finished) or in_proposal:
            if not finished:
                self.causes.append(f"rank {member.info.rank}: {cause}")
            if self.forming:
                self.proposal = None
            elif not self.recovering:
                self._propose(now)
        if self.forming:
            self.dead_ranks.add(member.info.rank)
            self._try_form(now)
        if self.recovering:
            self._try_recover(now)
        if not self.forming and not self.recovering:
            self._try_admit(now)

    def _finish(self) -> None:
        """All safe points are past: those that wait to be admitted wait in vain."""
        self.finished = True
        for member_id, member in self.known.items():
            if member.fresh and member_id not in self.members:
                self._send(member_id, m.Stop(self.stopping or "the job has finished", bool(self.stopping)))
        if not self.members and not self.stopping and not self.reported:
            self.reported = True
            self._emit("job_finished", steps=self.steps)

    def _exclude(self, member_id: str, reason: str, now: float) -> None:
        self._send(None, m.Fence(member_id, reason))
        self._lost(member_id, reason, now)

    def _stop(self, reason: str, now: float) -> None:
        """The job is to end with an error; the members are told in the next view, in a consistent state."""
        if not self.stopping:
            self.stopping = reason
            self._emit("job_stopped", reason=reason)
            self._send(None, m.Stop(reason, True))
            for member_id, member in self.known.items():
                if member.fresh and member_id not in self.members:
                    self._send(member_id, m.Stop(reason, True))

    # ------------------------------------------------------------------------------------------ views
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
        self._check_limits(len(stay), now)
        if self.attempt is not None:
            self._cancel_attempt()
        if not stay:
            self.proposal, self.members = None, ()
            if not self.finished:
                self._stop("no member is left", now)
            else:
                self._finish()
            return
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

    # ------------------------------------------------------------------------------------------ admission
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
        self.attempt = _Attempt(self.attempts, joiners)
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
            self.lead = min(self.lead * 2, 1024)
            self._cancel_attempt()
            self._try_admit(now)

    def _on_atboundary(self, sender: str, message: m.AtBoundary, now: float) -> None:
        attempt = self._attempt_of(sender, message.attempt)
        if attempt is not None:
            attempt.waiting.add(sender)
            self._at_boundary(attempt)

    def _at_boundary(self, attempt: _Attempt) -> None:
        everybody = set(self.members)
        if attempt.armed >= everybody and attempt.waiting >= everybody:
            self._new_proposal((*self.members, *attempt.joiners))

    def _attempt_of(self, sender: str, number: int) -> _Attempt | None:
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

    # ------------------------------------------------------------------------------------------ recovery (R10)
    def _try_recover(self, now: float) -> None:
        """All of the highest announced view must have announced themselves or have been reaped by their agents:
        a lease that ran out proves nothing to a coordinator that was not there."""
        if not self.recovering:
            return
        voters = [hello for hello in self.announced.values() if not hello.fresh]
        if not voters:
            there = {hello.info.rank for hello in self.announced.values()}
            if len(there) == self.settings.world_size and self.trained:
                self._stop("no member with the model's state is left", now)
            elif len(there) == self.settings.world_size:  # it died before the first view
                self.recovering, self.forming = False, True
                self._try_form(now)
            return
        best = max(voters, key=lambda hello: hello.view)
        present = {x.member_id for x in best.members if x.member_id in self.known}
        if any(x.member_id not in present and x.member_id not in self.gone for x in best.members):
            return
        self.recovering = False
        self.view, self.counter = best.view, best.view.number
        self.members = tuple(x.member_id for x in best.members)
        self.infos = {x.member_id: x for x in best.members}
        self.stage = max(hello.stage for hello in voters)
        self.stopping = self.stopping or next((hello.stopping for hello in voters if hello.stopping), "")
        for hello in voters:
            if hello.info.member_id not in self.members and hello.info.member_id in self.known:
                self._exclude(hello.info.member_id, "not a member of the newest view", now)
        for member_id, hello in self.announced.items():
            if hello.fresh and member_id in self.known:
                told = m.Stop(self.stopping, True) if self.stopping else m.StageInfo(self.stage)
                self._send(member_id, told)
        self.announced = {}
        self.causes.append("coordinator restarted")
        self._propose(now)

    # ------------------------------------------------------------------------------------------ helpers
    def _ranks(self, ids: Iterable[str]) -> list[int]:
        return sorted(self.infos[x].rank if x in self.infos else self.known[x].info.rank for x in ids)

    def _send(self, to: str | None, message: m.Message) -> None:
        self._out.append(Send(to, message))

    def _emit(self, event: str, **fields: Any) -> None:
        self._out.append(Emit(event, fields))

    def _flush_effects(self) -> list[Effect]:
        out, self._out = self._out, []
        return out
