"""SIGKILL (and SIGSTOP) of a rank at every kind of place in the program; the others go on, equal to the bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.faults.scenario import Scenario, check_equal, check_exactly_once, latencies, run
from tests.support.training import Fault

STEPS = 7  # of an epoch of the scenario at W = 3, the last batches being uneven
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}

# name -> (point, count, armed at, scenario)
POINTS: dict[str, tuple[str, int, tuple[str, int] | None, dict[str, Any]]] = {
    "before the first view": ("launch", 0, None, {}),
    "first step": ("forward", 0, None, {}),
    "forward": ("forward", 3, None, {}),
    "backward": ("backward", 3, None, {}),
    "first step, between buckets": ("launch", 1, ("batch_start", 0), {"strategy": SMALL_BUCKETS}),
    "between two buckets": ("launch", 1, ("batch_start", 3), {"strategy": SMALL_BUCKETS}),
    "before the last bucket": ("launch", 2, ("batch_start", 3), {"strategy": SMALL_BUCKETS}),
    "after the last bucket": ("reduced", 0, ("batch_start", 3), {"strategy": SMALL_BUCKETS}),
    "before the optimizer": ("committed", 0, ("batch_start", 3), {}),
    "accumulation window, first": ("forward", 2, None, {"trainer": {"accumulate_grad_batches": 2}}),
    "accumulation window, second": ("forward", 3, None, {"trainer": {"accumulate_grad_batches": 2}}),
    "validation": ("validation", 0, None, {"validate": True, "epochs": 2}),
    "sync_dist log": ("launch", 0, ("sync_log", 0), {"validate": True, "epochs": 2}),
    "after a sync_dist log": ("launch", 1, ("sync_log", 0), {"validate": True, "epochs": 2}),
    "checkpoint": ("launch", 0, ("checkpoint", 0), {"validate": True, "checkpoint": True, "epochs": 2}),
    "inside a checkpoint": ("launch", 1, ("checkpoint", 0), {"validate": True, "checkpoint": True, "epochs": 2}),
    "epoch end": ("epoch_end", 0, None, {"epochs": 2}),
    "one step before the end": ("forward", STEPS - 2, None, {}),
    "last step": ("forward", STEPS - 1, None, {}),
    "last step, reduced": ("committed", 0, ("batch_start", STEPS - 1), {}),
    "after the last step": ("batch_end", STEPS - 1, None, {}),
    "last epoch's end": ("epoch_end", 1, None, {"epochs": 2}),
}


def fault(name: str, rank: int, sig: int = signal.SIGKILL) -> tuple[Fault, dict[str, Any]]:
    point, count, armed_at, scenario = POINTS[name]
    return Fault(rank, point, count, sig, armed_at=armed_at), scenario


def check_recovery(result: Any, rank: int) -> None:
    failed = result.named("member_failed")
    assert [(e["rank"], e["cause"], e["planned"]) for e in failed] == [(rank, "SIGKILL", False)], failed
    assert latencies(result), result.events
    assert all(seconds < 1.0 for seconds in latencies(result)), latencies(result)


FAST = ("first step", "backward", "between two buckets", "after the last bucket", "before the optimizer", "sync_dist log",
        "accumulation window, second", "inside a checkpoint", "epoch end", "last step, reduced")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in POINTS])
def test_rank_0_dies(name: str) -> None:
    sudden, scenario = fault(name, 0)
    result = run(Scenario(faults=(sudden,), **scenario), replace=False)
    check_equal(result, 2)
    check_exactly_once(result)
    if name != "before the first view":
        check_recovery(result, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTS)
def test_last_rank_dies(name: str) -> None:
    sudden, scenario = fault(name, 2)
    result = run(Scenario(faults=(sudden,), **scenario), replace=False)
    check_equal(result, 2)
    check_exactly_once(result)
    if name != "before the first view":
        check_recovery(result, 2)


REPLACED = [name for name in POINTS if POINTS[name][3].get("epochs", 1) == 1 or "last" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", REPLACED)
def test_replaced(name: str, rank: int) -> None:
    """The same, but the rank comes back: its state equals the others' from its first step to the end."""
    sudden, scenario = fault(name, rank)
    scenario = {k: v for k, v in scenario.items() if k != "epochs"}
    result = run(Scenario(faults=(sudden,), rejoins=1, pace_s=0.005, **scenario))
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    assert all(seconds < 1.0 for seconds in latencies(result)), latencies(result)
    if name != "before the first view":  # there it may be in time for that view
        assert [e["rank"] for e in result.named("member_joined")] == [rank]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("forward", 2),
        *(
            pytest.param(name, rank, marks=pytest.mark.slow)
            for name, rank in [
                ("forward", 0),
                ("between two buckets", 0),
                ("between two buckets", 2),
                ("before the optimizer", 0),
                ("validation", 0),
                ("inside a checkpoint", 0),
                ("last step", 2),
            ]
        ),
    ],
)
def test_frozen(name: str, rank: int) -> None:
    """A rank stops (SIGSTOP): after its lease it is excluded, fenced and replaced; the others go on."""
    sudden, scenario = fault(name, rank, signal.SIGSTOP)
    scenario = {k: v for k, v in scenario.items() if k != "epochs"}
    scenario["strategy"] = {**scenario.get("strategy", {}), "lease_s": 1.0}
    result = run(Scenario(faults=(sudden,), rejoins=1, pace_s=0.005, **scenario), lease_s=1.0)
    check_equal(result, 3, replaced=1)
    check_exactly_once(result)
    failed = result.named("member_failed")
    assert [(e["rank"], e["cause"]) for e in failed] == [(rank, "lease expired")], failed
    assert all(seconds < 1.0 for seconds in latencies(result)), latencies(result)
