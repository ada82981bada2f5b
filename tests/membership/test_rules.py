"""Each rule of view-synchronous collectives left out in turn: the simulator must notice.

A test is named after the sentence that it leaves out.  ``hunt`` plays the same seeds with the protocol as it is, which
must stay clean, and with the mutation, which must show a violation in one of them.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from simulator import Process, Simulation, Violation

from lightning_cann.membership import messages as m
from lightning_cann.membership.coordinator import Coordinator
from lightning_cann.membership.member import MemberState
from lightning_cann.membership.messages import ViewId


@functools.cache
def clean(seed: int, faults: str) -> str:
    return Simulation(seed, faults=faults).run()


def hunt(within: int, matching: str = "", faults: str = "", **mutation: Any) -> Violation:
    """The first violation within so many seeds."""
    for seed in range(within):
        clean(seed, faults)
        try:
            Simulation(seed, faults=faults, **mutation).run()
        except Violation as violation:
            if re.search(matching, str(violation)):
                print(f"seed {seed}: {violation}")
                return violation
    pytest.fail(f"the rule was left out, and {within} schedules show nothing")


# ------------------------------------------------------------------------------------------ R1
class DropsAtOnce(Process):
    def keep(self, number: int, result: dict) -> None:
        self.kept = {}


class SingleBuffer(Process):
    def launch(self) -> None:
        number, bucket = self.item()[1], self.launched
        super().launch()
        self.kept.get(number - 1, {}).pop(bucket, None)


class ForgetsWhatItWasServed(Process):
    def from_peer(self, kind: str, view: ViewId, body: Any) -> None:
        super().from_peer(kind, view, body)
        if kind == "result":
            self.kept = {}


def test_r1_results_are_kept_until_stable() -> None:
    hunt(100, "has not kept it", process_class=DropsAtOnce)


def test_r1_buckets_are_double_buffered() -> None:
    hunt(200, "has not kept it", process_class=SingleBuffer)


def test_r1_results_that_it_was_served_included() -> None:
    hunt(3000, "has not kept it", "die_ahead break", process_class=ForgetsWhatItWasServed)


# ------------------------------------------------------------------------------------------ R2
class KeepsBuckets(Process):
    """Buckets of a step that nobody completed are kept; only the rest is redone."""

    def drop_partial(self) -> None:
        kind, number, buckets = self.item()
        self.launched, self.barrier = 0, False
        if kind == "step" and self.group is not None:
            self.launched = min(len(self.seen), buckets - 1)
            for bucket in range(self.launched):
                self.group.entered.setdefault((number, bucket), {})[self.id] = None
        self.seen = {b: r for b, r in self.seen.items() if b < self.launched}


def test_r2_the_step_is_the_atom_not_the_op() -> None:
    hunt(1000, "mixes contributors", process_class=KeepsBuckets)


class AppliedNotComplete(MemberState):
    """Counts a transaction when the optimizer ran, not when its last bucket arrived."""

    def on_propose(self, message: m.Propose) -> m.Flush | None:
        reply = super().on_propose(message)
        if reply is None or not self.unapplied():
            return reply
        return m.Flush(reply.view, reply.done - 1, reply.fresh, reply.features)


class TellsWhatItApplied(Process):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.state, AppliedNotComplete)
        self.state.unapplied = lambda: self.unapplied is not None


# ------------------------------------------------------------------------------------------ R3
class NeverFrozen(MemberState):
    def complete(self, view: ViewId) -> bool:
        if view == self.view:
            self.done += 1
            return True
        return False


def test_r3_a_flush_reports_all_buckets_complete_not_optimizer_ran() -> None:
    hunt(300, member_class=AppliedNotComplete, process_class=TellsWhatItApplied)


def test_r3_a_flush_freezes_the_member() -> None:
    hunt(300, member_class=NeverFrozen)


# ------------------------------------------------------------------------------------------ R4
class AdoptsAtOnce(MemberState):
    def on_install(self, message: m.Install) -> bool:
        taken = super().on_install(message)
        self.lacking = False
        return taken


def test_r4_a_member_enters_nothing_before_it_holds_all_results_up_to_the_cut() -> None:
    hunt(300, "enters", member_class=AdoptsAtOnce)


# ------------------------------------------------------------------------------------------ R5
class TakesBack(Coordinator):
    """An excluded process that says hello again is a member again, with its state."""

    def _on_hello(self, sender: str, hello: m.Hello, now: float) -> None:
        if self.gone.pop(sender, None) is not None and not hello.fresh and self.view.number and not self.recovering:
            holders = {x.info.rank for x in self.known.values()}
            if hello.info.rank not in holders and sender not in self.members:
                self.members = (*self.members, sender)
                super()._on_hello(sender, hello, now)
                self._propose(now)
                return
        super()._on_hello(sender, hello, now)


def test_r5_an_excluded_process_discards_its_state_and_comes_back_under_a_new_identity() -> None:
    hunt(3000, "fork|more than one|other weights|results, not", "disconnect", coordinator_class=TakesBack)


# ------------------------------------------------------------------------------------------ R6
class ClaimsState(MemberState):
    def on_propose(self, message: m.Propose) -> m.Flush | None:
        reply = super().on_propose(message)
        if reply is not None and self.done:  # it has adopted the view that admits it
            return m.Flush(reply.view, reply.done, False, reply.features)
        return reply


def test_r6_a_newcomer_answers_a_flush_as_fresh() -> None:
    hunt(4000, "", "die join die_transfer", member_class=ClaimsState)


# ------------------------------------------------------------------------------------------ R7
class TakesAnyState(MemberState):
    def took_state(self, view: ViewId) -> bool:
        return self.fresh and super().took_state(self.view)


def test_r7_a_state_of_a_view_that_was_superseded_is_void() -> None:
    hunt(2000, "other weights|to weights of", "join join join die_transfer slow:peer", member_class=TakesAnyState)


# ------------------------------------------------------------------------------------------ R8
class CountsMembers(Process):
    def advance_cursors(self, contributions: frozenset) -> None:
        assert self.group is not None
        install = self.state.install  # by now known, if it was served
        members = [x.member_id for x in install.members] if install is not None else self.group.members
        for member_id in members:
            self.counted[self.sim.processes[member_id].rank] += 1


class DecidesAgain(Process):
    """Computes anew, in the new view, what it contributes: the next microbatch, as if the old one had counted."""

    def drop_partial(self) -> None:
        if self.launched and self.gradient is not None and self.gradient[0] is not None:
            rank, index, weights = self.gradient[0]
            self.gradient = ((rank, index + 1, weights),)
        super().drop_partial()


def test_r8_cursors_come_from_the_result_alone_never_from_membership() -> None:
    hunt(2000, "is not its next one", "die join", process_class=CountsMembers)


def test_r8_a_member_decides_once_what_it_contributes() -> None:
    hunt(300, "", process_class=DecidesAgain)


# ------------------------------------------------------------------------------------------ R9
class OutputAtOnce(Process):
    def apply(self) -> None:
        super().apply()
        for out in list(self.outbox):
            self.release(out)


def test_r9_output_leaves_the_job_when_it_is_stable() -> None:
    hunt(1000, "let the output", "die_ahead", process_class=OutputAtOnce)


def test_r9_fit_ends_with_a_barrier() -> None:
    hunt(300, "", "break", closing_barrier=False)


# ------------------------------------------------------------------------------------------ R10
class FirstCome(Coordinator):
    """Begins with whoever has announced itself, and takes the others for dead."""

    def _try_recover(self, now: float) -> None:
        voters = [hello for hello in self.announced.values() if not hello.fresh]
        if self.recovering and voters:
            best = max(voters, key=lambda hello: hello.view)
            for info in best.members:
                if info.member_id not in self.known:
                    self.gone.setdefault(info.member_id, "not there")
        super()._try_recover(now)


class ObeysTheOld(MemberState):
    """Announces itself to the new coordinator, and still takes and adopts views of the old one."""

    def hello(self, incarnation: int, *args: Any) -> m.Hello:
        install, lacking = self.install, self.lacking
        hello = super().hello(incarnation, *args)
        self.install, self.lacking = install, lacking
        return hello

    def on_propose(self, message: m.Propose) -> m.Flush | None:
        announced, self.incarnation = self.incarnation, 0
        reply = super().on_propose(message)
        self.incarnation = announced
        return reply

    def on_install(self, message: m.Install) -> bool:
        announced, self.incarnation = self.incarnation, 0
        taken = super().on_install(message)
        self.incarnation = announced
        return taken


def test_r10_no_view_before_all_of_the_highest_view_announced_themselves() -> None:
    hunt(2000, "", "restart", coordinator_class=FirstCome)


def test_r10_announcing_is_a_promise_not_to_obey_older_incarnations() -> None:
    hunt(3000, "", "restart_install suspect", member_class=ObeysTheOld)
