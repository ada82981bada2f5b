"""How training ends before its end: asked to leave, asked to stop, an exception, no way to go on.

A mixin of the strategy (:mod:`.fault_tolerant`); also the barrier that stands in for Lightning's endless one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

from fsspec.core import url_to_fs

from lightning_cann.errors import Excluded, FaultToleranceError
from lightning_cann.launch.runtime import Runtime
from lightning_cann.strategies.elastic_data import ElasticData
from lightning_cann.strategies.launchers import SkipCall

__all__ = ["Endings", "ViewBarrier"]

log = logging.getLogger(__name__)

FINAL_CHECKPOINT = "cann_ft-final.ckpt"  # in the Trainer's default_root_dir

class Endings:
    _namespace: SimpleNamespace
    _runtime: Runtime | None
    _trainer: Any
    _data: ElasticData | None
    is_global_zero: Any
    checkpoint_io: Any

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        """SIGTERM to one rank is a planned leave: the others go on at once."""
        assert self._runtime is not None
        self._runtime.leave("SIGTERM")
        sys.exit(128 + signal.SIGTERM)

    def _stop_cleanly(self, reason: str) -> None:
        """All members are at the same safe point, and all are told to end."""
        assert self._runtime is not None
        self._runtime.control.barrier()  # what it writes is stable
        if self.is_global_zero:
            path = self._write_final_checkpoint()
            log.warning("%s; state saved in %s (fit(ckpt_path=...) goes on from there)", reason, path)
        self._runtime.control.barrier()
        sys.exit(0)

    def _write_final_checkpoint(self) -> str:
        """Beside, then renamed: a full disk or a second failure must not cost an earlier file."""
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        path = os.path.join(self._trainer.default_root_dir, FINAL_CHECKPOINT)
        files, name = url_to_fs(path)
        try:
            self.checkpoint_io.save_checkpoint(checkpoint, path + ".part")
            files.mv(name + ".part", name)
        except OSError:
            if files.exists(name + ".part"):
                files.rm(name + ".part")
            raise
        return path

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        runtime = self._runtime
        if runtime is None or isinstance(exception, (SkipCall, Excluded, SystemExit)):
            return
        if isinstance(exception, FaultToleranceError):
            runtime.failed = runtime.failed or str(exception)
            self._save_last_words(exception)
        else:
            runtime.report_exception(exception)

    def _save_last_words(self, exception: BaseException) -> None:
        """A final checkpoint when training cannot go on.  All survivors hold the same state; the leader writes it."""
        trainer = self._trainer
        if trainer is None or trainer.state.fn != self._namespace.TrainerFn.FITTING or not self.is_global_zero:
            return
        if self._runtime is None or not self._runtime.steps:
            return  # nothing to save, and an earlier run's file may lie there
        if self._data is not None:
            self._data.abandon()  # its gradients are in no checkpoint
        try:
            path = self._write_final_checkpoint()
        except (OSError, RuntimeError) as error:
            log.error("training stops: %s. The last state could not be written: %s", exception, error)
        else:
            log.error("training stops: %s. The last committed state is in %s", exception, path)


class ViewBarrier:
    """Stands in for Lightning's ``_InfiniteBarrier`` in rank processes."""

    def __call__(self) -> None:
        runtime = Runtime.current()
        if runtime is not None:
            runtime.control.barrier()

    def __enter__(self) -> ViewBarrier:
        return self

    def __exit__(self, *details: Any) -> None:
        if details[0] is None:
            self()
