"""Every training sample is used in exactly one committed step of each epoch, whatever dies, stays away or comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.scenario import Scenario, check_equal, check_exactly_once, run
from tests.support.training import Fault

# The ranks of these tests come from a fork server, which would make it their workers' default too; a script's are forked.
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
PERSISTENT = {**WORKERS, "persistent_workers": True}
FORKSERVER = {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True}
SLOW = pytest.mark.slow


def case(name: str, *marks: Any, **scenario: Any) -> Any:
    return pytest.param(scenario, id=name, marks=marks)


@pytest.mark.parametrize(
    "scenario",
    [
        case("plain", SLOW),
        case("uneven", SLOW, samples=53, batch_size=3),
        case("fewer batches than ranks", SLOW, samples=5, batch_size=1),
        case("workers", data=WORKERS),
        case("persistent workers", SLOW, data=PERSISTENT),
        case("workers of a fork server", SLOW, data=FORKSERVER),
        case("accumulation", SLOW, trainer={"accumulate_grad_batches": 2}),
        case("own sampler", SLOW, kind="sampler"),
        case("own batch sampler", kind="batch_sampler", trainer={"use_distributed_sampler": False}),
        case("drop_last", SLOW, data={"drop_last": True}, samples=72),
    ],
)
def test_shards_of_ranks_that_never_come_back(scenario: dict[str, Any]) -> None:
    """Two of three ranks die in the first epoch, the third trains on alone: it adopts what they had left."""
    faults = (Fault(0, "forward", 1), Fault(2, "backward", 3))
    if scenario.get("samples") == 5:
        faults = (Fault(0, "forward", 1), Fault(2, "backward", 2))
    result = run(Scenario(faults=faults, epochs=3, **scenario), replace=False)
    check_equal(result, 1)
    check_exactly_once(result)
    assert sorted(result.values[1].audit) == [0, 1, 2]


@pytest.mark.parametrize(
    "scenario",
    [
        case("plain"),
        case("uneven", SLOW, samples=53, batch_size=3),
        case("workers", SLOW, data=WORKERS),
        case("persistent workers", SLOW, data=PERSISTENT),
        case("accumulation", SLOW, trainer={"accumulate_grad_batches": 2}),
        case("own sampler", SLOW, kind="sampler"),
        case("own batch sampler", SLOW, kind="batch_sampler", trainer={"use_distributed_sampler": False}),
        case("workers and accumulation", SLOW, data=PERSISTENT, trainer={"accumulate_grad_batches": 3}),
    ],
)
def test_several_deaths_in_an_epoch_and_rejoins(scenario: dict[str, Any]) -> None:
    faults = (Fault(1, "forward", 2), Fault(0, "backward", 4), Fault(2, "batch_end", 40))
    result = run(Scenario(faults=faults, rejoins=3, pace_s=0.008, **scenario))
    check_equal(result, 3, replaced=3)
    check_exactly_once(result)
    assert len(result.named("member_joined")) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "batch_end"])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_death_in_the_last_step_of_an_epoch(epoch: int, point: str) -> None:
    result = run(Scenario(faults=(Fault(1, point, 7 * (epoch + 1) - 1),), epochs=3), replace=False)
    check_equal(result, 2)
    check_exactly_once(result)
    assert len(result.named("member_failed")) == 1


@pytest.mark.parametrize("replace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_iterable_dataset_goes_on_but_is_not_exactly_once(replace: bool) -> None:
    """Nobody but the dataset knows its samples: what a dead rank had not read is lost, and a warning says so."""
    scenario = Scenario(
        faults=(Fault(2, "forward", 2),), kind="iterable", samples=72, epochs=2, rejoins=int(replace), pace_s=0.01 * replace
    )
    result = run(scenario, replace=replace)
    assert result.code == 0, result.failure
    ended = {rank: said for rank, said in result.values.items() if not said.error}
    assert sorted(ended) == ([0, 1, 2] if replace else [0, 1])
    assert {said.weights for said in ended.values()} == {ended[1].weights}
    assert {said.step for said in ended.values()} == {ended[0].epoch * 6}
    assert ended[1].audit == {}
    assert any("not exactly-once" in line for line in ended[0].extra["warnings"]), ended[0].extra
