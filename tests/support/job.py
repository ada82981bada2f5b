"""Runs a function in W real rank processes under a real agent and coordinator.

    result = run_job(target, 3, args=(...), max_failures=None)
    result.code, result.failure, result.events, result.values      # values: rank -> what record() was given last

``target(*args)`` runs in each rank process, as the user's script would: it makes a Trainer with ``strategy="cann_ft"`` and
calls ``fit``.  Processes are forked from a fork server that has imported torch and Lightning, so that a replacement is
there in a fraction of a second.  ``record(value)`` hands a picklable value back, per logical rank and process.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_cann.launch.agent import Agent, AgentSettings
from lightning_cann.launch.processes import FunctionStarter
from lightning_cann.metrics.events import read_events
from lightning_cann.settings import FaultToleranceSettings

PRELOAD = ["lightning.pytorch", "torchmetrics", "lightning_cann.strategies.fault_tolerant", "tests.support.training"]


@dataclasses.dataclass
class JobResult:
    code: int
    failure: str
    events: list[dict[str, Any]]
    values: dict[int, Any]
    """Logical rank -> last recorded value of the process that held it last."""
    all_values: list[tuple[int, str, Any]]
    """(rank, member id, value) of every process that recorded one."""

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


def record(value: Any) -> None:
    """In a rank process: hands ``value`` to the test (the last one of a process counts)."""
    folder = Path(os.environ["CANN_FT_TEST_FOLDER"])
    name = f"{os.environ['CANN_FT_RANK']}.{os.environ['CANN_FT_MEMBER_ID']}"
    temporary = folder / f".{name}"
    temporary.write_bytes(pickle.dumps(value))
    os.replace(temporary, folder / f"value.{name}")


def is_replacement() -> bool:
    """In a rank process: whether it was started to replace one that died."""
    return os.environ["CANN_FT_MEMBER_ID"].split("-")[1] != "1"


def _target(folder: str, path: list[str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    sys.path[:] = path
    os.environ["CANN_FT_TEST_FOLDER"] = folder
    torch.set_num_threads(1)
    os.chdir(folder)
    function(*args)


def run_job(
    target: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    on_agent: Callable[[Agent], None] | None = None,
    agent_options: dict[str, Any] | None = None,
    **settings: Any,
) -> JobResult:
    """Runs one job to its end.  ``settings`` are those of :class:`FaultToleranceSettings`."""
    chosen = FaultToleranceSettings(**settings)
    with tempfile.TemporaryDirectory(prefix="cann-ft-test-") as folder:
        events = os.path.join(folder, "events.jsonl")
        agent = Agent(
            AgentSettings(
                coordinator=chosen.coordinator_settings(world_size),
                nproc=world_size,
                events=events,
                replace=chosen.replace,
                **{"grace_s": 20.0, **(agent_options or {})},
            ),
            FunctionStarter(
                _target, (folder, list(sys.path), target, args), method="forkserver", preload=PRELOAD
            ),
            on_event,
        )
        if on_agent is not None:
            on_agent(agent)
        code = agent.run()
        found = []
        for path in sorted(Path(folder).glob("value.*"), key=lambda p: int(p.name.split("-")[1])):
            _, rank, member_id = path.name.split(".", 2)
            found.append((int(rank), member_id, pickle.loads(path.read_bytes())))
        log = read_events(events) if os.path.exists(events) else []
        return JobResult(code, agent.failure, log, {rank: value for rank, _, value in found}, found)
