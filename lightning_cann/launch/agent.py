"""The agent: starts the rank processes of a node, watches them, replaces what dies, and shows what happens.

    agent = Agent(settings, starter)
    code = agent.run()              # 0: the job finished; blocks until all processes have ended

The first node's agent also runs the coordinator, as a process of its own that it restarts when it dies; the listening
socket stays with the agent, so that the port never changes.  A child's end is known at once (pidfd) and reported with its
exit code or signal.  SIGTERM or Ctrl-C ends the job cleanly at a safe point; a second one ends it at once.

One thread runs everything here; the link's thread only feeds its queue.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lightning_cann import environment as env
from lightning_cann.errors import EXCLUDED_EXIT_CODE
from lightning_cann.launch.processes import Starter
from lightning_cann.membership import messages as m
from lightning_cann.membership.coordinator import CoordinatorSettings
from lightning_cann.membership.link import Link
from lightning_cann.metrics.events import Narrator

__all__ = ["Agent", "AgentSettings"]

log = logging.getLogger(__name__)

MIN_SILENCE_S = 5.0  # a coordinator that is silent for so long, and three leases, is ended
START_ALLOWANCE_S = 10.0  # what a coordinator may need to start
MAX_ABORTS = 5  # SIGABRT of so many ranks is no accident of machines
ASKED_TO_GO = 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What an agent must know.  All times in seconds."""

    coordinator: CoordinatorSettings
    nproc: int
    """Rank processes on this node."""
    first_rank: int = 0
    """Logical rank of the first of them."""
    node: str = "node-0"
    host: str = "127.0.0.1"
    """Address on which the coordinator listens, and at which it is reached."""
    port: int = 0
    """Its port; 0: any free one."""
    events: str | None = None
    """Path of the event log."""
    replace: bool = True
    """Whether ranks that die are started again."""
    max_restarts: int = 10
    """Replacements in a row that end before they are members, per rank, before the rank is given up."""
    grace_s: float = 30.0
    """How long processes may take to end after the job was stopped, before they are killed."""
    show_events: bool = True
    """Whether events are written to stderr as they happen."""


@dataclasses.dataclass
class _Child:
    pid: int
    pidfd: int
    rank: int
    member_id: str
    first: bool  # not a replacement
    joined: bool = False


