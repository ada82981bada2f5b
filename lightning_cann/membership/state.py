"""The coordinator's state and effects, and the names by which its parts call each other.

The parts: :mod:`.views` (proposals, flush, installation), :mod:`.admission` (newcomers), :mod:`.coordinator` (messages, losses,
restart).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lightning_cann.membership import messages as m
from lightning_cann.membership.messages import NO_VIEW, MemberInfo, ViewId
from lightning_cann.membership.settings import CoordinatorSettings

__all__ = ["Attempt", "CoordinatorState", "Effect", "Emit", "MemberRecord", "Send"]


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
class MemberRecord:
    info: MemberInfo
    pid: int
    fresh: bool
    seen: float
    joining: bool = False  # waits at the entrance with a built model
    stage: int = 0


@dataclasses.dataclass
class Attempt:
    """One attempt to stop the members at a safe point."""

    number: int
    joiners: tuple[str, ...]
    boundaries: dict[str, int] = dataclasses.field(default_factory=dict)
    armed: set[str] = dataclasses.field(default_factory=set)
    waiting: set[str] = dataclasses.field(default_factory=set)
    target: int = 0  # the safe point


class CoordinatorState:
    """All that the coordinator knows.  Soft state: a successor learns it from members and agents."""

    def __init__(self, settings: CoordinatorSettings, incarnation: int = 0, now: float = 0.0) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.view: ViewId = NO_VIEW
        self.members: tuple[str, ...] = ()  # of the current view, in logical order
        self.known: dict[str, MemberRecord] = {}  # connected processes, members or not
        self.infos: dict[str, MemberInfo] = {}  # of the current view, also of members that are gone
        self.gone: dict[str, str] = {}  # excluded or dead processes and why (R5: an identity never comes back)
        self.dead_ranks: set[int] = set()  # reaped before the first view
        self.proposal: tuple[ViewId, tuple[str, ...]] | None = None
        self.replies: dict[str, m.Flush] = {}
        self.features: set[str] = set()
        self.attempt: Attempt | None = None
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

    def _ranks(self, ids: Iterable[str]) -> list[int]:
        return sorted(self.infos[x].rank if x in self.infos else self.known[x].info.rank for x in ids)

    def _send(self, to: str | None, message: m.Message) -> None:
        self._out.append(Send(to, message))

    def _emit(self, event: str, **fields: Any) -> None:
        self._out.append(Emit(event, fields))

    def _flush_effects(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    # What one part needs of another.
    def _propose(self, now: float) -> None:
        raise NotImplementedError

    def _new_proposal(self, ids: Iterable[str]) -> None:
        raise NotImplementedError

    def _try_admit(self, now: float) -> None:
        raise NotImplementedError

    def _cancel_attempt(self) -> None:
        raise NotImplementedError

    def _stop(self, reason: str, now: float) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError
