"""What a replacement must have when it contributes its first step: all that the others have, to the bit."""

from __future__ import annotations

import pytest

from tests.faults.scenario import Scenario, check_equal, check_exactly_once, run
from tests.support.training import Fault


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_state_of_a_replacement(rank: int, accumulate: int) -> None:
    """Weights, optimizer, scheduler, GradScaler, loops, EarlyStopping and ModelCheckpoint, compared after every batch."""
    scenario = Scenario(
        faults=(Fault(rank, "backward", 5),),
        rejoins=1,
        pace_s=0.01,
        validate=True,
        checkpoint=True,
        fp16=True,
        trainer={"accumulate_grad_batches": accumulate},
    )
    result = run(scenario)
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    newcomer = next(said for said in result.values.values() if said.replacement)
    states = next(said.states for said in result.values.values() if not said.replacement)
    first = min(newcomer.states)
    assert len({str(states[n]["precision"]) for n in states if n < first}) > 1  # there was something to hand over
    assert set(newcomer.parts["callbacks"]) >= {"EarlyStopping", "DoomedCheckpoint"}
    assert newcomer.extra["best"] == newcomer.extra["on_disk"]
    assert len(newcomer.extra["best"]) == 2
