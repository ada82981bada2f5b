"""The protocol under an adversary: seeded schedules, and schedules that hypothesis composes (and shrinks)."""

from __future__ import annotations

import collections

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulator import FAULTS, Simulation

SCHEDULES = 1500


def test_no_seeded_schedule_breaks_an_invariant() -> None:
    ends: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(SCHEDULES):
        simulation = Simulation(seed)
        ends[simulation.run()] += 1
        counts += simulation.counts
    # the schedules were worth something
    assert ends["finished"] > SCHEDULES / 2 and ends["stopped"] > 50 and ends["lost"] > 20, ends
    for what in ("served", "joined", "dismissed", "crash", "recovered_views", *("fault:" + x for x in FAULTS)):
        assert counts[what] > 5, f"{what} hardly ever happened: {counts}"


@pytest.mark.parametrize("faults", ["die_ahead", "suspect disconnect", "restart restart_install", "join die_transfer"])
def test_no_schedule_with_much_of_one_fault_breaks_an_invariant(faults: str) -> None:
    for seed in range(10_000, 10_250):
        Simulation(seed, faults=faults).run()


@pytest.mark.parametrize("seed", range(20))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first: list[str] = []
    second: list[str] = []
    Simulation(seed, trace=first.append).run()
    Simulation(seed, trace=second.append).run()
    assert first == second and len(first) > 20


@pytest.mark.slow
def test_no_schedule_of_many_breaks_an_invariant() -> None:
    for seed in range(112_000, 117_000):
        Simulation(seed).run()


class Job(RuleBasedStateMachine):
    """Hypothesis chooses what happens next and what fails; what is left over is played out with the job's seed."""

    @initialize(seed=st.integers(0, 100_000))
    def begin(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.simulation.budget = dict.fromkeys(self.simulation.budget, 3)

    @precondition(lambda self: not self.simulation.scratch)
    @rule(choices=st.lists(st.integers(0, 60), min_size=1, max_size=40))
    def things_happen(self, choices: list[int]) -> None:
        for choice in choices:
            if not self.simulation.scratch:
                self.simulation.step(lambda options, n=choice: options[n % len(options)])

    @precondition(lambda self: not self.simulation.scratch)
    @rule(kind=st.sampled_from(FAULTS), choice=st.integers(0, 60))
    def something_fails(self, kind: str, choice: int) -> None:
        self.simulation.fault(kind, lambda options: options[choice % len(options)])

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run()


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
