"""How newcomers get in: at a safe point of the program, with the state of a donor.

Members call :func:`safe_point` between two optimizer steps.  Usually it costs a lock; when newcomers wait, all members
stop at the same safe point, the view that admits them is installed there, and the donor hands over its state.

A newcomer runs the script's set-up alone (``group.solo``), then calls :func:`admit`, which blocks until it holds the state
of that very point; it goes on alone to its first safe point, and is a member like the others from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_cann.collectives.peer import fetch
from lightning_cann.collectives.view_group import ViewGroup
from lightning_cann.errors import FaultToleranceError
from lightning_cann.membership import messages as m

ASK_AGAIN_S = 1.0  # a question to the coordinator is asked again after so long without an answer

__all__ = ["admit", "enter_stage", "fetch_journal", "safe_point"]


def enter_stage(group: ViewGroup, stage: int) -> bool:
    """The program enters its n-th trainer call.  False: a newcomer must skip it, the job is further on."""
    group.stage = stage
    if not group.solo:
        if stage > group.job_stage:
            group.job_stage = stage
            group.send(m.StageReached(stage))
        with group.cond:
            group.journal, group.journal_sealed = {}, False
        return True
    return group.job_stage <= stage


def safe_point(group: ViewGroup, dump: Callable[[], Any]) -> str:
    """A point between two optimizer steps, the same at every member.

    Args:
        dump: makes the state for newcomers; called if this member is the donor.  Must not share storage with anything
            that the next steps change.

    Returns:
        why all members are to end here, or "".
    """
    if group.solo:  # the safe point at which it was admitted
        with group.cond:
            group.solo, group.journal_sealed = False, True
            group.cond.notify_all()
        return ""
    with group.cond:
        group.journal_sealed = True
        arrived = group.state.reach_boundary()
        group.cond.notify_all()
    if arrived is not None:
        group.send(arrived)
        with group.cond:
            group.cond.wait_for(lambda: not group.state.held or group.fatal is not None)
        view = group.enter()
        if group.state.member_id in view.install.sources.values() and view.install.newcomers:
            state = dump()
            with group.cond:
                group.handover = {view.id: state}
                group.cond.notify_all()
        return view.install.end
    elif group.handover:
        with group.cond:  # the transfer is over once a later step has begun: its receiver takes part in it
            if group.view.steps > 0:
                group.handover = {}
    return ""


def admit(group: ViewGroup, load: Callable[[Any], None]) -> bool:
    """Blocks until this newcomer holds the state of a safe point.  False: the job went on, or ended, without it."""
    group.joining = True
    group.send(m.JoinReady(group.stage))
    while True:
        with group.cond:
            group.cond.wait_for(
                lambda: group.next_view is not None
                or group.finished
                or group.fatal is not None
                or group.job_stage > group.stage
            )
            group.check()
            if group.next_view is None:
                return False
            view = group.adopt()
            source = next(x for x in view.members if x.member_id == view.install.sources[group.state.member_id])
        started = time.monotonic()
        try:
            state = fetch(
                (source.host, source.port), group.token, "state", tuple(view.id), group.settings.fetch_timeout_s
            )
        except ConnectionError as error:
            group.send(m.Broken(view.id, f"rank {group.rank} cannot take its state: {error}"))
            continue
        with group.cond:
            if not group.state.took_state(view.id):
                continue  # the view was superseded: what was received is void (R7)
            group.joining = False
        load(state)
        group.send(m.Joined(view.id, time.monotonic() - started))
        return True


def wait_for_next_stage(group: ViewGroup) -> bool:
    """A newcomer cannot enter a trainer call without safe points (validate, test); True: there is a next one to try."""
    with group.cond:
        group.cond.wait_for(lambda: group.finished or group.fatal is not None or group.job_stage > group.stage)
        group.check()
    return not group.finished


def fetch_journal(group: ViewGroup) -> dict[str, list[bytes]]:
    """What was broadcast during the set-up of this stage, from any member that has it."""
    while True:
        with group.cond:
            group.peer_members = None
        group.send(m.MembersQuery())
        with group.cond:
            answered = group.cond.wait_for(
                lambda: group.peer_members is not None or group.fatal is not None or group.finished, ASK_AGAIN_S
            )
            group.check()
            if not answered:
                continue  # the question, or the answer, died with a coordinator
            members: tuple[m.MemberInfo, ...] = group.peer_members or ()
            stage = group.stage
        if group.finished:
            return {}
        for info in members:
            try:
                journal: dict[str, list[bytes]] = fetch(
                    (info.host, info.port), group.token, "journal", stage, group.settings.fetch_timeout_s
                )
                return journal
            except ConnectionError:
                continue  # it died, or has moved on to another stage: ask the next, then ask for new names
        if group.job_stage > stage:
            return {}
        if not members:
            raise FaultToleranceError(f"rank {group.rank} has nobody to join")
