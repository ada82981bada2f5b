"""More than one rank dies: at once, during the view change that the first one caused, one per view, more than allowed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.scenario import Scenario, check_equal, check_exactly_once, digest, latencies, run
from tests.support.training import Fault, Regression, weights_hash


def died(result: Any) -> list[int]:
    return sorted(e["rank"] for e in result.named("member_failed"))


@pytest.mark.parametrize("ranks", [(0, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in [(0, 1), (2, 3)])])
def test_two_at_once(ranks: tuple[int, int]) -> None:
    result = run(Scenario(faults=tuple(Fault(rank, "forward", 2) for rank in ranks)), 4, replace=False)
    check_equal(result, 2)
    check_exactly_once(result)
    assert died(result) == sorted(ranks)
    assert all(seconds < 1.0 for seconds in latencies(result))


MOMENTS = ("propose", "install", "adopt")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 0), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(0, 1), (0, 2), (2, 1)])],
)
def test_second_death_in_the_view_change(first: int, second: int, moment: str) -> None:
    faults = (Fault(first, "backward", 2), Fault(second, moment, armed_at=("batch_start", 0)))
    result = run(Scenario(faults=faults), 4, replace=False)
    check_equal(result, 2)
    check_exactly_once(result)
    assert died(result) == sorted((first, second))
    assert all(seconds < 1.0 for seconds in latencies(result))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("second", [0, 1])
def test_death_while_a_replacement_joins(second: int, moment: str) -> None:
    """The second proposal, install or adoption that rank ``second`` sees is that of the view that admits a replacement."""
    faults = (Fault(2, "forward", 2), Fault(second, moment, 1, armed_at=("batch_start", 0)))
    result = run(Scenario(faults=faults, rejoins=2, pace_s=0.005))
    check_equal(result, 3, replaced=2)
    check_exactly_once(result)
    assert died(result) == sorted((2, second))


@pytest.mark.slow
def test_replacement_dies_while_it_joins() -> None:
    """It dies while it takes over the state, a member of the view already; the next one comes through."""
    faults = (Fault(2, "forward", 2), Fault(2, "handover", generation=2))
    result = run(Scenario(faults=faults, rejoins=1, pace_s=0.005))
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    assert died(result) == [2, 2]


def test_a_death_per_view_down_to_one_member() -> None:
    faults = (Fault(3, "forward", 1), Fault(0, "backward", 2), Fault(1, "forward", 3))
    result = run(Scenario(faults=faults), 4, replace=False)
    check_equal(result, 1)
    check_exactly_once(result)
    assert died(result) == [0, 1, 3]
    assert [e["size"] for e in result.named("view_installed")] == [4, 3, 2, 1]


@pytest.mark.slow
def test_a_death_per_epoch_with_replacements() -> None:
    faults = (Fault(1, "forward", 4), Fault(0, "backward", 60), Fault(2, "batch_end", 120), Fault(3, "forward", 180))
    result = run(Scenario(faults=faults, rejoins=4, pace_s=0.01), 4)
    check_equal(result, 4, replaced=4)
    check_exactly_once(result)
    assert died(result) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_failures": 1}, "more than max_failures=1"),
        pytest.param({"max_failures": None, "min_members": 2}, "fewer min_members=2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sig", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_beyond_the_limits(limits: dict[str, Any], words: str, sig: int, tmp_path: Path) -> None:
    """A clean stop: the last committed state is in a checkpoint, the error says what happened, and a new job goes on."""
    faults = (Fault(0, "forward", 2, sig), Fault(2, "forward", 4, sig))
    options: dict[str, Any] = {
        "trainer": {"default_root_dir": str(tmp_path)}, "strategy": {"lease_s": 1.0}, "books": str(tmp_path)
    }
    result = run(Scenario(faults=faults, **options), replace=False, lease_s=1.0, **limits)
    assert result.code == 1
    words = words.replace("fewer ", "fewer than ")
    assert words in result.failure
    assert [e["reason"] for e in result.named("job_stopped")] == [result.failure]
    (said,) = result.values.values()
    assert said.error == f"FaultToleranceError: {result.failure}"
    assert ("rank 2: SIGKILL" in result.failure or "rank 2: connection closed" in result.failure) == (sig == signal.SIGKILL)
    assert said.step == 4

    checkpoint = torch.load(tmp_path / "cann_ft-final.ckpt", weights_only=False)
    model = Regression()
    model.load_state_dict(checkpoint["state_dict"])
    assert weights_hash(model) == said.weights == said.states[4]["weights"]
    assert checkpoint["global_step"] == 4
    assert digest(checkpoint["optimizer_states"]) == said.states[4]["optimizers"]

    resumed = run(Scenario(**options, ckpt_path=str(tmp_path / "cann_ft-final.ckpt")), 3, lease_s=1.0)
    assert resumed.code == 0, resumed.failure
    assert {said.weights for said in resumed.values.values()} == {resumed.values[0].weights}
    begin = resumed.values[0].states[min(resumed.values[0].states)]
    assert begin["step"] == 5  # it went on behind the last committed step
    check_exactly_once(resumed)  # over both jobs
