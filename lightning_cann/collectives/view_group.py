"""The engine: collectives that survive the death of members (virtual synchrony over process groups).

    group = ViewGroup(settings, rank=0, member_id="0-abc", coordinator=("127.0.0.1", 1234), token=secret)
    newcomer = group.start()                    # False: the first view is there
    group.transact(kind, body, result, load)    # one collective operation, redone until it completes
    group.close()

On it stand the control collectives (:mod:`.control`), the admission of newcomers (:mod:`.admission`) and the gradient
transport (:mod:`lightning_cann.ddp.transport`), which use the attributes without underscore.

A program is a sequence of *transactions*, the same at every member.  Each runs in the current view; when the view breaks
it runs again in the next one from the inputs it kept, or is served by a member that had completed it (rules R1-R4 of
docs/architecture.md).  The result of the last completed transaction is retained until the next one completes.

Threads and who owns what: the *training thread* calls everything public; the *link thread* feeds the protocol; one short
*build thread* per view fetches what a laggard lacks and connects the group.  ``cond`` guards the member's protocol state,
``next_view``, ``_served``, ``_retained`` and the flags; ``_view`` changes only in the training thread.

It knows no gradients and no Lightning.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_cann.collectives.backend import get_backend
from lightning_cann.collectives.peer import PeerServer, fetch
from lightning_cann.collectives.store import ViewStore
from lightning_cann.collectives.view import View
from lightning_cann.errors import Excluded, FaultToleranceError
from lightning_cann.membership import messages as m
from lightning_cann.membership.link import Link
from lightning_cann.membership.member import MemberState

__all__ = ["Broken", "GroupSettings", "ViewGroup"]

log = logging.getLogger(__name__)

REAPER_JOIN_S = 5.0  # how long close() waits for a group to end (seconds)
MAX_FRUITLESS_VIEWS = 10  # views in a row in which nothing completes, before the error is the user's to see


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Time-outs and the backend of a :class:`ViewGroup`."""

    backend: str | None = None
    """"gloo", "nccl", "hccl"; None: by the device."""
    connect_timeout_s: float = 15.0
    """How long the connections of a new view may take (seconds) before it counts as broken."""
    collective_timeout_s: float = 600.0
    """A collective that takes longer (seconds) breaks the view; with the same members it is redone."""
    fetch_timeout_s: float = 60.0
    """How long a peer may be silent while it serves a result or a state (seconds)."""
    lease_s: float = 2.0
    """The coordinator's lease (seconds); heartbeats are sent four times as often."""


class Broken(Exception):
    """The view is broken: the transaction starts again in the next one."""


class _Done:
    """The work of a view of one member: there is nothing to wait for."""


