"""How a Trainer call reaches the rank processes.

In the process that the user started, :meth:`launch` becomes the agent of this node and returns only when the job is over.
In a rank process it enters the call: newcomers skip calls that the job has behind it.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_cann.collectives import admission
from lightning_cann.errors import ConfigurationError, FaultToleranceError
from lightning_cann.launch.agent import Agent, AgentSettings
from lightning_cann.launch.processes import CommandStarter, FunctionStarter, script_command
from lightning_cann.launch.runtime import Runtime, is_rank_process

__all__ = ["SkipCall", "make_launcher"]

log = logging.getLogger(__name__)


class SkipCall(BaseException):
    """The job is past this trainer call: a newcomer leaves it (caught by the launcher)."""


def make_launcher(strategy: Any, namespace: SimpleNamespace) -> Any:
    """A launcher of this namespace's type for ``strategy``."""

    class FaultTolerantLauncher(_LauncherBody, namespace.Launcher):  # type: ignore[misc,name-defined]
        pass

    return FaultTolerantLauncher(strategy)


class _LauncherBody:
    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks need functions that can be pickled: ``strategy="cann_ft_notebook"`` with a model from a module."""
        return bool(self._strategy.settings.start_method == "spawn")

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if is_rank_process():
            return self._enter(function, args, kwargs, trainer)
        self._strategy.refuse_unsupported()
        if self._strategy.num_nodes > 1:
            raise ConfigurationError(
                f"Trainer(num_nodes={self._strategy.num_nodes}): strategy='cann_ft' starts the ranks of one machine; "
                "several machines are not supported yet. Use num_nodes=1."
            )
        if self._strategy.settings.start_method == "spawn":
            return self._spawn(function, args, kwargs, trainer)
        return self._run_script()

    def kill(self, signum: int) -> None:
        """Nothing to do: processes belong to the agent, which ends them in order."""

    # ------------------------------------------------------------------------------------------ in a rank process
    def _enter(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> Any:
        strategy = self._strategy
        runtime = strategy.start_runtime()
        group = runtime.group
        runtime.calls += 1
        if not admission.enter_stage(group, runtime.calls):
            return None
        fitting = trainer is not None and trainer.state.fn == strategy._namespace.TrainerFn.FITTING
        if group.solo and not fitting:
            if not admission.wait_for_next_stage(group):
                self._job_is_over(group.finished)
            return None
        try:
            result = function(*args, **kwargs)
            if not group.solo:
                runtime.control.barrier()  # carries no data: whoever is past it has finished, not failed (R9)
            return result
        except SkipCall:
            trainer._teardown()
            if group.finished:
                self._job_is_over(group.finished)
            return None

    def _job_is_over(self, reason: str) -> None:
        log.info("rank %d: %s", self._strategy.global_rank, reason)
        sys.exit(0)

    # ------------------------------------------------------------------------------------------ in the user's process
    def _agent(self, starter: Any) -> Agent:
        strategy = self._strategy
        return Agent(
            AgentSettings(
                coordinator=strategy.settings.coordinator_settings(strategy.num_processes * strategy.num_nodes),
                nproc=strategy.num_processes,
                events=strategy.settings.event_log,
                max_restarts=strategy.settings.max_restarts,
                replace=strategy.settings.replace,
            ),
            starter,
        )

    def _run_script(self) -> Any:
        """Re-runs the script once per rank.  What follows in the script happens in the ranks: this process ends here."""
        if not sys.argv or not sys.argv[0] or sys.argv[0] == "-c":
            raise ConfigurationError(
                "strategy='cann_ft' re-runs the script for each rank, but this process runs none (an interactive "
                "session, or python -c): use strategy='cann_ft_spawn' with a model that can be imported."
            )
        agent = self._agent(CommandStarter(script_command()))
        code = agent.run()
        if code:
            sys.stderr.write(f"[cann_ft] the job failed: {agent.failure}\n")
        # Not sys.exit: Lightning would take that for a failure of this process' untrained copy, and call on_exception
        # hooks that save it.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _spawn(self, function: Callable[..., Any], args: Any, kwargs: Any, trainer: Any) -> Any:
        """Spawns processes that run this one call, and brings its results back."""
        folder = tempfile.mkdtemp(prefix="cann-ft-")
        try:
            # Plain pickle, not multiprocessing's: that one would put all ranks' weights into the same shared memory.
            call = pickle.dumps((trainer, function, args, kwargs))
            agent = self._agent(FunctionStarter(_call_in_rank, (folder, call)))
            code = agent.run()
            if code:
                raise _remembered_exception(folder) or FaultToleranceError(agent.failure)
            return _bring_back(folder, trainer, self._strategy)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _call_in_rank(folder: str, call: bytes) -> None:
    """Entry of a spawned rank process."""
    trainer, function, args, kwargs = pickle.loads(call)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["CANN_FT_WORLD_SIZE"])))
    target = Path(folder)
    rank = int(os.environ["CANN_FT_RANK"])
    try:
        result = trainer.strategy.launcher.launch(function, *args, trainer=trainer, **kwargs)
    except BaseException as error:
        # In a script Lightning calls this; here its handler is in the process that spawned us.
        trainer.strategy.on_exception(error)
        if isinstance(error, Exception):
            _write(target / f"error-{rank}", _picklable(error))
        raise
    runtime = Runtime.current()
    if runtime is None or runtime.group.solo or runtime.group.rank != runtime.group.leader:
        return
    callback = trainer.checkpoint_callback
    outcome = {
        "result": result,
        "state_dict": {k: v.detach().cpu().clone() for k, v in trainer.lightning_module.state_dict().items()},
        "callback_metrics": {k: v.cpu() for k, v in trainer.callback_metrics.items()},
        "best_model_path": getattr(callback, "best_model_path", None),
        "state": trainer.state,
    }
    temporary = target / f"part-{rank}"
    torch.save(outcome, temporary)
    os.replace(temporary, target / f"result-{rank}")


def _picklable(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # it holds something that cannot travel: it is told by its text
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _remembered_exception(folder: str) -> BaseException | None:
    """The exception that ended the job: the user's own before those that merely followed from it."""
    found = [pickle.loads(p.read_bytes()) for p in sorted(Path(folder).glob("error-*"))]
    found.sort(key=lambda error: isinstance(error, FaultToleranceError))
    return found[0] if found else None


def _bring_back(folder: str, trainer: Any, strategy: Any) -> Any:
    results = sorted(Path(folder).glob("result-*"))
    if not results:
        raise FaultToleranceError("the job finished, but the leader died before it could hand over its results")
    outcome = torch.load(results[0], map_location="cpu", weights_only=False)
    if trainer is None:
        return outcome["result"]
    if trainer.state.fn == strategy._namespace.TrainerFn.FITTING:
        trainer.lightning_module.load_state_dict(outcome["state_dict"], strict=False)
    if outcome["best_model_path"] is not None and trainer.checkpoint_callback is not None:
        trainer.checkpoint_callback.best_model_path = outcome["best_model_path"]
    trainer.callback_metrics.update(outcome["callback_metrics"])
    trainer.state = outcome["state"]
    return outcome["result"]
