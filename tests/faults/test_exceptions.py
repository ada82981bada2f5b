"""The user's own exceptions, planned leaves, and a coordinator that dies: none of them is a dead node."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from lightning_cann.launch.agent import Agent
from tests.faults.scenario import Scenario, check_equal, check_exactly_once, latencies, run
from tests.support.training import Fault


class ExitCodes:
    """Notes how each process of a job ended: ``run(..., on_agent=codes)``."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(self, agent: Agent) -> None:
        reap = agent._starter.reap

        def noted(pid: int) -> int:
            self.found.append(reap(pid))
            return self.found[-1]

        agent._starter.reap = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_exception_on_one_rank_ends_the_job(rank: int) -> None:
    result = run(Scenario(raises=((rank,), 3)))
    assert result.code == 1
    assert result.failure == f"rank {rank} raised ValueError: a bad sample"
    (event,) = result.named("rank_exception")
    assert (event["rank"], event["type"]) == (rank, "ValueError")
    assert "in training_step" in event["traceback"]
    errors = {r: said.error for r, said in result.values.items()}
    assert errors.pop(rank) == "ValueError: a bad sample"
    assert set(errors.values()) == {f"FaultToleranceError: {result.failure}"}
    steps = {said.step for r, said in result.values.items() if r != rank}
    assert steps == {3}


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_exception_on_one_rank_replaces_it(rank: int) -> None:
    result = run(Scenario(raises=((rank,), 3), rejoins=1, pace_s=0.005), on_rank_exception="replace")
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    assert [e["cause"] for e in result.named("member_failed")] == ["raised ValueError"]


def test_exception_on_all_ranks_ends_fit() -> None:
    """Who has not completed the step before when the first raises hears of that exception instead: nobody is left to
    complete it with."""
    result = run(Scenario(raises=((0, 1, 2), 3)))
    assert result.code == 1
    assert result.failure.endswith("raised ValueError: a bad sample")
    assert sorted(result.values) == [0, 1, 2]
    errors = {said.error for said in result.values.values()}
    assert "ValueError: a bad sample" in errors
    assert errors <= {"ValueError: a bad sample", f"FaultToleranceError: {result.failure}"}
    assert len(result.named("member_started")) == 3


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", ["forward", pytest.param("validation", marks=pytest.mark.slow)])
def test_sigterm_is_a_planned_leave(rank: int, point: str) -> None:
    codes = ExitCodes()
    number = 3 if point == "forward" else 0
    scenario = Scenario(faults=(Fault(rank, point, number, signal.SIGTERM),), epochs=2, validate=True)
    result = run(scenario, on_agent=codes)
    check_equal(result, 2)
    check_exactly_once(result)
    assert [(e["rank"], e["planned"], e["cause"]) for e in result.named("member_failed")] == [(rank, True, "SIGTERM")]
    assert sorted(codes.found) == [0, 0, 143]
    assert len(result.named("member_started")) == 3  # nobody took its place
    assert all(seconds < 1.0 for seconds in latencies(result))


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        pytest.param("view_installed", Fault(1, "forward", 400), id="long before a death"),
        pytest.param("view_installed", Fault(1, "forward", 3), id="just before a death", marks=pytest.mark.slow),
        pytest.param("member_failed", Fault(0, "forward", 20), id="during a view change", marks=pytest.mark.slow),
        pytest.param("recovered", Fault(2, "forward", 20), id="while a replacement joins", marks=pytest.mark.slow),
    ],
)
def test_coordinator_dies(event: str, fault: Fault) -> None:
    """Training goes on meanwhile; its successor handles the next death."""
    agents: list[Agent] = []
    killed: list[int] = []

    def on_event(line: dict[str, Any]) -> None:
        if line["event"] == event and not killed:
            killed.append(agents[0]._coordinator.pid)
            os.kill(killed[0], signal.SIGKILL)

    result = run(Scenario(faults=(fault,), rejoins=1, pace_s=0.003), on_agent=agents.append, on_event=on_event)
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    assert killed
    assert agents[0]._incarnation == 1
