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

from lightning_cann.membership import messages as m
from lightning_cann.membership.admission import Admission
from lightning_cann.membership.settings import CoordinatorSettings
from lightning_cann.membership.state import Effect, Emit, MemberRecord, Send
from lightning_cann.membership.views import Views

__all__ = ["CONNECTION_CLOSED", "Coordinator", "CoordinatorSettings", "Emit", "Send"]

CONNECTION_CLOSED = "connection closed"
FINISHED = "exit code 0"  # as agents tell it


class Coordinator(Views, Admission):
    """See the module's page.

    Args:
        settings: of the job.
        incarnation: 0 at first; a successor has one more than its predecessor.
        now: the current time in seconds, on the clock of all other calls.
    """

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
        self.known[sender] = MemberRecord(hello.info, hello.pid, hello.fresh, now, hello.joining, hello.stage)
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
        if self.recovering:
            return  # not known yet: it will ask again
        infos = tuple(self.infos[x] for x in self.members if x in self.known and not self.known[x].fresh)
        self._send(sender, m.MembersInfo(infos, self.stage))

    def _on_report(self, sender: str, message: m.Report, now: float) -> None:
        self._emit(message.event, **message.fields)

    # ------------------------------------------------------------------------------------------ agents
    def _on_agenthello(self, sender: str, message: m.AgentHello, now: float) -> None:
        self.trained = self.trained or message.trained
        if message.stop:
            self._on_stoprequest(sender, m.StopRequest(message.stop), now)
        if message.finished:
            self._finish()
        for member_id in message.reaped:
            self._reaped(member_id, "ended while no coordinator ran", now)
        self._try_recover(now)

    def _on_reaped(self, sender: str, message: m.Reaped, now: float) -> None:
        if self.forming and not any(v.info.rank == message.rank for v in self.known.values()):
            self.dead_ranks.add(message.rank)
        self._reaped(message.member_id, message.cause, now, finished=message.cause == FINISHED)
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

    # ------------------------------------------------------------------------------------------ recovery (R10)
    def _try_recover(self, now: float) -> None:
        """All of the highest announced view must have announced themselves or have been reaped by their agents:
        a lease that ran out proves nothing to a coordinator that was not there."""
        if not self.recovering:
            return
        voters = [hello for hello in self.announced.values() if not hello.fresh]
        if not voters:
            there = {hello.info.rank for hello in self.announced.values()}
            # Without a death, those who were to be in the first view are all there: they had not entered it yet.
            if len(there) == self.settings.world_size and self.trained and self.gone:
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
        for info in best.members:
            cause = self.gone.get(info.member_id, "")
            if info.member_id not in self.known and cause != FINISHED:
                fields = {"rank": info.rank, "member_id": info.member_id, "cause": cause, "planned": False}
                self._emit("member_failed", **fields, view=self.view.number)
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
