"""The simulated parts of a job: connections, collectives, processes and agents.  :mod:`simulator` sets them in motion.

``Process`` is where a rule lives that is the engine's rather than the protocol's: each is a small method, so that
``test_rules.py`` can leave it out.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from lightning_cann.membership import messages as m
from lightning_cann.membership.member import MemberState
from lightning_cann.membership.messages import MemberInfo, ViewId

if TYPE_CHECKING:
    from simulator import Simulation

CAUSES = {"died": "SIGKILL", "excluded": "exit code 75", "stopped": "exit code 1", "finished": "exit code 0"}
STOP = (1 << 30, 0)  # the barrier of a view that only ends the job
EOF = m.Beat()  # marks the end of a connection in its queue (compared by identity)


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""


class Link:
    """One connection to the coordinator: in order in both directions, lost as a whole."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.up: collections.deque[m.Message] = collections.deque()
        self.down: collections.deque[m.Message] = collections.deque()
        self.dead = False  # nothing new enters

    def __repr__(self) -> str:
        return f"link of {self.owner}"

    def cut(self) -> None:
        self.dead = True
        self.up.append(EOF)
        self.down.append(EOF)


class Group:
    """The collectives of one view: one can complete at a member once all members have entered it."""

    def __init__(self, view: ViewId, members: tuple[str, ...]) -> None:
        self.view, self.members = view, members
        self.entered: dict[tuple[int, int], dict[str, Hashable]] = {}
        self.order: dict[str, list[tuple[int, int]]] = {}

    def enter(self, member_id: str, op: tuple[int, int], value: Hashable) -> None:
        mine = self.order.setdefault(member_id, [])
        mine.append(op)
        self.entered.setdefault(op, {})[member_id] = value
        for other, ops in self.order.items():
            if len(ops) >= len(mine) and ops[len(mine) - 1] != op:
                raise Violation(f"{self.view}: {member_id} enters {op} where {other} entered {ops[len(mine) - 1]}")

    def result(self, op: tuple[int, int]) -> frozenset | None:
        got = self.entered.get(op, {})
        if any(member_id not in got for member_id in self.members):
            return None
        return frozenset(value for value in got.values() if value is not None)