class Agent:
    def __init__(self, settings: AgentSettings, starter: Starter, on_event: Callable[[dict[str, Any]], None] | None = None):
        self.settings, self._starter, self._on_event = settings, starter, on_event
        self.token = secrets.token_hex(16)
        self.job_id = secrets.token_hex(4)
        self.failure = ""  # why the job failed
        self._children: dict[int, _Child] = {}
        self._fruitless: collections.Counter[int] = collections.Counter()
        self._starts: collections.Counter[int] = collections.Counter()
        self._reaped: list[str] = []
        self._finished: list[str] = []  # of them: those that came to the end of the script
        self._trained = False  # a view was installed
        self._completed = False  # a rank has ended with success: from then on nobody is replaced
        self._ending: float | None = None  # deadline of the processes that are left
        self._inbox: collections.deque[m.Message] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._narrator = Narrator()
        self._incarnation = 0
        self._heard = self._last_turn = time.monotonic()  # of the coordinator; of this loop
        self._aborts = 0  # ranks that ended with SIGABRT
        self._signals: list[int] = []

    # ------------------------------------------------------------------------------------------ life
    def run(self) -> int:
        """Runs the job.  Returns 0 when a rank came to the end of the script, 128 + n when signal n stopped the job, else 1
        (see :attr:`failure`)."""
        with contextlib.ExitStack() as stack:
            family = socket.AF_INET6 if ":" in self.settings.host else socket.AF_INET
            self._listener = socket.create_server(
                (self.settings.host, self.settings.port), family=family, backlog=512
            )
            stack.callback(self._listener.close)
            self.address = (self.settings.host, self._listener.getsockname()[1])
            self._wakeup_r, self._wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, self._wakeup_r)
            stack.callback(os.close, self._wakeup_w)
            stack.callback(self._selector.close)
            self._selector.register(self._wakeup_r, selectors.EVENT_READ, "wakeup")
            self._start_coordinator()
            stack.callback(self._end_coordinator)
            self._link = Link(self.address, self.token, hello=self._hello, handle=self._receive, beat_s=None, name="agent")
            self._link.start()
            stack.callback(self._link.close)
            with self._signal_handlers():
                stack.callback(self._kill_all)
                for local in range(self.settings.nproc):
                    self._start(self.settings.first_rank + local)
                while self._children:
                    self._turn()
                self._drain_events()
        if self._signals:
            self.failure = self.failure or f"stopped by {signal.Signals(self._signals[0]).name}"
            return 128 + self._signals[0]
        if self._completed and not self.failure:
            return 0
        if not self.failure:
            self.failure = "no rank came to the end of the script"
        return 1

    def _turn(self) -> None:
        timeout = self.settings.coordinator.lease_s
        if self._ending is not None:
            timeout = min(timeout, max(0.0, self._ending - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            if key.data == "wakeup":
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_r, 4096)
            elif key.data == "coordinator":
                self._coordinator_ended()
            else:
                self._child_ended(key.data)
        while self._inbox:
            self._on_message(self._inbox.popleft())
        if self._signals:
            self._on_signals()
        if self._ending is not None and time.monotonic() >= self._ending:
            self._kill_all()
            self._ending = None
        self._check_coordinator()

    # ------------------------------------------------------------------------------------------ coordinator process
    def _start_coordinator(self) -> None:
        fd = self._listener.fileno()
        command = [
            *(sys.executable, "-m", "lightning_cann.launch.child"),
            *(sys.executable, "-m", "lightning_cann.membership.server", "--fd", str(fd)),
            *("--incarnation", str(self._incarnation)),
            *("--settings", json.dumps(dataclasses.asdict(self.settings.coordinator))),
            *(("--events", self.settings.events) if self.settings.events else ()),
        ]
        environment = {
            **os.environ,
            env.TOKEN: self.token,
            env.JOB_ID: self.job_id,
            "CANN_FT_AGENT_PID": str(os.getpid()),
        }
        self._coordinator = subprocess.Popen(command, env=environment, pass_fds=[fd], start_new_session=True)
        self._heard = time.monotonic() + START_ALLOWANCE_S
        self._coordinator_fd = os.pidfd_open(self._coordinator.pid)
        self._selector.register(self._coordinator_fd, selectors.EVENT_READ, "coordinator")

    def _coordinator_ended(self) -> None:
        """Soft state only: a successor learns everything from members and agents."""
        code = self._coordinator.wait()
        self._selector.unregister(self._coordinator_fd)
        os.close(self._coordinator_fd)
        self._say(f"the coordinator ended ({_cause(code)}); training goes on, another one is started")
        self._incarnation += 1
        self._start_coordinator()

    def _check_coordinator(self) -> None:
        """A coordinator that is frozen is as good as dead, but its socket stays open: it is ended, so that a successor can
        take over.  It tells agents that it lives, several times per lease."""
        now = time.monotonic()
        slept = now - self._last_turn > 2 * self.settings.coordinator.lease_s  # then the silence was ours
        self._last_turn = now
        if slept:
            self._heard = max(self._heard, now)
        if now - self._heard > max(MIN_SILENCE_S, 3 * self.settings.coordinator.lease_s):
            self._heard = now
            self._say("the coordinator does not answer: it is ended")
            self._coordinator.kill()

    def _end_coordinator(self) -> None:
        self._coordinator.kill()  # its state is soft, and a frozen one would not hear anything else
        self._coordinator.wait()
        os.close(self._coordinator_fd)

    # ------------------------------------------------------------------------------------------ rank processes
    def _start(self, rank: int) -> None:
        self._starts[rank] += 1
        member_id = f"{rank}-{self._starts[rank]}-{secrets.token_hex(3)}"
        local = rank - self.settings.first_rank
        child_env = {
            env.COORDINATOR: f"{self.address[0]}:{self.address[1]}",
            env.TOKEN: self.token,
            env.JOB_ID: self.job_id,
            env.MEMBER_ID: member_id,
            env.RANK: str(rank),
            env.LOCAL_RANK: str(local),
            env.NODE: self.settings.node,
            env.WORLD_SIZE: str(self.settings.coordinator.world_size),
            **({env.EVENTS: self.settings.events} if self.settings.events else {}),
            # as Lightning's own launchers do: the ranks of a machine share its cores
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // self.settings.nproc)),
            "LOCAL_RANK": str(local),
            "NODE_RANK": "0",
        }
        pid = self._starter.start(child_env)
        child = _Child(pid, os.pidfd_open(pid), rank, member_id, self._starts[rank] == 1)
        self._children[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, pid)

    def _child_ended(self, pid: int) -> None:
        child = self._children.pop(pid)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        code = self._starter.reap(pid)
        while self._inbox:  # what it caused by its last words comes first
            self._on_message(self._inbox.popleft())
        if code == -signal.SIGABRT:
            self._note_abort(child.rank)
        again = self._should_restart(child, code)
        self._reaped.append(child.member_id)
        self._link.send(m.Reaped(child.member_id, child.rank, _cause(code), again))
        if code == 0:
            self._completed = True
            self._finished.append(child.member_id)
        if again:
            self._start(child.rank)

    def _note_abort(self, rank: int) -> None:
        """gloo aborts a process whose collectives do not match those of the others: a fault of the program, most often, and
        another start meets it again."""
        self._aborts += 1
        self._say(
            f"rank {rank} was aborted (SIGABRT). If gloo says 'collective mismatch' above: all ranks must call the same "
            "collectives in the same order; look for an `if rank == ...` around one"
        )
        if self._aborts >= MAX_ABORTS:
            self._fail(f"{self._aborts} ranks were aborted (SIGABRT), the last was rank {rank}")

    def _should_restart(self, child: _Child, code: int) -> bool:
        over = self._completed or self.failure or self._ending is not None or self._signals
        if code == 0 or over or not self.settings.replace:
            return False
        if code in (-signal.SIGTERM, ASKED_TO_GO):
            return False  # a planned leave
        if child.joined:
            self._fruitless[child.rank] = 0
            return True
        if child.first and code > 0 and code != EXCLUDED_EXIT_CODE:
            # the script fails before it trains: another start would fail as well
            self._fail(f"rank {child.rank} ended with {_cause(code)} before training started")
            return False
        self._fruitless[child.rank] += 1
        if self._fruitless[child.rank] > self.settings.max_restarts:
            self._say(f"rank {child.rank} is given up: {self._fruitless[child.rank]} replacements ended before they trained")
            return False
        return True

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = reason
            self._link.send(m.StopRequest(reason))
        self._end_within(min(3.0, self.settings.grace_s))

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._ending = deadline if self._ending is None else min(self._ending, deadline)

    def _kill_all(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------ messages
    def _hello(self) -> m.Message:
        alive = tuple(child.member_id for child in list(self._children.values()))
        return m.AgentHello(
            self.settings.node, alive, tuple(self._reaped), tuple(self._finished), self._trained, self._stop_reason()
        )

    def _receive(self, message: m.Message) -> None:
        self._heard = max(self._heard, time.monotonic())
        if isinstance(message, m.Beat):
            return
        self._inbox.append(message)  # deque.append is atomic; the link's thread is the only writer
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wakeup_w, b"x")

    def _on_message(self, message: m.Message) -> None:
        if isinstance(message, m.EventNotice):
            self._show(message.line)
        elif isinstance(message, m.Fence):
            for child in self._children.values():
                if child.member_id == message.member_id:
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        elif isinstance(message, m.Stop) and message.error:
            self.failure = self.failure or message.reason
            for child in self._children.values():
                if not child.first and not child.joined:  # still importing: it would come to hear that it is not needed
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._end_within(self.settings.grace_s)

    def _show(self, event: dict[str, Any]) -> None:
        if event["event"] in ("view_installed", "member_joined"):
            alive = set(event.get("members", [])) if event["event"] == "view_installed" else {event["rank"]}
            alive -= set(event.get("joined", []))
            for child in self._children.values():
                child.joined = child.joined or child.rank in alive
        self._trained = self._trained or event["event"] == "view_installed"
        if event["event"] == "job_finished":
            self._completed = True
        if self._on_event is not None:
            self._on_event(event)
        line = self._narrator.line(event)
        if line is not None:
            self._say(line)

    def _say(self, line: str) -> None:
        if self.settings.show_events:
            # \r\x1b[K clears a progress bar that another process left on this line
            start = "\r\x1b[K" if sys.stderr.isatty() else ""
            sys.stderr.write(f"{start}[cann_ft] {line}\n")
            sys.stderr.flush()

    def _drain_events(self) -> None:
        """The last events are still on their way when the last process has ended."""
        deadline = time.monotonic() + 1.0
        while self._completed and time.monotonic() < deadline:
            while self._inbox:
                message = self._inbox.popleft()
                self._on_message(message)
                if isinstance(message, m.EventNotice) and message.line["event"] == "job_finished":
                    return
            self._selector.select(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup_r, 4096)

    # ------------------------------------------------------------------------------------------ signals
    @contextlib.contextmanager
    def _signal_handlers(self) -> Any:
        def note(number: int, frame: Any) -> None:
            self._signals.append(number)

        try:
            before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
            wakeup = signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)
        except ValueError:  # not in the main thread: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop_reason(self) -> str:
        return f"stopped by the operator ({signal.Signals(self._signals[0]).name})" if self._signals else ""

    def _on_signals(self) -> None:
        if len(self._signals) >= 2:
            self._kill_all()
        elif self._ending is None:
            self._say("the job ends at its next safe point; once more to end it at once")
            self._link.send(m.StopRequest(self._stop_reason()))
            self._end_within(self.settings.grace_s)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cause(code: int) -> str:
    """``"SIGKILL"`` or ``"exit code 3"``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
