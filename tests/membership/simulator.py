"""Deterministic, seeded simulation of a whole job around the real Coordinator and MemberState.

    outcome = Simulation(seed).run()        # "finished", "stopped" or "lost"; raises Violation

Real: both state machines, and all that they say to each other.  Modelled: processes with a small program, their
agents, the connections, the collectives, time, and an adversary who chooses what happens next and when somebody dies,
falls silent or joins.  The same seed gives the same run.  ``Simulation.actions`` and ``fault`` let a test make the
choices itself.

A program: steps of B buckets whose completion each member sees at its own time or never, control collectives, safe
points between steps, and a closing barrier.  Weights are the tuple of the results applied; the result of a bucket is
the set of its contributions (rank, microbatch, hash of the weights it was computed with): whatever is lost, mixed or
used twice shows.

It is not a model of bytes on sockets (``test_server.py``) nor of a process group.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

from simulated import CAUSES, EOF, Agent, Group, Link, Process, Violation

from lightning_cann.membership import messages as m
from lightning_cann.membership.coordinator import Coordinator, CoordinatorSettings, Emit, Send
from lightning_cann.membership.member import MemberState
from lightning_cann.membership.messages import ViewId

__all__ = ["FAULTS", "Process", "Simulation", "Violation"]

FAULTS = (
    "die", "die_ahead", "die_transfer", "suspect", "break", "disconnect", "restart", "restart_install", "raise", "time"
)  # fmt: skip


class Simulation:
    """One job, one seed.  The classes can be replaced (``test_rules.py`` leaves rules out that way)."""

    def __init__(
        self,
        seed: int,
        *,
        process_class: type[Process] = Process,
        member_class: type[MemberState] = MemberState,
        coordinator_class: type[Coordinator] = Coordinator,
        faults: str = "",
        closing_barrier: bool = True,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.process_class, self.member_class, self.coordinator_class = process_class, member_class, coordinator_class
        self.trace = trace
        rng = self.rng
        self.world = rng.randint(2, 4)
        self.settings = CoordinatorSettings(
            world_size=self.world,
            min_members=rng.choice([1, 1, 1, 1, 1, 2]),
            max_failures=rng.choice([None, None, None, None, None, 0, 1, 2]),
            on_rank_exception=rng.choice(["fail", "replace", "replace"]),
            join_timeout_s=4.0,
            start_timeout_s=15.0,
        )
        self.program: list[tuple[str, int, int]] = []
        self.after_safe = {0: 0}
        number = 0
        for step in range(rng.choice([2, 3, 5, 8, 12])):
            if step:
                self.program.append(("safe", step, 0))
                self.after_safe[step] = len(self.program)
            for kind in ["step"] + ["control"] * rng.choice([0, 0, 1, 2]):
                self.program.append((kind, number, rng.randint(1, 3) if kind == "step" else 1))
                number += 1
        self.closing = number  # number of transactions before the closing barrier
        if closing_barrier:
            self.program.append(("close", number, 1))
        self.buckets = {n: b for kind, n, b in self.program if kind != "safe"}
        self.data = {rank: rng.choice([99, 99, 2]) for rank in range(self.world)}  # microbatches of each shard
        self.budget = {
            "die": rng.randint(0, 3), "die_ahead": rng.randint(0, 2), "die_transfer": rng.randint(0, 2),
            "suspect": rng.choice([0, 0, 1, 2]), "join": rng.choice([0, 3, 6]),
            "break": rng.choice([0, 0, 1, 2]), "disconnect": rng.choice([0, 0, 1]),
            "restart": rng.choice([0, 0, 1, 2]),
            "restart_install": rng.choice([0, 0, 1]), "raise": rng.choice([0, 0, 0, 1]), "time": rng.randint(0, 3),
        }  # fmt: skip
        self.fault_rate = rng.choice([0.02, 0.05, 0.1])
        self.faults = (*FAULTS, *(x for x in faults.split() * 3 if x in FAULTS))
        self.slow = rng.choice(["", "", "upward", "downward", "peer", "see"])  # what takes long in this run
        for name in faults.split():  # a test looks for one kind of trouble: more of it
            if name.startswith("slow:"):
                self.slow = name[5:]
            else:
                self.budget[name] += 3
        self.events = 0
        self.now = 0.0
        self.incarnation = 0
        self.coordinator: Coordinator | None = coordinator_class(self.settings, 0, self.now)
        self.table: dict[str, Link] = {}  # the coordinator's connections
        self.links: list[Link] = []
        self.processes: dict[str, Process] = {}
        self.agents = {rank: Agent(rank) for rank in range(self.world)}
        self.peers: list[tuple[str, str, ViewId, Any]] = []  # between members: any order
        self.groups: dict[ViewId, Group] = {}
        self.installed: dict[ViewId, tuple[tuple[str, ...], int]] = {}
        self.outputs: list[tuple[str, int, tuple]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.excluded: set[str] = set()
        self.begun = self.scratch = False
        self.patience = 4  # times that the clock moves on when nothing else can happen
        for rank in range(self.world):
            self.spawn(rank)

    def __repr__(self) -> str:
        return "simulation"

    # ------------------------------------------------------------------------------------------ invariants
    def good(self, process: Process) -> bool:
        """A survivor: its state counts."""
        return process.ended not in ("died", "excluded") and process.id not in self.excluded

    def check_result(self, process: Process, kind: str, number: int, result: dict[int, frozenset]) -> None:
        assert process.hist is not None
        if len(process.hist) != number:
            raise Violation(f"{process} applies transaction {number} to weights of {len(process.hist)}")
        if kind == "control":
            return
        if len({frozenset(value[:2] for value in bucket) for bucket in result.values()}) != 1:
            raise Violation(f"step {number} at {process} mixes contributors: {result}")
        cursor = collections.Counter(c[0] for k, buckets in process.hist if k == "step" for c in buckets[0])
        for rank, index, weights in result[0]:
            if weights != hash(process.hist):
                raise Violation(f"{process} step {number}: the gradient of rank {rank} belongs to other weights")
            if index != cursor[rank]:
                raise Violation(f"{process} step {number}: microbatch {index} of rank {rank} is not its next one")

    def check_fork(self, process: Process) -> None:
        assert process.hist is not None
        for other in self.processes.values():
            if other.hist is not None and self.good(other) and self.good(process):
                n = min(len(other.hist), len(process.hist))
                if other.hist[:n] != process.hist[:n]:
                    raise Violation(f"weights of {process} and {other} fork at or before transaction {n - 1}")

    def group(self, install: m.Install) -> Group:
        return self.groups.setdefault(install.view, Group(install.view, tuple(x.member_id for x in install.members)))

    def check_end(self) -> str:
        good = [p for p in self.processes.values() if self.good(p)]
        ended = [p for p in good if p.ended and p.hist is not None]
        stuck = [p for p in self.processes.values() if p.alive]
        if stuck:
            raise Violation(
                "deadlock: "
                + "; ".join(f"{p} view {p.state.view} promised {p.state.promised} done {p.state.done}" for p in stuck)
            )
        if not ended:
            return "stopped" if any(p.ended == "stopped" for p in good) and not self.begun else "lost"
        final = max((p.hist or () for p in ended), key=len)
        for p in ended:
            # stopped by a coordinator whose successor knew nothing of it: it has left earlier
            early = p.ended == "stopped" and self.incarnation and p.hist == final[: len(p.hist or ())]
            if p.hist != final and not early:
                raise Violation(f"final weights differ: {[(p, p.ended, len(p.hist or ())) for p in ended]}")
        for member_id, number, hist in self.outputs:
            if final[: len(hist)] != hist:
                raise Violation(f"{member_id} let the output of transaction {number} out, and that was lost")
        used = [c[:2] for kind, buckets in final if kind == "step" for c in buckets[0]]
        for rank in range(self.world):
            mine = [index for r, index in used if r == rank]
            if mine != list(range(len(mine))):
                raise Violation(f"microbatches of rank {rank} skipped, repeated or out of order: {mine}")
        return "finished" if any(p.ended == "finished" for p in ended) else "stopped"

    # ------------------------------------------------------------------------------------------ the coordinator's side
    def spawn(self, rank: int) -> Process:
        process = self.process_class(self, f"m{len(self.processes)}", rank)
        self.processes[process.id] = process
        return process

    def effects(self, effects: list[Send | Emit]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                self.counts[effect.event] += 1
                continue
            message = effect.message
            if isinstance(message, m.Install):
                what = (tuple(x.member_id for x in message.members), message.cut)
                if self.installed.setdefault(message.view, what) != what:
                    raise Violation(f"two views have the number {message.view}: {what}, {self.installed[message.view]}")
            if effect.to is None:
                if isinstance(message, m.Fence):
                    for agent in self.agents.values():
                        if agent.name in self.table:
                            self.table[agent.name].down.append(message)
                continue
            if isinstance(message, m.Install) and message.view.incarnation:
                self.counts["recovered_views"] += 1
            if isinstance(message, m.Propose):
                self.excluded.discard(effect.to)  # a successor may count it in again
            link = self.table.get(effect.to)
            if link is not None and not link.dead:
                link.down.append(message)
        if self.coordinator is not None:
            for member_id in self.coordinator.gone:
                if self.processes[member_id].ended not in ("finished", "stopped"):
                    self.excluded.add(member_id)
            if self.coordinator.forming and self.incarnation and self.begun:
                self.scratch = True  # everybody with state has died: the job begins again, outside this model

    def upward(self, link: Link) -> None:
        """The coordinator reads one message of a connection."""
        message = link.up.popleft()
        assert self.coordinator is not None
        current = self.table.get(link.owner)
        if message is EOF:
            if current is link:
                del self.table[link.owner]
                if link.owner in self.processes:
                    self.effects(self.coordinator.disconnected(link.owner, self.now))
        elif isinstance(message, (m.Hello, m.AgentHello)) or current is link:
            if current is not link and current is not None:  # a new connection replaces the old one
                current.dead = True
                current.up.clear()
            self.table[link.owner] = link
            self.effects(self.coordinator.receive(link.owner, message, self.now))

    def connect(self, who: Process | Agent) -> None:
        old, who.link = who.link, Link(who.id if isinstance(who, Process) else who.name)
        self.links.append(who.link)
        if isinstance(who, Process):
            if old is not None:  # without their connection only messages that name an incarnation mean anything
                old.down = collections.deque(
                    x for x in old.down if isinstance(x, (m.Propose, m.Install, m.ExcludedNotice))
                )
            who.link.up.append(who.state.hello(self.incarnation, 0, who.joining, 1, who.stopping))
        else:
            mine = [p for p in self.processes.values() if p.rank == who.rank]
            alive = tuple(p.id for p in mine if p.alive)
            finished = tuple(p.id for p in mine if p.reaped and p.ended == "finished")
            who.link.up.append(m.AgentHello(str(who.rank), alive, tuple(who.reaped), finished))

    def reap(self, process: Process) -> None:
        process.reaped = True
        agent = self.agents[process.rank]
        agent.reaped.append(process.id)
        if agent.link is not None and not agent.link.dead:
            agent.link.up.append(m.Reaped(process.id, process.rank, CAUSES[process.ended], False))

    def downward(self, link: Link) -> None:
        message = link.down.popleft()
        if message is EOF:
            return
        process = self.processes.get(link.owner)
        if process is not None:
            process.receive(message)
        elif isinstance(message, m.Fence):
            victim = self.processes[message.member_id]
            if victim.alive and link is self.agents[victim.rank].link:
                victim.end("died")

    def crash(self) -> None:
        self.counts["crash"] += 1
        self.coordinator, self.table = None, {}
        for link in self.links:
            if not link.dead:
                link.cut()
            link.up.clear()

    def restart(self) -> None:
        self.incarnation += 1
        self.patience = 4
        self.coordinator = self.coordinator_class(self.settings, self.incarnation, self.now)

    def pass_time(self, ticks: int, silent: str = "") -> None:
        """The clock moves on; heartbeats arrive from all that are connected, but for one."""
        for _ in range(ticks):
            if self.coordinator is None:
                return
            self.now += 0.4 * self.settings.lease_s
            for member_id, link in list(self.table.items()):
                if member_id in self.processes and not link.dead and member_id != silent:
                    self.effects(self.coordinator.receive(member_id, m.Beat(), self.now))
            self.effects(self.coordinator.tick(self.now))

    # ------------------------------------------------------------------------------------------ the adversary
    def actions(self) -> list[tuple[Callable, tuple]]:
        """All that can happen next (faults apart)."""
        acts: list[tuple[Callable, tuple]] = []
        for p in self.processes.values():
            if not p.alive:
                if not p.reaped:
                    acts.append((self.reap, (p,)))
                continue
            if (p.link is None or p.link.dead) and self.coordinator is not None:
                acts.append((self.connect, (p,)))
            if p.pc < len(self.program):
                if p.can_launch():
                    acts.append((p.launch, ()))
                acts += [(p.see, (b,)) for b in p.visible()]
                if p.can_pass():
                    acts.append((p.safe_point, ()))
            if p.unapplied is not None:
                acts.append((p.apply, ()))
            if p.can_stop():
                acts.append((p.stop, ()))
            if p.can_adopt():
                acts.append((p.adopt, ()))
            if p.newcomer and not p.joining:
                acts.append((self.ready, (p,)))
            waits = (p.launched or p.barrier) and p.group is not None and not p.state.frozen
            if waits and p.group.view not in p.complained and any(not self.processes[x].alive for x in p.group.members):
                acts.append((self.complain, (p,)))
        for link in self.links:
            if link.up and self.coordinator is not None:
                acts.append((self.upward, (link,)))
            if link.down and (link.owner not in self.processes or self.processes[link.owner].alive):
                acts.append((self.downward, (link,)))
        self.links = [x for x in self.links if not x.dead or x.up or x.down]
        for agent in self.agents.values():
            if (agent.link is None or agent.link.dead) and self.coordinator is not None:
                acts.append((self.connect, (agent,)))
        for i, (kind, to, view, _) in enumerate(self.peers):
            state = self.processes[to].state
            if kind != "want_state" or state.promised > view or not self.processes[to].alive or state.view == view:
                acts.append((self.peer, (i,)))
        if self.coordinator is None:
            acts.append((self.restart, ()))
        if self.budget["join"] > 0 and any(p.alive for p in self.processes.values()):
            for rank in self.agents:
                if all(p.reaped for p in self.processes.values() if p.rank == rank):
                    acts.append((self.respawn, (rank,)))
        return acts

    def respawn(self, rank: int) -> None:
        self.budget["join"] -= 1
        self.spawn(rank)

    def ready(self, process: Process) -> None:
        process.joining = True
        process.send(m.JoinReady(0))

    def complain(self, process: Process) -> None:
        assert process.group is not None
        process.complained.add(process.group.view)
        process.send(m.Broken(process.group.view, "connection reset by peer"))

    def peer(self, index: int) -> None:
        kind, to, view, body = self.peers.pop(index)
        process = self.processes[to]
        if process.alive and not (kind == "want_state" and process.state.view != view):
            process.from_peer(kind, view, body)
        elif kind in ("fetch", "want_state") and self.processes[body].alive:
            self.processes[body].send(m.Broken(view, f"cannot fetch from {to}"))

    def fault(self, kind: str, pick: Callable[[list], Any]) -> bool:
        """One fault of a kind, if it is possible and there is still budget for it; ``pick`` chooses the victim."""
        if self.budget[kind] <= 0:
            return False
        alive = [p for p in self.processes.values() if p.alive]
        done = True
        if kind in ("die", "raise") and len(alive) > 1:
            victim = pick(alive)
            if kind == "raise":
                victim.send(m.RankError("ValueError", "user code", ""))
            victim.end("died")
        elif kind == "die_ahead" and len(alive) > 1:
            foremost = max(p.state.done for p in alive)
            ahead = [p for p in alive if p.state.done == foremost]
            done = len(ahead) == 1
            if done:
                ahead[0].end("died")
        elif kind == "die_transfer" and len(alive) > 1:  # somebody, while a newcomer takes its state
            done = self.coordinator is not None and bool(self.coordinator.without_state)
            if done:
                pick(alive).end("died")
        elif kind == "suspect" and self.coordinator is not None and len(self.coordinator.known) > 1:
            self.pass_time(3, silent=pick(sorted(self.coordinator.known)))
        elif kind == "break" and (members := [p for p in alive if p.group is not None and not p.state.frozen]):
            victim = pick(members)
            victim.send(m.Broken(victim.group.view, "checksum"))
        elif kind == "disconnect" and (linked := [p for p in alive if p.link is not None and not p.link.dead]):
            link = pick(linked).link
            for queue in (link.up, link.down):  # what was under way is lost, from some message on
                for _ in range(pick(list(range(len(queue) + 1)))):
                    queue.pop()
            link.cut()
        elif kind == "restart" and self.coordinator is not None:
            self.crash()
        elif kind == "restart_install" and self.coordinator is not None:  # while an Install is under way
            done = any(isinstance(x, m.Install) for link in self.table.values() for x in link.down)
            if done:
                self.crash()
        elif kind == "time":
            self.pass_time(pick([1, 5, 12]))
        else:
            done = False
        if done:
            self.budget[kind] -= 1
            self.counts["fault:" + kind] += 1
            if self.trace:
                self.trace(f"-- {kind}")
        return done

    def step(self, pick: Callable[[list], Any]) -> bool:
        """One thing happens; False: nothing can happen any more."""
        acts = self.actions()
        if not acts:
            if self.patience == 0 or self.coordinator is None:
                return False
            self.patience -= 1
            self.pass_time(8)
            return True
        self.events += 1
        if self.slow and self.events % 16:
            acts = [x for x in acts if x[0].__name__ != self.slow] or acts
        act, args = pick(acts)
        if self.trace:
            self.trace(f"{act.__name__} {getattr(act, '__self__', '')} {args} {self._detail(act, args)}")
        act(*args)
        return True

    @staticmethod
    def _detail(act: Callable, args: tuple) -> str:
        queue = {"upward": "up", "downward": "down"}.get(act.__name__)
        return f"{args[0].owner} {getattr(args[0], queue)[0]}" if queue else ""

    def run(self, limit: int = 20_000) -> str:
        """Plays the job to its end.  Raises Violation; an exception of the state machines is one."""
        try:
            for _ in range(limit):
                if self.rng.random() < self.fault_rate:
                    self.fault(self.rng.choice(self.faults), self.rng.choice)
                if self.scratch:
                    return "lost"
                if not self.step(self.rng.choice):
                    return self.check_end()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}") from error
        raise Violation(f"still running after {limit} events")