class ViewGroup:
    def __init__(
        self,
        settings: GroupSettings,
        *,
        rank: int,
        world_size: int,
        member_id: str,
        coordinator: tuple[str, int],
        token: str,
        node: str = "",
        host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        self.settings = settings
        self.rank, self.world_size = rank, world_size
        self.device = device or torch.device("cpu")
        self.backend = get_backend(settings.backend, self.device)
        self.token, self._host = token, host
        self._timeout = timedelta(seconds=settings.collective_timeout_s)
        self._peers = PeerServer(host, token, self._provide)
        self.state = MemberState(m.MemberInfo(member_id, rank, host, self._peers.port, node))
        self.cond = threading.Condition()
        self._wake = threading.Event()  # wakes the training thread out of a collective
        self._view: View | None = None
        self.next_view: View | None = None  # built, to be adopted
        self._building: View | None = None
        self._served: dict[str, Any] | None = None
        self._retained: dict[str, Any] | None = None
        self._broken_since: float | None = None
        self._reapers: list[threading.Thread] = []
        self._fruitless = 0
        self.fatal: BaseException | None = None
        self._welcomed = False
        self.peer_members: tuple[m.MemberInfo, ...] | None = None
        self.handover: dict[m.ViewId, Any] = {}  # state for newcomers, by the view that admits them
        self.journal: dict[str, list[Any]] = {}  # values broadcast during set-up, for replacements
        self.journal_sealed = False
        self.newcomer = False  # joined a running job
        self.solo = False  # a newcomer that has not reached its first safe point: collectives answer locally
        self.joining = False  # a newcomer that waits to be admitted
        self.stopping = ""  # why, once a view that ends the job was adopted
        self.job_stage = 0
        self.stage = 0
        self.finished = ""  # the job ended without this newcomer
        self.redone = 0  # transactions that a broken view made this member run again
        self.views_adopted = 0
        self.previous_ranks: tuple[int, ...] = ()  # members of the view before
        self.last_latency_s = 0.0  # from the break of the view before to the connection of the current one
        self.collectives = 0  # launched, all kinds
        self.messages_sent = 0  # to the coordinator, heartbeats not counted
        self.on_view: list[Callable[[View], None]] = []  # called in the training thread after an adoption
        self.probe: Callable[[str], None] | None = None  # fault injection: called at named points
        self._link = Link(
            coordinator, token, hello=self._hello, handle=self._handle, beat_s=settings.lease_s / 4, name="link"
        )

    # ------------------------------------------------------------------------------------------ life
    def start(self) -> bool:
        """Connects and waits for the first view; True: the job runs already, this process is a newcomer."""
        self._link.start()
        with self.cond:
            self.cond.wait_for(lambda: self._welcomed or self.finished or self.fatal is not None)
            self.check()
            self.newcomer = self.solo = self.newcomer and self.state.fresh
            if not self.newcomer:
                self.cond.wait_for(lambda: self.next_view is not None or self.finished or self.fatal is not None)
        if self.finished:
            raise SystemExit(0)  # it ended before this process could take part
        if not self.newcomer:
            self.enter()
        return self.newcomer

    def close(self, reason: str = "finished", finished: bool = True, steps: int = 0) -> None:
        """Leaves the job.  Idempotent."""
        if not self._link._closing.is_set():
            self.send(m.Left(reason, finished, steps))
            self._link.close()
            self._peers.close()
            with self.cond:
                self._break("the process leaves")
                reapers = list(self._reapers)
            for reaper in reapers:  # a group that dies with the interpreter aborts the process
                reaper.join(timeout=REAPER_JOIN_S)

    @property
    def view(self) -> View:
        """The adopted view."""
        if self._view is None:
            raise FaultToleranceError("there is no view yet: start() has not been called, or this is a newcomer")
        return self._view

    @property
    def current(self) -> View | None:
        """The adopted view, which may be broken already; None before the first."""
        return self._view

    @property
    def leader(self) -> int:
        """Lowest live logical rank: the one that logs, shows the progress bar and writes checkpoints."""
        return -1 if self._view is None or self.solo else self._view.leader

    @property
    def ranks(self) -> tuple[int, ...]:
        """Logical ranks of the members, ascending."""
        return tuple(range(self.world_size)) if self._view is None or self.solo else self._view.ranks

    # ------------------------------------------------------------------------------------------ link thread
    def send(self, message: m.Message) -> None:
        self.messages_sent += 1
        self._link.send(message)

    def _hello(self) -> m.Message:
        with self.cond:
            if self.next_view is not None or self._building is not None:
                self._break("reconnected")  # announcing oneself voids installs that are not adopted (R10)
            return self.state.hello(self.state.incarnation, self.stage, self.joining, os.getpid(), self.stopping)

    def _handle(self, message: m.Message) -> None:
        reply: m.Message | None = None
        with self.cond:
            state = self.state
            if isinstance(message, m.Welcome):
                state.incarnation = max(state.incarnation, message.incarnation)
                if not self._welcomed:
                    self._welcomed, self.newcomer = True, message.newcomer
                self.job_stage = max(self.job_stage, message.stage)
            elif isinstance(message, m.Propose):
                reply = state.on_propose(message)
                if reply is not None:
                    self._break("a new view is proposed")
            elif isinstance(message, m.Install):
                if state.on_install(message):
                    self._start_build(message)
            elif isinstance(message, m.StoreValue):
                if self._building is not None and self._building.id == message.view:
                    self._building.store.deliver(message.key, message.value)
            elif isinstance(message, m.BoundaryQuery):
                reply = state.on_boundary_query(message)
            elif isinstance(message, m.JoinAt):
                reply = state.on_join_at(message)
            elif isinstance(message, m.JoinCancel):
                state.on_join_cancel(message)
            elif isinstance(message, m.StageInfo):
                self.job_stage = max(self.job_stage, message.stage)
            elif isinstance(message, m.MembersInfo):
                self.peer_members = message.members
            elif isinstance(message, m.ExcludedNotice):
                if message.incarnation >= state.incarnation:
                    self.fatal = Excluded(message.reason)
                    self._break(message.reason)
            elif isinstance(message, m.Stop):
                if message.error:
                    self.fatal = FaultToleranceError(message.reason)
                    self._break(message.reason)
                elif state.fresh:
                    self.finished = message.reason
            self.cond.notify_all()
        if reply is not None:
            if self.probe is not None:
                self.probe(type(message).__name__.lower())
            self.send(reply)

    def _break(self, reason: str) -> None:
        """The current view, and any that is being built, is no more (holding the lock)."""
        if self._broken_since is None:
            self._broken_since = time.monotonic()
        for view in (self._view, self.next_view, self._building):
            if view is not None and not view.broken:
                view.dispose(reason)
                self._reapers = [x for x in (*self._reapers, view.reaper) if x is not None and x.is_alive()]
        self.next_view = self._building = None
        self._wake.set()

    # ------------------------------------------------------------------------------------------ build thread
    def _start_build(self, install: m.Install) -> None:
        def publish(key: str, value: bytes) -> None:
            self.send(m.StoreSet(install.view, key, value))

        store = ViewStore(publish, self.settings.connect_timeout_s)
        view = View(install, self.state.member_id, self.backend, store)
        self._building = view
        threading.Thread(
            target=self._build, args=(install, view), name=f"cann-view-{view.id.number}", daemon=True
        ).start()

    def _build(self, install: m.Install, view: View) -> None:
        try:
            if self.probe is not None:
                self.probe("install")
            if self.state.lacking:
                self._fetch_result(install)
            view.connect(self._host, timedelta(seconds=self.settings.connect_timeout_s))
        except (ConnectionError, RuntimeError) as error:
            with self.cond:
                superseded = self.state.install is not install
            if not superseded:
                self.send(m.Broken(view.id, f"rank {self.rank} cannot build the view: {_short(error)}"))
            return
        with self.cond:
            if self.state.install is not install:
                view.dispose("superseded")
                return
            self._building, self.next_view = None, view
            since, self._broken_since = self._broken_since, None
            self.last_latency_s = 0.0 if since is None else time.monotonic() - since
            self.cond.notify_all()
            self._wake.set()
        if since is not None and not self.state.fresh:
            self.send(m.Resumed(view.id, time.monotonic() - since))

    def _fetch_result(self, install: m.Install) -> None:
        source = self.state.source()
        assert source is not None
        result = fetch((source.host, source.port), self.token, "result", install.cut - 1, self.settings.fetch_timeout_s)
        with self.cond:
            if self.state.install is install:
                self.state.served()
                self._served = self._retained = result

    def _provide(self, kind: str, argument: Any) -> Any:
        """What other members may ask for (on a thread of the peer server)."""
        with self.cond:
            if kind == "result":
                if self._retained is None or self.state.done - 1 != argument:
                    raise LookupError(f"transaction {argument} is not retained, {self.state.done} are done")
                return self._retained
            if kind == "state":
                view = m.ViewId(*argument)
                self.cond.wait_for(
                    lambda: view in self.handover or self.state.promised > view, self.settings.fetch_timeout_s
                )
                return self.handover[view]
            if kind == "journal":
                ready = self.cond.wait_for(
                    lambda: self.journal_sealed or self.fatal is not None, self.settings.fetch_timeout_s
                )
                if not ready or self.stage != argument:
                    raise LookupError(f"no journal of stage {argument}")
                return self.journal
        raise LookupError(f"unknown request {kind!r}")

    # ------------------------------------------------------------------------------------------ transactions
    def check(self) -> None:
        if self.fatal is not None and self._served is None:
            raise self.fatal

    def enter(self) -> View:
        """The view to run in; adopts the next one if the current is broken.  Blocks during a view change."""
        adopted = None
        with self.cond:
            while True:
                self.check()
                if self.next_view is not None:
                    adopted = self.adopt()
                if self._view is not None and not self._view.broken:
                    break
                self.cond.wait()
        view = self._view
        if adopted is not None:
            if self.probe is not None:
                self.probe("adopt")
            for callback in self.on_view:
                callback(adopted)
        return view

    def adopt(self) -> View:
        assert self.next_view is not None
        install = self.state.adopt()
        self.previous_ranks = () if self._view is None else self._view.ranks
        self._view, self.next_view = self.next_view, None
        self.views_adopted += 1
        self._fruitless += 1
        self.stopping = install.stop
        if install.stop and self.fatal is None:
            self.fatal = FaultToleranceError(install.stop)
            self.check()
        if self._fruitless > MAX_FRUITLESS_VIEWS:
            self.fatal = FaultToleranceError(
                f"{self._fruitless} views in a row broke before a collective completed: {install.cause}"
            )
            self.check()
        return self._view

    def wait(self, view: View, work: Any) -> None:
        """Waits for a work of ``view``; raises :class:`Broken` when the view, or the work, is."""
        if isinstance(work, _Done):
            return
        try:
            if self.backend.wait(work, self._wake, lambda: view.broken):
                return
        except RuntimeError as error:
            log.debug("collective failed in view %d: %s", view.id.number, error)
            raise Broken(_short(error)) from None
        raise Broken("")

    def report_broken(self, view: View, reason: str) -> None:
        with self.cond:
            if view.broken:
                return
            self._break(reason)
        self.send(m.Broken(view.id, f"rank {self.rank}: {reason}", tuple(sorted(self.state.features))))

    def transact(
        self,
        kind: str,
        body: Callable[[View], None],
        result: Callable[[], Any],
        load: Callable[[Any], None],
    ) -> tuple[int, ...]:
        """Runs one transaction to completion.

        Args:
            kind: what it is, the same at every member (a mismatch is reported).
            body: launches collectives on the view's group and waits for them; called again in each new view.
            result: what a laggard must get; kept until the next transaction completes, so it must not change till then.
            load: takes such a result instead.

        Returns:
            the logical ranks of the view in which it completed (at whichever member).

        Raises:
            FaultToleranceError: the job must stop.  Excluded: this process is no longer a member.
        """
        while True:
            view = self.enter()
            if self._served is not None:
                served, self._served = self._served, None
                if served["kind"] != kind:
                    raise FaultToleranceError(
                        f"rank {self.rank} is in {kind!r} where another member completed {served['kind']!r}: "
                        "the ranks do not run the same sequence of collectives"
                    )
                load(served["data"])
                return tuple(served["ranks"])
            try:
                body(view)
            except Broken as error:
                self.report_broken(view, str(error))
                self.redone += 1
                continue
            retained = {"kind": kind, "ranks": view.ranks, "data": result()}
            with self.cond:
                if self.state.complete(view.id):
                    self._retained = retained
                    self._fruitless = 0
                    return view.ranks

    def launch(self, view: View, tensor: Tensor, op: Any) -> Any:
        """Starts the reduction of ``tensor`` in place over ``view``.  Raises :class:`Broken` when it is no more."""
        if self.probe is not None:
            self.probe("launch")
        if view.size == 1:
            return _Done()
        self.collectives += 1
        group = view.group
        if group is None:
            raise Broken("")
        return self.backend.all_reduce(group, tensor, op, self._timeout)

    def launch_gather(self, view: View, output: list[Tensor], tensor: Tensor) -> Any:
        """Starts the gathering of every member's ``tensor`` (equal shapes) into ``output``, in logical order."""
        if self.probe is not None:
            self.probe("launch")
        if view.size == 1:
            output[0].copy_(tensor)
            return _Done()
        self.collectives += 1
        group = view.group
        if group is None:
            raise Broken("")
        return self.backend.all_gather(group, output, tensor, self._timeout)

    def launch_broadcast(self, view: View, tensor: Tensor) -> Any:
        """Starts the copy of the leader's ``tensor`` to all members of ``view``.  Not a full collective: see
        :meth:`~.control.Control.follow_leader`."""
        if self.probe is not None:
            self.probe("launch")
        self.collectives += 1
        group = view.group
        if group is None:
            raise Broken("")
        return self.backend.broadcast(group, tensor, 0, self._timeout)


def _short(error: BaseException) -> str:
    """The first words of an error of a communication library: what remains is its source lines and advice."""
    text = str(error).partition("\n")[0]
    return text.rpartition("] ")[2][:100] if text.startswith("[") else text[:100]
