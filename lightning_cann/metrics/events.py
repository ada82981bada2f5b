"""The event log of a job: one JSON object a line, written by the coordinator, read by people and tools.

Writing (one process; no torch, no Lightning needed)::

    with EventLog(path) as log:
        log.write("member_failed", rank=2, cause="SIGKILL", view=1)

Reading::

    for event in read_events(path):      # a finished log
        print(describe(event))
    tail = EventTail(path)               # a log that still grows
    new_events = tail.read()

Every line has ``time`` (unix seconds, float) and ``event`` (a name in :data:`EVENTS`), then the payload.  It is not
a metrics store: numbers that belong to steps go to Lightning's loggers under the names in :mod:`.names`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["EVENTS", "Event", "EventLog", "EventName", "EventTail", "Narrator", "check", "describe", "read_events"]

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EventName:
    """One row: an event and the payload fields it always carries (further fields are allowed)."""

    name: str
    fields: tuple[str, ...]
    help: str


EVENTS: tuple[EventName, ...] = (
    EventName(name="job_started", fields=("world_size", "job_id", "pid"), help="The coordinator accepts members."),
    EventName(name="member_started", fields=("rank", "pid", "member_id"), help="A process holds a logical rank."),
    EventName(name="view_installed", fields=("view", "members", "size"), help="Members agreed on a new view."),
    EventName(name="member_failed", fields=("rank", "cause", "view"), help="A member of `view` left or died."),
    EventName(name="recovered", fields=("view", "members", "latency_s"), help="Survivors train again in `view`."),
    EventName(name="member_joined", fields=("rank", "view", "transfer_s"), help="A newcomer has the state and trains."),
    EventName(name="step_redone", fields=("view", "step"), help="A step broken by a failure ran again in `view`."),
    EventName(name="rank_exception", fields=("rank", "type", "message"), help="User code raised on a rank."),
    EventName(name="job_stopped", fields=("reason",), help="The job ended before its training did."),
    EventName(name="job_finished", fields=(), help="Training came to its end."),
)

_BY_NAME = {row.name: row for row in EVENTS}


class EventLog:
    """Append-only JSONL writer; each event is one ``write`` on an ``O_APPEND`` descriptor, so lines never interleave.

    Args:
        path: File to append to.  Missing folders are created.

    Raises:
        OSError: The file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **payload: Any) -> None:
        """Append one event, stamped with the current time.  It is in the kernel when this returns.

        The payload is not checked (:func:`check` does that in tests): a log line must not end the coordinator.
        Values that JSON does not know are written as their ``str``.

        Raises:
            ValueError: The log is closed.
            OSError: The line could not be written whole (disk full).
        """
        if self._fd is None:
            raise ValueError(f"event log {self.path} is closed")
        line = (json.dumps({"time": time.time(), "event": event, **payload}, default=str) + "\n").encode()
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"event log {self.path}: wrote {written} of {len(line)} bytes")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check(event: Event) -> None:
    """Check that an event is in :data:`EVENTS` and carries the fields of its row.

    Raises:
        ValueError: It is not, or it lacks some; the message names them.
    """
    row = _BY_NAME.get(event["event"])
    if row is None:
        raise ValueError(f"unknown event {event['event']!r}; the table has: {', '.join(_BY_NAME)}")
    missing = [field for field in row.fields if field not in event]
    if missing:
        raise ValueError(f"event {row.name!r} lacks {', '.join(missing)}: {dict(event)}")


class EventTail:
    """Reads a growing event log piece by piece; a file that does not exist yet reads as empty.

    Only whole lines are taken, so a line that is being written is returned by a later call.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._offset = 0
        self._line = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events that were added since the last call.

        Raises:
            ValueError: A whole line is not an event; the message names file and line.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            self._line += 1
            if line.strip():
                events.append(self._parse(line))
        return events

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path}:{self._line}: not JSON ({error}): {line[:80]!r}") from error
        if not isinstance(event, dict) or "event" not in event or "time" not in event:
            raise ValueError(f"{self.path}:{self._line}: not an event (needs `time` and `event`): {line[:80]!r}")
        return event


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a whole log.  A torn last line (its writer was killed) is left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A whole line is not an event.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no event log at {path}")
    return EventTail(path).read()


def describe(event: Event, *, failures: Sequence[Event] = ()) -> str:
    """Say one event in words.

    Args:
        event: An event as read from a log.
        failures: ``member_failed`` events that a ``recovered`` event answers; they open its sentence, as in
            "rank 2 died (SIGKILL); view 2, 3 members; recovered in 0.07 s".
    """
    kind = event["event"]
    if kind == "job_started":
        return f"job {event['job_id']} started with {event['world_size']} ranks"
    if kind == "member_started":
        return f"rank {event['rank']} started (pid {event['pid']})"
    if kind == "view_installed":
        return f"view {event['view']} installed, {_members(event['size'])}"
    if kind == "member_failed":
        cause = event["cause"]
        if cause == "left":
            return f"rank {event['rank']} left"
        return f"rank {event['rank']} {'left' if event.get('planned') else 'died'} ({cause})"
    if kind == "recovered":
        parts = [describe(failure) for failure in failures]
        parts += [f"view {event['view']}, {_members(_count(event['members']))}"]
        parts += [f"recovered in {event['latency_s']:.2f} s"]
        return "; ".join(parts)
    if kind == "member_joined":
        return f"rank {event['rank']} joined view {event['view']} (state received in {event['transfer_s']:.2f} s)"
    if kind == "step_redone":
        return f"step {event['step']} redone in view {event['view']}"
    if kind == "rank_exception":
        return f"rank {event['rank']} raised {event['type']}: {event['message']}"
    if kind == "job_stopped":
        return f"job stopped: {event['reason']}"
    if kind == "job_finished":
        return f"job finished after {event['steps']} steps" if "steps" in event else "job finished"
    # A log of a newer version may hold events that this one does not know: show them, do not drop them.
    payload = ", ".join(f"{key}={value}" for key, value in event.items() if key not in ("time", "event"))
    return f"{kind}: {payload}" if payload else str(kind)


class Narrator:
    """Turns a stream of events into lines for people: a recovery is told once, with the failures that it answers.

    Each survivor reports ``recovered`` for itself (then the event carries its ``rank``).  The line appears when the
    last one has, with the longest latency: that is when the job had recovered.
    """

    def __init__(self) -> None:
        self._failures: list[Event] = []
        self._recovered: list[Event] = []

    def line(self, event: Event) -> str | None:
        """Return the line for ``event``, or None where the line of another event says it all."""
        kind = event["event"]
        if kind == "member_failed":
            self._failures.append(event)
        elif kind == "view_installed" and self._failures:
            self._recovered.clear()
            return None
        elif kind == "recovered":
            return self._recovery(event)
        return describe(event)

    def _recovery(self, event: Event) -> str | None:
        if not self._failures:
            return None  # a view that only took newcomers in: told by their own lines
        self._recovered.append(event)
        if "rank" in event and len(self._recovered) < _count(event["members"]):
            return None
        failures, self._failures = self._failures, []
        slowest = max(self._recovered, key=lambda one: float(one["latency_s"]))
        self._recovered.clear()
        return describe(slowest, failures=failures)


def _count(members: Any) -> int:
    """Members are told as a list of ranks, a mapping by rank, or already as a count."""
    return members if isinstance(members, int) else len(members)


def _members(count: int) -> str:
    return f"{count} member" if count == 1 else f"{count} members"
