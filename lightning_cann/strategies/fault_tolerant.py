"""The strategy: Lightning's DDP, carried by a view of members that may die and be replaced.

What Lightning sees is fixed for the whole run: ``world_size`` W and this process's ``global_rank``.  What moves underneath
is the view.  Everything that communicates goes through it: gradients by the reducer, everything else by the default
process group or the overrides here.

The parts: :mod:`.launchers` (processes), :mod:`.elastic_data` (shards), :mod:`.handover` (state of replacements),
:mod:`.leadership` (loggers, progress bar), :mod:`.vitals` (metrics).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cann.collectives import admission
from lightning_cann.collectives.view import View
from lightning_cann.ddp.reducer import GradientReducer
from lightning_cann.ddp.transport import ViewTransport
from lightning_cann.errors import ConfigurationError
from lightning_cann.launch.runtime import Runtime, is_rank_process
from lightning_cann.settings import FaultToleranceSettings
from lightning_cann.strategies.elastic_data import ElasticData
from lightning_cann.strategies.endings import Endings, ViewBarrier
from lightning_cann.strategies.handover import dump_state, keep_pace, load_state, seed_newcomer
from lightning_cann.strategies.launchers import SkipCall, make_launcher
from lightning_cann.strategies.leadership import Leadership
from lightning_cann.strategies.vitals import Vitals

__all__ = ["FaultTolerantMixin"]

log = logging.getLogger(__name__)

_DDP_ARGUMENTS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "start_method"),
)


class FaultTolerantMixin(Endings):
    """Data-parallel training that goes on when ranks die, as a Lightning strategy (``strategy="cann_ft"``).

    Args:
        max_failures: logical ranks that may be without a member at one time before training stops; None: no limit.
            Not given: HCCL_FT_MAX_FAILURES, else 3.
        min_members: training stops when fewer members are left.
        lease_s: seconds of silence after which a member is excluded (frozen process, cut network).
        replace: whether a rank that died is started again.
        max_restarts: replacements of one rank in a row that end before they train; then the rank is given up.
        on_rank_exception: an exception of your code on one rank: ``"fail"`` ends the job, ``"replace"`` replaces the rank.
        start_method: ``"popen"`` re-runs the script for each rank, ``"spawn"`` spawns interpreters (notebooks, tests).
        process_group_backend: ``"gloo"``, ``"nccl"``, ``"hccl"``; None: by the device.
        find_unused_parameters: as in DDP.
        bucket_cap_mb: as in DDP (MiB).
        broadcast_buffers: as in DDP.
        divergence_every_n_steps: how often members compare a projection of their weights; 0: never.
        collective_timeout_s: a collective that takes longer breaks the view (seconds).
        start_timeout_s: how long the first view waits for all ranks (seconds).
        join_timeout_s: how long members wait for a newcomer to take its state (seconds).
        event_log: path of the event log (JSONL); None: no file.
        audit: keep which batches were consumed (:meth:`data_audit`).
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in ``DDPStrategy``.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    _namespace: SimpleNamespace

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``HCCL_FT_ENABLE=0`` turns recovery off: the strategy is then Lightning's own DDP."""
        if FaultToleranceSettings.enabled():
            return super().__new__(cls)
        log.warning("HCCL_FT_ENABLE=0: recovery is off, strategy='cann_ft' behaves as 'ddp'")
        return cls._namespace.DDPStrategy(**{k: v for k, v in kwargs.items() if k in _DDP_ARGUMENTS and v is not None})

    def __init__(
        self,
        *,
        max_failures: int | Literal["env"] | None = "env",
        min_members: int = 1,
        lease_s: float = 2.0,
        replace: bool = True,
        max_restarts: int = 10,
        on_rank_exception: Literal["fail", "replace"] = "fail",
        start_method: Literal["popen", "spawn"] = "popen",
        process_group_backend: str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        divergence_every_n_steps: int = 50,
        collective_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
        join_timeout_s: float = 120.0,
        event_log: str | None = None,
        audit: bool = False,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.settings = FaultToleranceSettings(
            max_failures=max_failures,
            min_members=min_members,
            lease_s=lease_s,
            replace=replace,
            max_restarts=max_restarts,
            on_rank_exception=on_rank_exception,
            start_method=start_method,
            process_group_backend=process_group_backend,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            divergence_every_n_steps=divergence_every_n_steps,
            collective_timeout_s=collective_timeout_s,
            start_timeout_s=start_timeout_s,
            join_timeout_s=join_timeout_s,
            event_log=event_log,
            audit=audit,
        )
        self._runtime: Runtime | None = None
        self._trainer: Any = None
        self._reducer: GradientReducer | None = None
        self._transport: ViewTransport | None = None
        self._data: ElasticData | None = None
        self._leadership: Leadership | None = None
        self._vitals: Vitals | None = None
        self._pacing: dict[str, Any] = {}
        self._sync_buffers_next = True
        self._modules: list[torch.nn.Module] = []
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For spawned rank processes, before anything runs."""
        return {**vars(self), "_launcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._configure_launcher()

    # ------------------------------------------------------------------------------------------ who we are
    @property
    def global_rank(self) -> int:
        return int(os.environ["CANN_FT_RANK"]) if is_rank_process() else 0

    @property
    def local_rank(self) -> int:
        return int(os.environ["CANN_FT_LOCAL_RANK"]) if is_rank_process() else 0

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes  # type: ignore[attr-defined,no-any-return]

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the leader: the lowest live logical rank."""
        if self._runtime is None:
            return self.global_rank == 0
        return self._runtime.group.leader == self._runtime.group.rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _group(self) -> Any:
        assert self._runtime is not None
        return self._runtime.group

    @property
    def _control(self) -> Any:
        assert self._runtime is not None
        return self._runtime.control

    # ------------------------------------------------------------------------------------------ start
    def _configure_launcher(self) -> None:
        self._launcher = make_launcher(self, self._namespace)

    def start_runtime(self) -> Runtime:
        """Connects this rank process with its job (once per process)."""
        if self._runtime is None:
            self._runtime = Runtime.start(self.settings.group_settings(), self.root_device)  # type: ignore[attr-defined]
            self._runtime.group.on_view.append(self._on_view)
        return self._runtime

    def setup_distributed(self) -> None:
        self._namespace.reset_seed()
        self.set_world_ranks()
        # prepare_data's barrier makes a gloo group with an unlimited time-out, on which a silent peer is waited for
        # for ever; ours is redone in the next view.
        self._namespace.data_connector._InfiniteBarrier = ViewBarrier
        trainer = self._trainer = self.lightning_module.trainer  # type: ignore[attr-defined]
        if trainer.state.fn == self._namespace.TrainerFn.FITTING:
            self._leadership = Leadership(trainer, self)  # before Lightning opens the loggers

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment  # type: ignore[attr-defined]
        if environment is not None:
            environment.set_global_rank(self.global_rank)
            environment.set_world_size(self.world_size)
        self._follow_leader()

    def _follow_leader(self) -> None:
        """``rank_zero_only`` functions run on the leader."""
        rank = 0 if self.is_global_zero else max(1, self.global_rank)
        for decorator in self._namespace.rank_zero_only:
            decorator.rank = rank

    def _on_view(self, view: View) -> None:
        self._follow_leader()
        if self._vitals is not None:
            self._vitals.on_view(view)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        fitting = trainer.state.fn == self._namespace.TrainerFn.FITTING
        self.refuse_unsupported()
        self.precision_plugin.convert_module(self.model)  # type: ignore[attr-defined]
        self.model_to_device()  # type: ignore[attr-defined]
        self._control.broadcast_tensors([*self.model.parameters(), *self.model.buffers()])  # type: ignore[attr-defined]
        if fitting:
            self._setup_training(trainer)
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        if fitting:
            self._namespace.optimizers_to_device(self.optimizers, self.root_device)  # type: ignore[attr-defined]

    def _setup_training(self, trainer: Any) -> None:
        data = self._data = ElasticData(
            trainer, self._namespace, self.global_rank, self.world_size, self.settings.audit
        )
        self._transport = ViewTransport(self._group, contributors=data.contributors, on_commit=self._committed)
        self._reducer = GradientReducer(
            self.model.named_parameters(),  # type: ignore[attr-defined]
            self._transport,
            bucket_cap_mb=self.settings.bucket_cap_mb,
            find_unused_parameters=self.settings.find_unused_parameters,
        )
        self._sync_buffers_next = True
        self._modules = list(self.model.modules())  # type: ignore[attr-defined]
        self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        self._vitals = Vitals(trainer, self._runtime, self.settings.divergence_every_n_steps)
        # Lightning broadcasts a tensor before each batch, on the default group, to learn of SIGTERM: this is where we look
        # whether somebody waits to join, which costs no message.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._safe_point
        # Its SIGTERM handler broadcasts from within the signal handler of whichever rank got the signal.
        trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm

    def refuse_unsupported(self) -> None:
        """Raises ConfigurationError for what cannot be trained; called before ranks are started, and in them."""
        module = self.lightning_module  # type: ignore[attr-defined]
        modules = [] if module is None else module.named_modules()
        layers = [name for name, layer in modules if isinstance(layer, torch.nn.SyncBatchNorm)]
        if self._layer_sync is not None or layers:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "SyncBatchNorm is not supported by strategy='cann_ft': its collectives run inside forward and backward, where "
                "a broken view could not be redone without running them again. Use BatchNorm (buffers are synchronised as "
                f"under DDP) or GroupNorm, and Trainer(sync_batchnorm=False). Found: {layers or 'sync_batchnorm=True'}."
            )

    # ------------------------------------------------------------------------------------------ newcomers
    def barrier(self, name: str | None = None) -> None:
        """Waits for all members.  For a newcomer, ``"run-stage"`` (set-up is over) is the entrance."""
        if self._alone():
            return
        if self._group.solo and name == "run-stage":
            self._join()
        else:
            self._control.barrier()

    def _alone(self) -> bool:
        """No job yet, no job any more, or an exception is on its way out of this rank: nobody would meet it in a
        collective (a callback's ``on_exception`` may save a checkpoint)."""
        interrupted = self._trainer is not None and self._trainer.state.status == self._interrupted
        return self._runtime is None or self._group.fatal is not None or interrupted

    @property
    def _interrupted(self) -> Any:
        return self._namespace.TrainerStatus.INTERRUPTED

    def _join(self) -> None:
        if not admission.admit(self._group, self._load):
            self._trainer.state.status = self._namespace.TrainerStatus.FINISHED
            raise SkipCall

    def _dump(self) -> dict[str, Any]:
        assert self._reducer is not None and self._data is not None and self._leadership is not None
        extra = {
            "reducer": self._reducer.state_dict(),
            "data": self._data.state_dict(),
            "loggers": self._leadership.identity(),
            "steps": self._runtime.steps if self._runtime else 0,
            "sync_buffers_next": self._sync_buffers_next,
            "vitals": self._vitals.state_dict() if self._vitals is not None else {},
        }
        return dump_state(self._trainer, extra)

    def _load(self, state: dict[str, Any]) -> None:
        assert self._reducer is not None and self._data is not None and self._leadership is not None
        extra = load_state(self._trainer, state, self._namespace)
        self._reducer.load_state_dict(extra["reducer"])
        self._data.load_state_dict(extra["data"])
        self._leadership.adopt_identity(extra["loggers"])
        self._sync_buffers_next = extra["sync_buffers_next"]
        assert self._runtime is not None and self._vitals is not None
        self._vitals.load_state_dict(extra["vitals"])
        self._runtime.steps = extra["steps"]
        if self._transport is not None:
            self._transport.steps = extra["steps"]
        self._pacing = extra["pacing"]
        seed_newcomer(self.global_rank, self._group.view.id.number, int(os.environ.get("PL_GLOBAL_SEED", 0)))

    def _safe_point(self) -> None:
        """Between two batches.  Between two optimizer steps also the place where newcomers are admitted."""
        assert self._data is not None
        if self._data.in_window():
            return
        self._data.at_safe_point()
        before = None if self._group.solo else self._group.view.id
        reason = admission.safe_point(self._group, self._dump)
        view = self._group.view
        admission_here = before is None or bool(view.id != before and view.install.newcomers)
        if before is None:
            keep_pace(self._trainer, self._pacing)
        if admission_here:
            self._data.members_changed(view.ranks)
            self._follow_leader()
        self._leadership_at_safe_point(admission_here)
        if reason:
            self._stop_cleanly(reason)

    def _leadership_at_safe_point(self, admission: bool = False) -> None:
        assert self._leadership is not None and self._vitals is not None
        self._leadership.at_safe_point(admission)
        self._vitals.at_safe_point()

    def on_train_start(self) -> None:
        if self._data is not None:
            self._data.apply_limit()
        super().on_train_start()  # type: ignore[misc]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._data is not None and self.world_size == 1:  # Lightning then skips the place where safe points are
            self._leadership_at_safe_point()
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def process_dataloader(self, dataloader: Any) -> Any:
        stage = self._trainer.state.stage if self._trainer is not None else None
        if self._data is not None and stage == self._namespace.RunningStage.TRAINING:
            return self._data.wrap(dataloader)
        return dataloader

    # ------------------------------------------------------------------------------------------ steps
    def _committed(self, ranks: tuple[int, ...]) -> None:
        assert self._data is not None and self._runtime is not None
        self._runtime.steps += 1
        self._data.commit(ranks)

    def pre_backward(self, closure_loss: Tensor) -> None:
        pass

    def post_backward(self, closure_loss: Tensor) -> None:
        pass

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._reducer is None or self._data is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc,no-any-return]
        if not self._data.weight():
            closure_loss = closure_loss * 0.0  # a repeated batch, to keep step: it must not count
        self._reducer.contributing = self._data.contributing()
        with self._reducer.guard():
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc,no-any-return]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._reducer is not None
        with self._reducer.no_sync():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._reducer is not None
        if self._reducer.needs_rebuild():  # as DDP: after the first step, in the order in which gradients came
            self._reducer.rebuild(self._control.broadcast(self._reducer.last_ready_order, site="bucket order"))
        with self._buffers_in_sync():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_in_sync():
            return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _buffers_in_sync(self) -> Iterator[None]:
        """DDP's ``broadcast_buffers``: before the first forward after each synchronised one, from the lowest rank."""
        if self._sync_buffers_next and self.settings.broadcast_buffers and self._reducer is not None:
            # a walk over the module tree in each step would cost more than the rest of what we do there
            buffers = list({id(b): b for x in self._modules for b in x._buffers.values() if b is not None}.values())
            self._control.follow_leader(buffers)
        yield
        self._sync_buffers_next = (
            self._reducer is not None and torch.is_grad_enabled() and self._reducer.require_sync
        )

    # ------------------------------------------------------------------------------------------ collectives
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._runtime is None else self._control.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._runtime is None:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)  # type: ignore[attr-defined]
        ranks = self._control.all_reduce(votes, dist.ReduceOp.SUM)
        return int(votes) == len(ranks) if all else bool(votes)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc,no-any-return]
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigurationError(
                f"ckpt_path={str(checkpoint_path)!r} cannot be read, it may be cut off or damaged ({error}): "
                "resume from an older checkpoint."
            ) from error

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The leader writes; if it dies meanwhile, the next one writes again."""
        if self._alone():
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[attr-defined]
            return
        self._control.barrier()  # behind it the last step is stable: no file holds one that the others lack (R9)
        written = torch.zeros(1)
        while not written.item():
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[attr-defined]
                written.fill_(1)
            self._control.all_reduce(written, dist.ReduceOp.SUM)

    # ------------------------------------------------------------------------------------------ ends
    def data_audit(self) -> dict[int, dict[str, Any]]:
        """Per epoch: samples ``expected``, ``consumed``, ``duplicates``, ``missing`` in committed steps (``audit=True``)."""
        return {} if self._data is None else self._data.report()

    def teardown(self) -> None:
        if self._leadership is not None:
            self._leadership.close()
            self._leadership = None
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        if self._data is not None:
            self._data.close()
        if self._trainer is not None:
            vars(self._trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        super().teardown()  # type: ignore[misc]