class Process:
    """A rank process: MemberState, and the part of an engine that the rules speak of."""

    def __init__(self, sim: Simulation, member_id: str, rank: int) -> None:
        self.sim, self.id, self.rank = sim, member_id, rank
        self.state: MemberState = sim.member_class(MemberInfo(member_id, rank, "host", 0, f"node{rank}"))
        self.ended = ""  # how the process ended: died, excluded, finished, stopped
        self.reaped = False
        self.link: Link | None = None
        self.newcomer = self.joining = False
        self.hist: tuple | None = None  # the weights; None: no state
        self.counted: collections.Counter[int] = collections.Counter()  # data cursors
        self.pc = 0
        self.reached = False  # stands at its safe point
        self.group: Group | None = None
        self.launched = 0  # buckets of the current transaction entered in this view
        self.barrier = False  # entered the barrier of a view that ends the job
        self.seen: dict[int, frozenset] = {}
        self.unapplied: tuple[int, dict[int, frozenset]] | None = None
        self.kept: dict[int, dict[int, frozenset]] = {}
        self.gradient: tuple | None = None
        self.outbox: list[tuple[int, tuple]] = []
        self.complained: set[ViewId] = set()
        self.stopping = ""  # reason, once it has adopted a view that only ends the job
        self.stop_view = False  # the current one is such a view; a restarted coordinator does not know that

    def __repr__(self) -> str:
        return f"{self.id}(rank {self.rank})"

    @property
    def alive(self) -> bool:
        return not self.ended

    def send(self, message: m.Message) -> None:
        if self.link is not None and not self.link.dead:
            self.link.up.append(message)

    def end(self, how: str) -> None:
        self.ended = how
        if self.link is not None and not self.link.dead:
            self.link.cut()

    # ------------------------------------------------------------------------------------------ the program
    def item(self) -> tuple[str, int, int]:
        """Kind, number (of the transaction, or of the safe point), buckets."""
        return self.sim.program[self.pc]

    def cursor(self, rank: int) -> int:
        return self.counted[rank]

    def advance_cursors(self, contributions: frozenset) -> None:
        """R8: from the result alone."""
        for rank, _, _ in contributions:
            self.counted[rank] += 1

    def can_stop(self) -> bool:
        """A barrier in the view that ends the job: the last to enter it may still need a result (R9)."""
        return (
            bool(self.stopping) and not self.state.frozen and (not self.barrier or self.group.result(STOP) is not None)
        )

    def stop(self) -> None:
        assert self.group is not None
        if self.hist is not None and self.stop_view and not self.barrier:
            self.barrier = True
            self.group.enter(self.id, STOP, None)
        else:
            self.send(m.Left(self.stopping, False))
            self.end("stopped")

    def can_launch(self) -> bool:
        kind, number, buckets = self.item()
        return (
            kind != "safe"
            and not self.stopping
            and not self.state.frozen
            and self.hist is not None
            and self.unapplied is None
            and number == self.state.done
            and self.launched < buckets
        )

    def launch(self) -> None:
        kind, number, _ = self.item()
        assert self.group is not None
        value: Hashable = None
        if kind == "control":
            value = (self.rank,)
        elif kind == "step":
            if self.gradient is None:  # it decides once whether it contributes
                mine = self.cursor(self.rank)
                self.gradient = ((self.rank, mine, hash(self.hist)),) if mine < self.sim.data[self.rank] else (None,)
            value = self.gradient[0]
        self.group.enter(self.id, (number, self.launched), value)
        self.launched += 1

    def visible(self) -> list[int]:
        """Buckets whose completion it may see now."""
        if self.group is None or self.launched == 0 or self.item()[0] == "safe":
            return []
        number = self.item()[1]
        return [b for b in range(self.launched) if b not in self.seen and self.group.result((number, b)) is not None]

    def see(self, bucket: int) -> None:
        _, number, buckets = self.item()
        assert self.group is not None
        result = self.group.result((number, bucket))
        assert result is not None
        self.seen[bucket] = result
        if len(self.seen) == buckets and self.state.complete(self.group.view):
            self.completed(number, dict(self.seen))

    def completed(self, number: int, result: dict[int, frozenset]) -> None:
        self.launched, self.seen = 0, {}
        self.keep(number, result)
        for out in [x for x in self.outbox if x[0] < number]:
            self.release(out)
        self.unapplied = (number, result)

    def keep(self, number: int, result: dict[int, frozenset]) -> None:
        """R1: a result is kept until the next transaction completes."""
        self.kept = {number: result}

    def release(self, out: tuple[int, tuple]) -> None:
        self.outbox.remove(out)
        self.sim.outputs.append((self.id, *out))

    def apply(self) -> None:
        assert self.unapplied is not None and self.hist is not None
        number, result = self.unapplied
        kind = self.item()[0]
        self.unapplied, self.gradient = None, None
        self.pc += 1
        if kind != "close":
            self.sim.check_result(self, kind, number, result)
            if kind == "step":
                self.advance_cursors(result[0])
            self.hist += ((kind, tuple(result[b] for b in sorted(result))),)
            self.sim.check_fork(self)
            self.outbox.append((number, self.hist))
        if self.pc == len(self.sim.program):
            self.send(m.Left("finished", True))
            self.end("finished")

    def can_pass(self) -> bool:
        return (
            self.item()[0] == "safe"
            and self.unapplied is None
            and self.hist is not None
            and not (self.reached and self.state.held)
        )

    def safe_point(self) -> None:
        if not self.reached:
            self.reached = True
            waiting = self.state.reach_boundary()
            if waiting is not None:
                self.send(waiting)
                return
        self.reached, self.pc = False, self.pc + 1

    # ------------------------------------------------------------------------------------------ view change
    def can_adopt(self) -> bool:
        return self.state.install is not None and not self.state.lacking and self.unapplied is None

    def drop_partial(self) -> None:
        """R2: the step is the atom; nothing of a step that nobody completed is kept."""
        self.launched, self.seen, self.barrier = 0, {}, False

    def adopt(self) -> None:
        donor = self.state.source()
        first = self.state.fresh
        install = self.state.adopt()
        self.group = self.sim.group(install)
        if self.id in install.newcomers:
            assert donor is not None
            self.pc = self.sim.after_safe[install.boundary]
            self.kept, self.outbox, self.gradient, self.unapplied, self.reached = {}, [], None, None, False
            self.sim.peers.append(("want_state", donor.member_id, install.view, self.id))
        elif first:
            self.hist = ()
            self.sim.begun = True
        self.drop_partial()
        if self.hist is not None and len(self.hist) != min(install.cut, self.sim.closing):
            raise Violation(f"{self} enters {install.view} with {len(self.hist)} results, not {install.cut}")
        self.stopping, self.stop_view = self.stopping or install.stop, bool(install.stop)

    def receive(self, message: m.Message) -> None:
        state = self.state
        if isinstance(message, m.Welcome):
            state.incarnation = max(state.incarnation, message.incarnation)
            self.newcomer = self.newcomer or message.newcomer
        elif isinstance(message, m.Propose):
            reply = state.on_propose(message)
            if reply is not None:
                self.send(reply)
        elif isinstance(message, m.Install):
            source = None
            if state.on_install(message) and state.lacking:
                source = state.source()
                assert source is not None
                self.sim.peers.append(("fetch", source.member_id, message.view, self.id))
        elif isinstance(message, m.Dismissed):
            self.newcomer = self.joining = True
            self.sim.counts["dismissed"] += 1
        elif isinstance(message, m.ExcludedNotice):
            if message.incarnation >= state.incarnation:
                self.end("excluded")
        elif isinstance(message, m.BoundaryQuery):
            self.send(state.on_boundary_query(message))
        elif isinstance(message, m.JoinAt):
            self.send(state.on_join_at(message))
        elif isinstance(message, m.JoinCancel):
            state.on_join_cancel(message)
        elif isinstance(message, m.Stop) and (message.error or self.hist is None):
            self.send(m.Left(message.reason, False))
            self.end("stopped")

    def from_peer(self, kind: str, view: ViewId, body: Any) -> None:
        if kind == "fetch":
            number = self.state.done - 1
            wanting = self.sim.processes[body]
            wanted = wanting.state.done
            if wanted in self.kept and len(self.kept[wanted]) == self.sim.buckets[wanted]:
                self.sim.peers.append(("result", body, view, (wanted, self.kept[wanted])))
            elif self.state.promised == view and self.sim.good(self) and wanting.state.promised == view:
                raise Violation(f"{self} (done {number + 1}) was asked for result {wanted} and has not kept it")
        elif kind == "result":
            install = self.state.install  # what arrives for a view that was superseded is void
            if install is not None and install.view == view and self.state.lacking:
                self.state.served()
                self.sim.counts["served"] += 1
                self.completed(*body)
        elif kind == "want_state":
            self.sim.peers.append(("state", body, view, (self.hist, self.counted.copy())))
        elif kind == "state" and self.state.took_state(view):
            self.hist, self.counted = body[0], body[1].copy()
            self.send(m.Joined(view, 0.0))
            self.sim.counts["joined"] += 1


class Agent:
    """Watches the processes of one rank, replaces them, and ends those that the coordinator fences."""

    def __init__(self, rank: int) -> None:
        self.rank, self.name = rank, f"agent:{rank}"
        self.link: Link | None = None
        self.reaped: list[str] = []

    def __repr__(self) -> str:
        return self.name
